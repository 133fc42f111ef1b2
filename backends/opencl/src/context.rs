//! [`Context`]: a device in a context, and what every part of the backend needs of it.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow_device::device::parts::{Failure, Worker};
use arrow_device::device::{DeviceId, device_error};
use arrow_device::{Error, Result};
use opencl_sys::{CL_INVALID_CONTEXT, cl_context, cl_device_id};

use crate::codes;
use crate::object::{ContextObject, Event};
use crate::sys::{Answer, Cl, Failed, create};

/// A device in a context.
pub(crate) struct Context {
    pub(crate) cl: &'static Cl,
    pub(crate) id: DeviceId,
    object: ManuallyDrop<ContextObject>,
    device: cl_device_id,
    /// The work that has failed, if some has.
    pub(crate) failure: Arc<Failure>,
    /// Polls events. Its jobs do not block.
    pub(crate) worker: Worker,
}

// SAFETY: a device's handle may be used on any thread; the context keeps it alive.
unsafe impl Send for Context {}
// SAFETY: the device's handle is only read, and all else here may be used on several threads at once.
unsafe impl Sync for Context {}

impl Context {
    /// # Safety
    /// `device` is one of the context's.
    pub(crate) unsafe fn new(
        cl: &'static Cl,
        id: DeviceId,
        object: ContextObject,
        device: cl_device_id,
    ) -> Self {
        Self {
            cl,
            id,
            object: ManuallyDrop::new(object),
            device,
            failure: Arc::default(),
            worker: Worker::new("arrow-device opencl"),
        }
    }

    pub(crate) fn raw(&self) -> cl_context {
        self.object.raw()
    }

    pub(crate) fn device(&self) -> cl_device_id {
        self.device
    }

    /// Returns an error if the device cannot be used: it has failed, or this is a child of the process that opened it.
    pub(crate) fn check_usable(&self) -> Result<()> {
        self.check_process()?;
        self.failure.check()
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        // As from a runtime that was not initialised.
        self.cl.process.check(self.id, CL_INVALID_CONTEXT)
    }

    /// Returns whether this is a child of the process that opened the device. Nothing there may call the runtime, or take a lock
    /// that another thread may have held.
    pub(crate) fn is_forked(&self) -> bool {
        !self.cl.process.is_this()
    }

    /// Names the device in an error.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|failed| self.error(failed))
    }

    pub(crate) fn error(&self, failed: Failed) -> Error {
        device_error(self.id, failed.call, failed.code, codes::name(failed.code))
    }

    /// As [`check`](Self::check), of a call that allocates.
    pub(crate) fn check_allocation<T>(&self, answer: Answer<T>, bytes: usize) -> Result<T> {
        answer.map_err(|failed| match codes::is_out_of_memory(failed.code) {
            true => self.out_of_memory(failed.call, bytes),
            false => self.error(failed),
        })
    }

    pub(crate) fn out_of_memory(&self, operation: &'static str, bytes: usize) -> Error {
        Error::OutOfMemory {
            device: self.id,
            operation,
            bytes,
        }
    }

    pub(crate) fn not_supported(&self, operation: &'static str, reason: String) -> Error {
        Error::NotSupported {
            device: self.id,
            operation,
            reason: reason.into(),
        }
    }
}

thread_local! {
    /// Whether this thread is in a callback of the runtime.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs what a callback of the runtime is for.
pub(crate) fn in_callback(work: impl FnOnce()) {
    let outer = IN_CALLBACK.replace(true);
    work();
    IN_CALLBACK.set(outer);
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the object is not used again.
        let object = unsafe { ManuallyDrop::take(&mut self.object) };
        match IN_CALLBACK.get() {
            // The runtime would end the context's threads, of which this may be one.
            true => Worker::new("arrow-device opencl end").push(move || drop(object)),
            false => drop(object),
        }
    }
}

/// Makes a user event of a context, which is pending.
///
/// # Safety
/// The context is live.
pub(crate) unsafe fn user_event(cl: &'static Cl, context: cl_context) -> Answer<Event> {
    // SAFETY: the caller guarantees the context (see `# Safety`).
    let event = unsafe { create!(cl, clCreateUserEvent(context)) }?;
    // SAFETY: the event was just made, and nobody else has it.
    Ok(unsafe { Event::own(cl, event) })
}

/// Locks a mutex. No code of this crate leaves what it protects half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
