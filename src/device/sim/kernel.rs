//! Kernels: closures that run on a queue with a view of the device's memory.

use std::cell::RefCell;
use std::sync::Arc;

use arrow_buffer::{ArrowNativeType, BooleanBuffer, Buffer};

use super::memory::SimBacking;
use super::state::Core;
use super::{INVALID_ACCESS, KERNEL};
use crate::abi::guard;
use crate::device::DevicePtr;
use crate::error;

/// A simulated device's memory, as a kernel sees it.
///
/// Every access is checked against the live allocations. A failed access returns an error and makes
/// the device fail, whether or not the kernel returns that error.
///
/// Views borrow the `SimMemory`, so there is no other view beside one that writes: read, collect what the kernel makes, and
/// [`write`](Self::write) it.
pub struct SimMemory<'a> {
    core: &'a Core,
    /// The first failed access.
    fault: RefCell<Option<String>>,
    /// What views are of: `SimDevice::free_now` may end it meanwhile.
    kept: RefCell<Vec<Arc<SimBacking>>>,
}

impl std::fmt::Debug for SimMemory<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimMemory({})", self.core.id)
    }
}

impl SimMemory<'_> {
    /// Returns `elements` elements from `ptr`.
    pub fn slice<T: ArrowNativeType>(
        &self,
        ptr: DevicePtr,
        elements: usize,
    ) -> Result<&[T], String> {
        let start = self.start::<T>(ptr, elements)?;
        // SAFETY: `start` has checked address, length and alignment; any bits are a valid
        // `ArrowNativeType`. Only the engine writes device memory, the engine is running this
        // kernel, and views that write borrow `self` exclusively. (Copies by a peer device, whose
        // caller upholds that nothing else writes what they read, only read.)
        Ok(unsafe { std::slice::from_raw_parts(start, elements) })
    }

    /// Returns `elements` elements from `ptr`, to read and write.
    pub fn slice_mut<T: ArrowNativeType>(
        &mut self,
        ptr: DevicePtr,
        elements: usize,
    ) -> Result<&mut [T], String> {
        let start = self.start::<T>(ptr, elements)?;
        // SAFETY: `start` has checked address, length and alignment; any bits are a valid
        // `ArrowNativeType`. Only the engine writes device memory, and it is running this kernel;
        // `self` is borrowed exclusively, so there is no other view.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, elements) })
    }

    /// Writes `values` from `ptr` on.
    pub fn write<T: ArrowNativeType>(
        &mut self,
        ptr: DevicePtr,
        values: &[T],
    ) -> Result<(), String> {
        self.slice_mut(ptr, values.len())?.copy_from_slice(values);
        Ok(())
    }

    /// Returns a copy of `rows` bits of a bitmap, least significant bit first. `start` is the
    /// bitmap's address and the number of bits before the first row's. If it is `None`, as for a
    /// column without a validity bitmap, all bits are set.
    pub fn bits(
        &self,
        start: Option<(DevicePtr, usize)>,
        rows: usize,
    ) -> Result<BooleanBuffer, String> {
        let Some((ptr, bit_offset)) = start else {
            return Ok(BooleanBuffer::new_set(rows));
        };
        let (byte, bit) = (bit_offset / 8, bit_offset % 8);
        let bytes = bit.checked_add(rows).ok_or("too many bits")?.div_ceil(8);
        let bytes = self.slice::<u8>(ptr.offset(byte), bytes)?;
        Ok(BooleanBuffer::new(Buffer::from(bytes), bit, rows))
    }

    /// Returns where the engine finds `elements` elements from `ptr`; dangling and aligned if there
    /// are none.
    fn start<T>(&self, ptr: DevicePtr, elements: usize) -> Result<*mut T, String> {
        if elements == 0 {
            return Ok(std::ptr::dangling_mut());
        }
        let checked = match elements.checked_mul(size_of::<T>()) {
            None => Err(format!("{elements} elements at {ptr:?}: too many")),
            Some(bytes) => self.core.locate(ptr, bytes),
        };
        let (memory, start) = checked.inspect_err(|message| {
            self.fault.borrow_mut().get_or_insert(message.clone());
        })?;
        self.kept.borrow_mut().push(memory);
        let start = start.cast::<T>();
        let unaligned = || format!("{ptr:?} is not aligned to {} bytes", align_of::<T>());
        start.is_aligned().then_some(start).ok_or_else(unaligned)
    }
}

/// Runs a kernel. The caller is the engine of `core`.
pub(super) fn run(
    core: &Core,
    kernel: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String>,
) -> error::Result<()> {
    let mut memory = SimMemory {
        core,
        fault: RefCell::new(None),
        kept: RefCell::default(),
    };
    let result = guard::call_foreign("kernel", || kernel(&mut memory));
    if let Some(message) = memory.fault.into_inner() {
        return Err(core.error("kernel", INVALID_ACCESS, message));
    }
    let result = result.unwrap_or_else(|panic| Err(panic.to_string()));
    result.map_err(|message| core.error("kernel", KERNEL, message))
}
