//! The producer's side of the async device stream: `ArrowAsyncTask`, `ArrowAsyncProducer`.

use std::ffi::{c_char, c_int, c_void};
use std::{fmt, ptr};

use super::handover::movable;
use super::{ArrowDeviceType, FFI_ArrowDeviceArray};

/// `ArrowAsyncTask.extract_data`: writes the task's array to the second argument, unless that is
/// null, and frees the task. It is called exactly once; returns 0 or an errno.
pub type TaskExtractData =
    unsafe extern "C-unwind" fn(*mut FFI_ArrowAsyncTask, *mut FFI_ArrowDeviceArray) -> c_int;

/// `ArrowAsyncProducer.request`: requests this many more arrays, at least 1.
pub type ProducerRequest = unsafe extern "C-unwind" fn(*mut FFI_ArrowAsyncProducer, i64);

/// `ArrowAsyncProducer.cancel`: requests the end of the stream. Thread-safe and idempotent.
pub type ProducerCancel = unsafe extern "C-unwind" fn(*mut FFI_ArrowAsyncProducer);

/// `struct ArrowAsyncTask`: one array that a producer has ready ("The ArrowAsyncTask structure" of
/// the specification).
///
/// There is no release callback: calling `extract_data`, exactly once, hands the array over and
/// frees the task; with null it only frees the task. **Dropping this struct calls nothing**: a task
/// that is dropped before its extraction leaks what its producer keeps for it.
#[must_use = "a task that is dropped leaks what its producer keeps; call `extract_data` once"]
#[repr(C)]
pub struct FFI_ArrowAsyncTask {
    pub(crate) extract_data: Option<TaskExtractData>,
    pub(crate) private_data: *mut c_void,
}

/// `struct ArrowAsyncProducer`: the callbacks through which a consumer requests arrays or the end
/// of the stream ("The ArrowAsyncProducer structure" of the specification).
///
/// It belongs to the producer that made it and lives at least until that producer calls the
/// handler's release callback; a consumer only has a pointer. There is nothing to release: the
/// `release` member that the specification's text shows does not exist in `abi.h`, and the struct
/// has 40 bytes.
#[repr(C)]
pub struct FFI_ArrowAsyncProducer {
    pub(crate) device_type: ArrowDeviceType,
    pub(crate) request: Option<ProducerRequest>,
    pub(crate) cancel: Option<ProducerCancel>,
    pub(crate) additional_metadata: *const c_char,
    pub(crate) private_data: *mut c_void,
}

// SAFETY: a consumer may extract on a thread of its choice. Whoever made the struct (`from_parts`,
// `from_raw`) guaranteed that the producer's callback allows it.
unsafe impl Send for FFI_ArrowAsyncTask {}
// SAFETY: a consumer may request on a thread of its choice. Whoever made the struct (`from_parts`)
// guaranteed that the callbacks allow it.
unsafe impl Send for FFI_ArrowAsyncProducer {}

impl FFI_ArrowAsyncTask {
    /// Creates a task from a producer's callback.
    ///
    /// # Safety
    /// `extract_data` does what the specification requires, for this `private_data`, whatever
    /// address the struct was moved to, on any thread.
    pub const unsafe fn from_parts(
        extract_data: TaskExtractData,
        private_data: *mut c_void,
    ) -> Self {
        Self {
            extract_data: Some(extract_data),
            private_data,
        }
    }

    /// Returns a struct without a task, all of whose members are zero.
    pub const fn empty() -> Self {
        Self {
            extract_data: None,
            private_data: ptr::null_mut(),
        }
    }

    /// Returns whether there is no callback: there is nothing to extract, or the task was moved
    /// away. The specification has no mark for tasks that were extracted; this crate sets the
    /// callback to null.
    pub const fn is_empty(&self) -> bool {
        self.extract_data.is_none()
    }

    /// Returns the callback that extracts the array; `None` if the task is [empty](Self::is_empty).
    pub const fn extract_data(&self) -> Option<TaskExtractData> {
        self.extract_data
    }

    /// Returns the pointer that belongs to the producer. Consumers must not use it.
    pub const fn private_data(&self) -> *mut c_void {
        self.private_data
    }
}

movable!(
    FFI_ArrowAsyncTask,
    extract_data,
    "Its callback is null or as [`from_parts`](Self::from_parts) requires, and was not called."
);

impl FFI_ArrowAsyncProducer {
    /// Creates a producer's struct from its callbacks, both of which are mandatory.
    ///
    /// # Safety
    /// - The callbacks do what the specification requires, for this `private_data`, on any thread;
    ///   `cancel` is thread-safe; `request` never calls the handler before it returns.
    /// - `additional_metadata` is null or points to metadata in the encoding of
    ///   `ArrowSchema.metadata` that lives as long as the struct.
    pub const unsafe fn from_parts(
        device_type: ArrowDeviceType,
        request: ProducerRequest,
        cancel: ProducerCancel,
        additional_metadata: *const c_char,
        private_data: *mut c_void,
    ) -> Self {
        Self {
            device_type,
            request: Some(request),
            cancel: Some(cancel),
            additional_metadata,
            private_data,
        }
    }

