//! Objects of cudarc's that this crate keeps.

use std::mem::forget;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::sys::Driver;
use crate::device::gpu::Library;

/// Something of cudarc's, and its context. The drop leaves the thread's current context as it was,
/// while cudarc makes its own current for every call. In a child of the process that has initialised
/// the driver nothing is dropped, because no call may be made there.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    context: Option<Arc<CudaContext>>,
    thing: Option<T>,
}

impl<T> Kept<T> {
    pub(crate) fn new(context: Arc<CudaContext>, thing: T) -> Self {
        Self {
            context: Some(context),
            thing: Some(thing),
        }
    }

    /// Returns the thing, unless it was taken.
    pub(crate) fn get(&self) -> Option<&T> {
        self.thing.as_ref()
    }

    pub(crate) fn take(&mut self) -> Option<T> {
        self.thing.take()
    }

    pub(super) fn context(&self) -> Option<&Arc<CudaContext>> {
        self.context.as_ref()
    }
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        // cudarc's objects need a driver, so there is one.
        let (Ok(driver), Some(context)) = (Driver::get(), self.context.take()) else {
            return;
        };
        if !driver.process().is_this() {
            return forget((context, self.thing.take()));
        }
        // SAFETY: `context` keeps the raw context alive.
        let pushed = unsafe { driver.push_context(context.cu_ctx()) }.is_ok();
        drop(self.thing.take());
        // Destroying a context takes it off the stack by itself; releasing a primary one does not.
        match Arc::into_inner(context) {
            Some(context) if !context.is_primary() => return drop(context),
            context => drop(context),
        }
        if pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed above,
            // or put in its place by cudarc.
            let _ = unsafe { driver.pop_context(&raw mut popped) };
        }
    }
}
