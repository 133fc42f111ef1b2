//! A task that a producer has sent.

use std::borrow::Cow;
use std::collections::HashMap;
use std::{mem, ptr};

use crate::abi::{ArrowDeviceType, FFI_ArrowAsyncTask, FFI_ArrowDeviceArray, guard};
use crate::error::{Error, Result};

/// A task, which is extracted exactly once: when it is dropped, with null.
#[derive(Debug)]
pub(crate) struct Task {
    task: FFI_ArrowAsyncTask,
    metadata: HashMap<String, String>,
}

impl Task {
    /// # Safety
    /// `task` keeps to the interface and has not been extracted.
    pub(super) unsafe fn new(task: FFI_ArrowAsyncTask) -> Self {
        Self {
            task,
            metadata: HashMap::new(),
        }
    }

    pub(super) fn with_metadata(mut self, metadata: HashMap<String, String>) -> Self {
        self.metadata = metadata;
        self
    }

    pub(super) fn can_be_extracted(&self) -> bool {
        self.task.extract_data.is_some()
    }

    /// Returns the array and its metadata.
    pub(super) fn extract(
        mut self,
        declared: ArrowDeviceType,
    ) -> Result<(FFI_ArrowDeviceArray, HashMap<String, String>)> {
        let mut out = FFI_ArrowDeviceArray::empty();
        // What a failed call leaves in `out` is released when it is dropped.
        let errno = self.call(&raw mut out)?;
        if errno != 0 {
            return Err(Error::AsyncProducer {
                errno,
                message: Cow::Borrowed("extract_data failed"),
                metadata: HashMap::new(),
            });
        }
        if out.is_released() {
            return Err(Error::invalid("extract_data", "returned no array"));
        }
        if out.device_type() != declared {
            let what = format!("is {} in a stream of {declared}", out.device_type());
            return Err(Error::invalid("array.device_type", what));
        }
        Ok((out, mem::take(&mut self.metadata)))
    }

    fn call(&mut self, out: *mut FFI_ArrowDeviceArray) -> Result<i32> {
        // Taken out, so that there is no second call.
        let mut task = mem::replace(&mut self.task, FFI_ArrowAsyncTask::empty());
        match task.extract_data {
            Some(extract) => guard::call_foreign("extract_data", || {
                // SAFETY: the caller of `new` guarantees a task that was not extracted. This is its only extraction, and `out` is
                // null or points to an empty struct.
                unsafe { extract(&raw mut task, out) }
            }),
            None => Ok(0),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // A drop cannot report an error.
        let _ = self.call(ptr::null_mut());
    }
}
