//! The async device stream: `ArrowAsyncTask` and `ArrowAsyncProducer` of the producer, and
//! `ArrowAsyncDeviceStreamHandler` of the consumer.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use arrow_schema::ffi::FFI_ArrowSchema;

use super::guard::{ReleaseFn, released_once};
use super::{ArrowDeviceType, FFI_ArrowDeviceArray};

/// `struct ArrowAsyncTask`: one array that a producer has ready ("The ArrowAsyncTask structure" of
/// the specification).
///
/// There is no release callback: calling `extract_data`, exactly once, hands the array over and
/// frees the task; with null it only frees the task. **Dropping this struct calls nothing**: a task
/// that is dropped before its extraction leaks what its producer keeps for it.
#[must_use = "a task that is dropped leaks what its producer keeps; call `extract_data` once"]
#[derive(Debug)]
#[repr(C)]
pub struct FFI_ArrowAsyncTask {
    /// Writes the task's array to the second argument, unless that is null, and frees the task. It is called exactly once, on
    /// any thread; returns 0 or an errno. `None` if there is nothing to extract.
    pub extract_data:
        Option<unsafe extern "C-unwind" fn(*mut Self, *mut FFI_ArrowDeviceArray) -> c_int>,
    /// Belongs to the producer.
    pub private_data: *mut c_void,
}

/// `struct ArrowAsyncProducer`: the callbacks through which a consumer requests arrays or the end
/// of the stream ("The ArrowAsyncProducer structure" of the specification).
///
/// It belongs to the producer that made it and lives at least until that producer calls the
/// handler's release callback; a consumer only has a pointer. There is nothing to release: the
/// `release` member that the specification's text shows does not exist in `abi.h`, and the struct
/// has 40 bytes.
#[derive(Debug)]
#[repr(C)]
pub struct FFI_ArrowAsyncProducer {
    /// The type of device that all arrays of the stream are on.
    pub device_type: ArrowDeviceType,
    /// Requests this many more arrays, at least 1, on any thread. It never calls the handler before it returns.
    pub request: Option<unsafe extern "C-unwind" fn(*mut Self, i64)>,
    /// Requests the end of the stream. Thread-safe and idempotent.
    pub cancel: Option<unsafe extern "C-unwind" fn(*mut Self)>,
    /// Metadata of the stream in the encoding of `ArrowSchema.metadata`, or null.
    pub additional_metadata: *const c_char,
    /// Belongs to the producer.
    pub private_data: *mut c_void,
}

// SAFETY: the interface lets a consumer extract on a thread of its choice. Nothing safe follows the pointers.
unsafe impl Send for FFI_ArrowAsyncTask {}
// SAFETY: the interface lets a consumer request on a thread of its choice. Nothing safe follows the pointers.
unsafe impl Send for FFI_ArrowAsyncProducer {}

impl FFI_ArrowAsyncTask {
    /// Returns a struct without a task: all members are zero.
    #[cfg(feature = "async")]
    pub(crate) const fn empty() -> Self {
        Self {
            extract_data: None,
            private_data: ptr::null_mut(),
        }
    }
}

/// `struct ArrowAsyncDeviceStreamHandler`: the callbacks of a consumer, which a producer calls with
/// the schema, the tasks and errors ("The ArrowAsyncDeviceStreamHandler structure" of the
/// specification).
///
/// The functions of [`async_stream`](crate::async_stream) make and call it. Code that calls the callbacks itself, or brings its
/// own, casts the pointer to its own definition of the C struct. Dropping it calls its release callback, unless it was released
/// or moved away. A callback that panics does not unwind out of the drop.
#[derive(Debug)]
#[repr(C)]
pub struct FFI_ArrowAsyncDeviceStreamHandler {
    /// Takes the schema; returns 0 or an errno.
    pub(crate) on_schema: Option<OnSchema>,
    /// Takes a task, which is null at the end, and metadata in the encoding of `ArrowSchema.metadata` or null; returns 0 or an
    /// errno.
    pub(crate) on_next_task: Option<OnNextTask>,
    /// Takes an errno, a message or null, and metadata or null.
    pub(crate) on_error: Option<OnError>,
    /// The producer's last call on a handler.
    pub(crate) release: Option<ReleaseFn<Self>>,
    /// Null until the producer sets it, which it does before it calls any callback except `release`.
    pub(crate) producer: *mut FFI_ArrowAsyncProducer,
    pub(crate) private_data: *mut c_void,
}

type Handler = FFI_ArrowAsyncDeviceStreamHandler;

/// Each member's documentation says what it does.
pub(crate) type OnSchema = unsafe extern "C-unwind" fn(*mut Handler, *mut FFI_ArrowSchema) -> c_int;
pub(crate) type OnNextTask =
    unsafe extern "C-unwind" fn(*mut Handler, *mut FFI_ArrowAsyncTask, *const c_char) -> c_int;
pub(crate) type OnError =
    unsafe extern "C-unwind" fn(*mut Handler, c_int, *const c_char, *const c_char);

// SAFETY: the specification lets a producer call a handler from any thread, one call at a time
// ("Thread safety"). Whoever made the struct guaranteed that the consumer's callbacks allow it.
unsafe impl Send for FFI_ArrowAsyncDeviceStreamHandler {}

impl FFI_ArrowAsyncDeviceStreamHandler {
    /// Returns a released handler, all of whose members are zero.
    pub(crate) const fn empty() -> Self {
        Self {
            on_schema: None,
            on_next_task: None,
            on_error: None,
            release: None,
            producer: ptr::null_mut(),
            private_data: ptr::null_mut(),
        }
    }
}

released_once!(
    FFI_ArrowAsyncDeviceStreamHandler,
    release,
    "ArrowAsyncDeviceStreamHandler.release",
    "Unless it is released, its callbacks are null or do what the specification requires, for this `private_data`, on any thread (one call at a time), and the consumer does not depend on its address."
);