    /// Returns a struct without a producer, all of whose members are zero.
    pub const fn empty() -> Self {
        Self {
            device_type: ArrowDeviceType::new(0),
            request: None,
            cancel: None,
            additional_metadata: ptr::null(),
            private_data: ptr::null_mut(),
        }
    }

    /// Returns the type of device that all arrays of the stream are on.
    pub const fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    /// Returns the callback that requests more arrays; `None` only if the producer breaks the
    /// rules.
    pub const fn request(&self) -> Option<ProducerRequest> {
        self.request
    }

    /// Returns the callback that requests the end of the stream; `None` only if the producer breaks
    /// the rules.
    pub const fn cancel(&self) -> Option<ProducerCancel> {
        self.cancel
    }

    /// Returns the metadata of the stream in the encoding of `ArrowSchema.metadata`, or null.
    pub const fn additional_metadata(&self) -> *const c_char {
        self.additional_metadata
    }

    /// Returns the pointer that belongs to the producer. Consumers must not use it.
    pub const fn private_data(&self) -> *mut c_void {
        self.private_data
    }
}

impl fmt::Debug for FFI_ArrowAsyncTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FFI_ArrowAsyncTask")
            .field("empty", &self.is_empty())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for FFI_ArrowAsyncProducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FFI_ArrowAsyncProducer")
            .field("device_type", &self.device_type)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;

    unsafe extern "C-unwind" fn extract(
        task: *mut FFI_ArrowAsyncTask,
        out: *mut FFI_ArrowDeviceArray,
    ) -> c_int {
        // SAFETY: the test's number outlives the task; `out` is null or memory for one struct.
        unsafe {
            *(*task).private_data.cast::<i32>() += 1;
            if !out.is_null() {
                FFI_ArrowDeviceArray::empty().write_to(out);
            }
        }
        0
    }
    unsafe extern "C-unwind" fn request(producer: *mut FFI_ArrowAsyncProducer, n: i64) {
        // SAFETY: the test's number outlives the producer.
        unsafe { *(*producer).private_data.cast::<i64>() += n };
    }
    unsafe extern "C-unwind" fn cancel(producer: *mut FFI_ArrowAsyncProducer) {
        // SAFETY: the test's number outlives the producer.
        unsafe { *(*producer).private_data.cast::<i64>() = -1 };
    }

    #[test]
    fn tasks_move_and_call_nothing_on_drop() {
        let mut calls = 0i32;
        let calls_ptr = &raw mut calls;
        // SAFETY: the callback above keeps to the interface; its number outlives the task.
        let mut source = unsafe { FFI_ArrowAsyncTask::from_parts(extract, calls_ptr.cast()) };
        // SAFETY: `source` is valid and the only copy.
        let taken = unsafe { FFI_ArrowAsyncTask::from_raw(&raw mut source) };
        assert!(source.is_empty() && source.private_data().is_null() && !taken.is_empty());
        let mut out = MaybeUninit::<FFI_ArrowAsyncTask>::uninit();
        // SAFETY: `out` is memory for one task.
        unsafe { taken.write_to(out.as_mut_ptr()) };
        // SAFETY: `out` was written above.
        let mut task = unsafe { out.assume_init() };
        assert_eq!(task.private_data(), calls_ptr.cast());
        let call = task.extract_data().unwrap();
        // SAFETY: the task's own callback, once; null means that nobody wants the array.
        assert_eq!(unsafe { call(&raw mut task, ptr::null_mut()) }, 0);
        assert!(format!("{task:?}").contains("empty: false"));
        drop(task);
        // SAFETY: the number is a local of this test.
        assert_eq!(unsafe { calls_ptr.read() }, 1);
    }

    #[test]
    fn producers_are_called_through_a_pointer() {
        let mut asked = 0i64;
        let asked_ptr = &raw mut asked;
        // SAFETY: the callbacks above keep to the interface; their number outlives the producer.
        let mut producer = unsafe {
            FFI_ArrowAsyncProducer::from_parts(
                ArrowDeviceType::CUDA,
                request,
                cancel,
                c"".as_ptr(),
                asked_ptr.cast(),
            )
        };
        assert_eq!(producer.device_type(), ArrowDeviceType::CUDA);
        assert!(!producer.additional_metadata().is_null());
        assert_eq!(producer.private_data(), asked_ptr.cast());
        let (more, end) = (producer.request().unwrap(), producer.cancel().unwrap());
        // SAFETY: the producer's own callbacks; the number is a local of this test.
        unsafe {
            more(&raw mut producer, i64::MAX);
            assert_eq!(asked_ptr.read(), i64::MAX);
            end(&raw mut producer);
            assert_eq!(asked_ptr.read(), -1);
        }
        assert!(FFI_ArrowAsyncProducer::empty().request().is_none());
    }

    #[test]
    fn send() {
        fn send<T: Send>() {}
        send::<FFI_ArrowAsyncTask>();
        send::<FFI_ArrowAsyncProducer>();
    }
}
