//! Memory that somebody else has from the driver.

use std::ffi::c_void;
use std::ptr;

use crate::fake::fake;

/// Memory of the driver, freed in the end. The calls are the stand-in's own, whichever vendor's are tested on it.
pub(crate) struct Block {
    pub(crate) ptr: *mut c_void,
    ordinal: i32,
    pinned: bool,
}

// SAFETY: the address is the block's own, and the driver's calls may come from any thread.
unsafe impl Send for Block {}
// SAFETY: the address is the block's own, and the driver's calls may come from any thread; nothing changes it.
unsafe impl Sync for Block {}

impl Block {
    /// What `allocate` writes. The primary context is kept as long as the memory.
    fn new(ordinal: i32, pinned: bool, allocate: impl FnOnce(&mut *mut c_void) -> i32) -> Self {
        let (mut ptr, mut context): (_, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
        // Released in `drop`.
        let retained = fake!(cuDevicePrimaryCtxRetain(&raw mut context => *mut *mut c_void,
            ordinal => i32) -> i32);
        assert_eq!(retained, 0);
        with_context(ordinal, || assert_eq!(allocate(&mut ptr), 0));
        Self {
            ptr,
            ordinal,
            pinned,
        }
    }

    pub(crate) fn device(ordinal: i32, bytes: usize) -> Self {
        Self::new(
            ordinal,
            false,
            |ptr| fake!(cuMemAlloc_v2(ptr => &mut *mut c_void, bytes => usize) -> i32),
        )
    }

    pub(crate) fn managed(ordinal: i32, bytes: usize) -> Self {
        Self::new(
            ordinal,
            false,
            |ptr| fake!(cuMemAllocManaged(ptr => &mut *mut c_void, bytes => usize, 1 => u32) -> i32),
        )
    }

    pub(crate) fn pinned(ordinal: i32, bytes: usize) -> Self {
        Self::new(
            ordinal,
            true,
            |ptr| fake!(cuMemHostAlloc(ptr => &mut *mut c_void, bytes => usize, 1 => u32) -> i32),
        )
    }

    /// Fills memory that the host can write.
    pub(crate) fn with<T: Copy>(self, values: &[T]) -> Self {
        // SAFETY: the block is host memory, in which callers have allocated room for the values.
        unsafe {
            ptr::copy_nonoverlapping(values.as_ptr(), self.ptr.cast(), values.len());
        }
        self
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        with_context(self.ordinal, || {
            let code = match self.pinned {
                true => fake!(cuMemFreeHost(self.ptr => *mut c_void) -> i32),
                false => fake!(cuMemFree_v2(self.ptr => *mut c_void) -> i32),
            };
            assert_eq!(code, 0);
        });
        // Retained in `new`.
        let released = fake!(cuDevicePrimaryCtxRelease_v2(self.ordinal => i32) -> i32);
        assert_eq!(released, 0);
    }
}

/// Runs calls of the driver in a device's primary context.
fn with_context(ordinal: i32, calls: impl FnOnce()) {
    let (mut context, mut popped): (*mut c_void, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
    let retained = fake!(cuDevicePrimaryCtxRetain(&raw mut context => *mut *mut c_void,
        ordinal => i32) -> i32);
    assert_eq!(retained, 0);
    assert_eq!(fake!(cuCtxPushCurrent_v2(context => *mut c_void) -> i32), 0);
    calls();
    assert_eq!(
        fake!(cuCtxPopCurrent_v2(&raw mut popped => *mut *mut c_void) -> i32),
        0
    );
    let released = fake!(cuDevicePrimaryCtxRelease_v2(ordinal => i32) -> i32);
    assert_eq!(released, 0);
}
