//! [`Context`]: a device in a context, and what every part of the backend needs of it.

use std::sync::Arc;

use arrow_device::device::parts::exit::{self, Inside};
use arrow_device::device::parts::{Failure, Worker};
use arrow_device::device::{DeviceId, device_error};
use arrow_device::{Error, Result};
use opencl_sys::*;

use crate::platform::{Kind, OpenClDeviceInfo};
use crate::sys::{Answer, Cl, Failed, Object, code_name};

/// A device in a context.
pub(crate) struct Context {
    pub(crate) cl: &'static Cl,
    pub(crate) id: DeviceId,
    object: Object,
    device: cl_device_id,
    pub(crate) kind: Kind,
    pub(crate) info: OpenClDeviceInfo,
    /// The work that has failed, if some has.
    pub(crate) failure: Arc<Failure>,
    /// Polls the events that queues were made to wait for. Its jobs do not block.
    pub(crate) worker: Worker,
}

// SAFETY: a device's handle may be used on any thread; the context keeps it alive.
unsafe impl Send for Context {}
// SAFETY: the device's handle is only read, and all else here may be used on several threads at once.
unsafe impl Sync for Context {}

impl Context {
    /// # Safety
    /// `device` is one of the context's, and has this kind of memory.
    pub(crate) unsafe fn new(
        cl: &'static Cl,
        id: DeviceId,
        object: Object,
        device: cl_device_id,
        (info, kind): (OpenClDeviceInfo, Kind),
    ) -> Self {
        exit::watch();
        Self {
            cl,
            id,
            object,
            device,
            kind,
            info,
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

    /// Lets this thread into the runtime while the result lives. An error if the process ends, or is a child of the one that opened the
    /// device: nothing there may call the runtime, or take a lock that another thread may have held.
    pub(crate) fn enter(&self) -> Result<Inside> {
        // As from a runtime that was not initialised.
        self.cl.process.check(self.id, CL_INVALID_CONTEXT)?;
        let ends = "the process is ending";
        exit::enter().ok_or_else(|| device_error(self.id, "exit", CL_INVALID_CONTEXT, ends))
    }

    /// As [`enter`](Self::enter); also an error if the device has failed.
    pub(crate) fn enter_usable(&self) -> Result<Inside> {
        let inside = self.enter()?;
        self.failure.check().map(|()| inside)
    }

    /// Names the device in an error.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|failed| self.error(failed))
    }

    pub(crate) fn error(&self, failed: Failed) -> Error {
        device_error(self.id, failed.call, failed.code, code_name(failed.code))
    }

    /// As [`check`](Self::check), of a call that allocates.
    pub(crate) fn check_allocation<T>(&self, answer: Answer<T>, bytes: usize) -> Result<T> {
        answer.map_err(|failed| match failed.code {
            CL_MEM_OBJECT_ALLOCATION_FAILURE | CL_OUT_OF_RESOURCES | CL_OUT_OF_HOST_MEMORY => {
                self.out_of_memory(failed.call, bytes)
            }
            _ => self.error(failed),
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
