//! The calling thread's current device, and the primary contexts of devices.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::Driver;
use crate::ffi::*;

thread_local! {
    static CURRENT_DEVICE: Cell<c_int> = const { Cell::new(0) };
}

pub(crate) fn current_device() -> c_int {
    CURRENT_DEVICE.get()
}

pub(crate) fn set_current_device(ordinal: c_int) {
    CURRENT_DEVICE.set(ordinal);
}

/// The primary contexts that were retained, by ordinal, as addresses.
fn retained() -> MutexGuard<'static, BTreeMap<c_int, usize>> {
    static RETAINED: Mutex<BTreeMap<c_int, usize>> = Mutex::new(BTreeMap::new());
    RETAINED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The primary context of a device, retained at its first use. CUDA's devices are their ordinals.
pub(crate) fn primary(driver: &Driver, ordinal: c_int) -> Outcome<Handle> {
    let mut retained = retained();
    if let Some(context) = retained.get(&ordinal) {
        return Ok(std::ptr::with_exposed_provenance_mut(*context));
    }
    let mut context = null_mut();
    // SAFETY: `context` is valid for the write of a handle.
    unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, ordinal) }?;
    retained.insert(ordinal, context.expose_provenance());
    Ok(context)
}

/// Releases what [`primary`] retained; `None` if nothing was.
pub(crate) fn release(driver: &Driver, ordinal: c_int) -> Option<Outcome> {
    retained().remove(&ordinal)?;
    // SAFETY: the function takes no pointers. The context was retained here once, and is forgotten.
    Some(unsafe { driver.cuDevicePrimaryCtxRelease_v2(ordinal) })
}

/// Runs with a context current, and leaves the thread's context stack as it was.
pub(crate) fn within<T>(
    driver: &Driver,
    context: Handle,
    body: impl FnOnce() -> Outcome<T>,
) -> Outcome<T> {
    struct Pushed<'a>(&'a Driver);
    impl Drop for Pushed<'_> {
        fn drop(&mut self) {
            let mut popped = null_mut();
            // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed below:
            // no call in between leaves the stack otherwise.
            let _ = unsafe { self.0.cuCtxPopCurrent_v2(&mut popped) };
        }
    }
    // SAFETY: the handle is not followed here, and the driver refuses a context that is gone.
    unsafe { driver.cuCtxPushCurrent_v2(context) }?;
    let _pushed = Pushed(driver);
    body()
}
