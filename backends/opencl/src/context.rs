//! [`Context`]: a device in a context, and its errors.

use std::fmt;

use arrow_device::device::device_error;
use arrow_device::device::engine::Health;
use arrow_device::{Error, Result};
use opencl_sys::*;

use crate::platform::{Kind, OpenClDeviceInfo};
use crate::sys::{Answer, Cl, Failed, Object, code_name};

/// A device in a context.
pub(crate) struct Context {
    pub(crate) cl: &'static Cl,
    pub(crate) health: Health,
    pub(crate) object: Object,
    pub(crate) device: cl_device_id,
    pub(crate) kind: Kind,
    pub(crate) info: OpenClDeviceInfo,
}

// SAFETY: a device's handle may be used on any thread; the context keeps it alive.
unsafe impl Send for Context {}
// SAFETY: the device's handle is only read, and all else here may be used on several threads at once.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {:?}", self.health.id(), self.object)
    }
}

impl Context {
    pub(crate) fn raw(&self) -> cl_context {
        self.object.raw()
    }

    /// Names the device in an error.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|failed| self.error(failed))
    }

    pub(crate) fn error(&self, Failed { call, code }: Failed) -> Error {
        device_error(self.health.id(), call, code, code_name(code))
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
            device: self.health.id(),
            operation,
            bytes,
        }
    }

    pub(crate) fn not_supported(
        &self,
        operation: &'static str,
        reason: impl Into<String>,
    ) -> Error {
        Error::NotSupported {
            device: self.health.id(),
            operation,
            reason: reason.into().into(),
        }
    }
}
