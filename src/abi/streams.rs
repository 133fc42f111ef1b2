//! The streams: `ArrowDeviceArrayStream`, and what it has in common with `ArrowArrayStream`; of the async device stream
//! `ArrowAsyncTask` and `ArrowAsyncProducer` of the producer, and `ArrowAsyncDeviceStreamHandler` of the consumer.

use std::ffi::{c_char, c_int, c_void};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::guard::{ReleaseFn, released_once};
use super::{ArrowDeviceType, FFI_ArrowDeviceArray};

/// `struct ArrowDeviceArrayStream`: arrays of one schema on one type of device, which a consumer
/// pulls one by one ("Device Stream Interface" of the specification).
///
/// [`new`](Self::new) makes one of a reader, and [`DeviceRecordBatchStreamReader`](crate::DeviceRecordBatchStreamReader) reads
/// one. Code that calls the callbacks itself, or brings its own, casts the pointer to its own definition of the C struct.
///
/// Dropping it calls the producer's release callback, unless it was released or moved away; a callback that panics does not
/// unwind out of the drop. Arrays from the stream have their own release and may outlive it.
///
/// The stream is `Send` but not `Sync`: a producer must allow calls from different threads, but not
/// from several at the same time ("Thread safety" of the C stream interface).
#[derive(Debug)]
#[repr(C)]
pub struct FFI_ArrowDeviceArrayStream {
    pub(crate) device_type: ArrowDeviceType,
    pub(crate) callbacks: Callbacks<Self, FFI_ArrowDeviceArray>,
}

/// The members that all C streams have, those of a stream `S` of arrays `A`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Callbacks<S, A> {
    /// Writes the schema, which is in host memory, to the second argument; returns 0 or an errno.
    pub(crate) get_schema:
        Option<unsafe extern "C-unwind" fn(*mut S, *mut FFI_ArrowSchema) -> c_int>,
    /// Writes the next array to the second argument, or a released one at the end; returns 0 or an errno.
    pub(crate) get_next: Option<unsafe extern "C-unwind" fn(*mut S, *mut A) -> c_int>,
    /// Returns the message of the last error, valid until the next call on the stream, or null.
    pub(crate) get_last_error: Option<unsafe extern "C-unwind" fn(*mut S) -> *const c_char>,
    /// Frees what the stream owns and sets `release` to null.
    pub(crate) release: Option<ReleaseFn<S>>,
    pub(crate) private_data: *mut c_void,
}

impl<S, A> Callbacks<S, A> {
    /// Those of a released stream: all members are zero.
    pub(crate) const fn empty() -> Self {
        // SAFETY: null pointers, no callback and zeros are values of all members.
        unsafe { std::mem::zeroed() }
    }
}

/// A C struct for streams: `ArrowDeviceArrayStream`, or `ArrowArrayStream`, whose arrays are on the CPU.
pub(crate) trait CStream: Sized + Send + 'static {
    const NAME: &'static str;
    /// The C struct of its arrays. An array of a reader, whose device type is the stream's, becomes one, and one of the stream is of its
    /// device.
    type Array: From<FFI_ArrowDeviceArray> + Into<FFI_ArrowDeviceArray>;
    fn new(device_type: ArrowDeviceType, callbacks: Callbacks<Self, Self::Array>) -> Self;
    fn device_type(&self) -> ArrowDeviceType;
    fn callbacks(&self) -> &Callbacks<Self, Self::Array>;
}

impl CStream for FFI_ArrowDeviceArrayStream {
    const NAME: &'static str = "the ArrowDeviceArrayStream";
    type Array = FFI_ArrowDeviceArray;

    fn new(device_type: ArrowDeviceType, callbacks: Callbacks<Self, Self::Array>) -> Self {
        Self {
            device_type,
            callbacks,
        }
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    fn callbacks(&self) -> &Callbacks<Self, Self::Array> {
        &self.callbacks
    }
}

// SAFETY: the C stream interface requires callbacks that do not depend on the calling thread, as
// long as calls do not overlap; ownership sees to that. Whoever made the struct (`new`,
// `from_raw`) guaranteed it for the producer.
unsafe impl Send for FFI_ArrowDeviceArrayStream {}

impl FFI_ArrowDeviceArrayStream {
    /// Returns a released stream, all of whose members are zero: memory for a producer to write a
    /// stream to.
    pub const fn empty() -> Self {
        // SAFETY: null pointers, no callback and zeros are values of all members.
        unsafe { std::mem::zeroed() }
    }
}

released_once!(
    FFI_ArrowDeviceArrayStream,
    callbacks.release,
    "ArrowDeviceArrayStream.release",
    "Unless it is released, its callbacks are null, or do what the C device stream interface requires, for this `private_data`, whatever address the struct was moved to, on any thread (one call at a time), and every array of the stream is on a device of its type."
);

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
        // SAFETY: null pointers, no callback and zeros are values of all members.
        unsafe { std::mem::zeroed() }
    }
}

/// `struct ArrowAsyncDeviceStreamHandler`: the callbacks of a consumer, which a producer calls with
/// the schema, the tasks and errors ("The ArrowAsyncDeviceStreamHandler structure" of the
/// specification).
///
/// It stays where its consumer put it until a producer has called its release callback. The functions of
/// [`async_stream`](crate::async_stream) make and call it. **Dropping this struct calls nothing.**
#[derive(Debug)]
#[repr(C)]
pub struct FFI_ArrowAsyncDeviceStreamHandler {
    /// Takes the schema; returns 0 or an errno.
    pub on_schema: Option<OnSchema>,
    /// Takes a task, which is null at the end, and metadata in the encoding of `ArrowSchema.metadata` or null; returns 0 or an
    /// errno.
    pub on_next_task: Option<OnNextTask>,
    /// Takes an errno, a message or null, and metadata or null.
    pub on_error: Option<OnError>,
    /// The producer's last call on a handler. `None` once it was called.
    pub release: Option<ReleaseFn<Self>>,
    /// Null until the producer sets it, which it does before it calls any callback except `release`.
    pub producer: *mut FFI_ArrowAsyncProducer,
    /// Belongs to the consumer.
    pub private_data: *mut c_void,
}

type Handler = FFI_ArrowAsyncDeviceStreamHandler;

/// Each member's documentation says what it does.
pub(crate) type OnSchema = unsafe extern "C-unwind" fn(*mut Handler, *mut FFI_ArrowSchema) -> c_int;
pub(crate) type OnNextTask =
    unsafe extern "C-unwind" fn(*mut Handler, *mut FFI_ArrowAsyncTask, *const c_char) -> c_int;
pub(crate) type OnError =
    unsafe extern "C-unwind" fn(*mut Handler, c_int, *const c_char, *const c_char);

// SAFETY: the interface lets a producer call a handler from any thread, one call at a time. Nothing safe follows the pointers.
unsafe impl Send for FFI_ArrowAsyncDeviceStreamHandler {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Stream = FFI_ArrowDeviceArrayStream;

    unsafe extern "C-unwind" fn release(this: *mut Stream) {
        // SAFETY: the test's counter outlives the stream, which is being released.
        unsafe {
            (*(*this).callbacks.private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed);
            (*this).callbacks.release = None;
        }
    }
    unsafe extern "C-unwind" fn release_and_panic(this: *mut Stream) {
        // SAFETY: the test's counter outlives the stream.
        unsafe {
            (*(*this).callbacks.private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed)
        };
        panic!("release failed");
    }

    fn stream(release: ReleaseFn<Stream>, calls: &AtomicUsize) -> Stream {
        Stream {
            device_type: ArrowDeviceType::new(99),
            callbacks: Callbacks {
                release: Some(release),
                private_data: std::ptr::from_ref(calls).cast_mut().cast(),
                ..Callbacks::empty()
            },
        }
    }

    #[test]
    fn moves_and_one_release() {
        let calls = AtomicUsize::new(0);
        let mut source = stream(release, &calls);
        // SAFETY: `source` is valid and the only copy.
        let taken = unsafe { Stream::from_raw(&raw mut source) };
        assert!(source.is_released() && source.callbacks.private_data.is_null());
        drop(source);
        assert_eq!(taken.device_type().value(), 99);
        assert!(format!("{taken:?}").contains("unknown device type (99)"));
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        drop(taken);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_panicking_release_stays_inside_drop() {
        let calls = AtomicUsize::new(0);
        drop(stream(release_and_panic, &calls));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        drop(Stream::empty());
    }

    #[test]
    fn send_but_not_sync() {
        fn send<T: Send>() {}
        send::<Stream>();
        // Resolves only while there is one candidate, that is, while the type is not `Sync`.
        trait NotSync<Which> {
            fn holds() {}
        }
        impl<T: ?Sized> NotSync<()> for T {}
        impl<T: ?Sized + Sync> NotSync<u8> for T {}
        <Stream as NotSync<_>>::holds();
    }
}
