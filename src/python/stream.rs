//! Wraps the C streams that go from this crate to Python, and back, in C streams that release the GIL and acquire it as needed.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::{Arc, Mutex, TryLockError};

use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;

use super::attached::{DropAttached, detached, has_interpreter};
use super::capsule::InCapsule;
use super::host_stream::HostStream;
use crate::abi::c_data::CArray;
use crate::abi::{
    ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, ForeignSchema, guard,
};
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::interchange::ImportOptions;
use crate::stream::import::Stream;
use crate::stream::{DeviceRecordBatchReader, DeviceRecordBatchStreamReader};

/// A stream from Python. Its callbacks are called detached from the interpreter; it and its arrays are released attached.
pub(super) enum Incoming {
    Device(FFI_ArrowDeviceArrayStream),
    Host(HostStream),
}

/// A reader that releases the interpreter during each `next`.
pub(super) struct Reader(DeviceRecordBatchStreamReader);

impl Reader {
    /// # Safety
    /// The stream keeps to its interface, and its arrays meet the safety requirements of
    /// [`DeviceRecordBatchStreamReader::new`] with these options.
    pub(super) unsafe fn new(stream: Incoming, options: ImportOptions) -> Result<Self> {
        let (stream, device_type) = match stream {
            Incoming::Host(stream) if stream.release.is_none() => {
                return Err(Error::Released("the ArrowArrayStream"));
            }
            Incoming::Host(stream) => (Incoming::Host(stream), ArrowDeviceType::CPU),
            Incoming::Device(stream) => {
                let stream = Stream::open(stream)?.into_inner();
                let device_type = stream.device_type;
                (Incoming::Device(stream), device_type)
            }
        };
        let stream = Box::into_raw(Box::new(DropAttached::new(stream)));
        // SAFETY: the callbacks keep to the interface for a boxed `Incoming`, as long as the producer's do, which the caller
        // guarantees, as it does for the arrays.
        unsafe {
            let stream = FFI_ArrowDeviceArrayStream {
                device_type,
                get_schema: Some(incoming_schema),
                get_next: Some(incoming_next),
                get_last_error: Some(incoming_error),
                release: Some(incoming_release),
                private_data: stream.cast(),
            };
            DeviceRecordBatchStreamReader::new(stream, options).map(Self)
        }
    }
}

impl Iterator for Reader {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        detached(|| self.0.next())
    }
}

impl DeviceRecordBatchReader for Reader {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device_type()
    }
}

/// Calls the producer's callback of this name, if it has one.
macro_rules! ask {
    ($stream:ident.$callback:ident, $without:expr $(, $out:expr)?) => {
        match $stream.$callback {
            Some(callback) => callback($stream $(, $out)?),
            None => $without,
        }
    };
}

// The reader is the only caller of these four callbacks. It passes its live stream, one call at a time, and an empty `out`, which is
// what the interface requires for the producer's callbacks, too.

/// # Safety
/// `stream` is the stream of a [`Reader`], and nothing else uses it during `'a`.
unsafe fn incoming<'a>(stream: *mut FFI_ArrowDeviceArrayStream) -> &'a mut Incoming {
    // SAFETY: the caller guarantees a stream whose `private_data` is a boxed `DropAttached`, which is a transparent struct.
    unsafe { &mut *(*stream).private_data.cast::<Incoming>() }
}

unsafe extern "C-unwind" fn incoming_schema(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowSchema,
) -> c_int {
    // SAFETY: the reader passes its stream, and the schema of a `ForeignSchema`.
    let (stream, out) = unsafe { (incoming(stream), &mut *out.cast::<ForeignSchema>()) };
    // SAFETY: the callbacks belong to the stream that they are called with; `out` is empty.
    detached(|| unsafe {
        match stream {
            Incoming::Device(stream) => ask!(stream.get_schema, libc::EINVAL, out.as_mut_ptr()),
            Incoming::Host(stream) => ask!(stream.get_schema, libc::EINVAL, out.as_mut_ptr()),
        }
    })
}

unsafe extern "C-unwind" fn incoming_next(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    if !has_interpreter() {
        return libc::ECANCELED;
    }
    // SAFETY: the reader passes its stream.
    let stream = unsafe { incoming(stream) };
    let mut array = FFI_ArrowDeviceArray::empty();
    // SAFETY: the callbacks belong to the stream that they are called with; `array` is empty.
    let next = || unsafe {
        match stream {
            Incoming::Device(stream) => ask!(stream.get_next, libc::EINVAL, &mut array),
            Incoming::Host(stream) => {
                array = FFI_ArrowDeviceArray::assemble(
                    CArray::empty(),
                    ArrowDeviceType::CPU,
                    -1,
                    ptr::null_mut(),
                );
                ask!(stream.get_next, libc::EINVAL, &mut array.array)
            }
        }
    };
    let code = catch_unwind(AssertUnwindSafe(|| detached(next)));
    // What a failed call leaves is released attached, too.
    let array = released_attached(array);
    let code = code.unwrap_or_else(|panic| resume_unwind(panic));
    if code == 0 {
        // SAFETY: the reader passes an `out` that is valid for writes and empty.
        unsafe { out.write(array) };
    }
    code
}

unsafe extern "C-unwind" fn incoming_error(
    stream: *mut FFI_ArrowDeviceArrayStream,
) -> *const c_char {
    if !has_interpreter() {
        return c"the Python interpreter is gone".as_ptr();
    }
    // SAFETY: the reader passes its stream, after a failed call. The callbacks belong to the stream that they are called with.
    unsafe {
        match incoming(stream) {
            Incoming::Device(stream) => ask!(stream.get_last_error, ptr::null()),
            Incoming::Host(stream) => ask!(stream.get_last_error, ptr::null()),
        }
    }
}

unsafe extern "C-unwind" fn incoming_release(stream: *mut FFI_ArrowDeviceArrayStream) {
    // SAFETY: the reader passes its stream, once, whose `private_data` is what `Reader::new` boxed.
    unsafe {
        let boxed = (*stream).private_data.cast::<DropAttached<Incoming>>();
        (*stream).release = None;
        drop(Box::from_raw(boxed));
    }
}

/// The same array, released by a thread that is attached to the interpreter.
pub(super) fn released_attached(inner: FFI_ArrowDeviceArray) -> FFI_ArrowDeviceArray {
    if inner.is_released() {
        return inner;
    }
    let mut outer = FFI_ArrowDeviceArray {
        array: CArray {
            release: Some(release_array),
            ..inner.array
        },
        device_id: inner.device_id,
        device_type: inner.device_type,
        sync_event: inner.sync_event,
        reserved: inner.reserved,
    };
    outer.array.private_data = Box::into_raw(Box::new(DropAttached::new(inner))).cast();
    outer
}

unsafe extern "C-unwind" fn release_array(array: *mut CArray) {
    // SAFETY: the interface requires the consumer to pass a live array, once. Only `released_attached` installs this
    // callback, with a boxed array as `private_data`.
    unsafe {
        let boxed = (*array)
            .private_data
            .cast::<DropAttached<FFI_ArrowDeviceArray>>();
        (*array).private_data = ptr::null_mut();
        (*array).release = None;
        drop(Box::from_raw(boxed));
    }
}

/// A struct that Python gets a stream of this crate in: `ArrowDeviceArrayStream` or `ArrowArrayStream`.
pub(super) trait Outgoing: InCapsule {
    type Array;
    fn new(device_type: ArrowDeviceType, private_data: *mut c_void) -> Self;
    /// The `private_data`, unless it is released.
    fn private_data(&self) -> Option<*mut c_void>;
    fn array(array: FFI_ArrowDeviceArray) -> Self::Array;
}

impl Outgoing for FFI_ArrowDeviceArrayStream {
    type Array = FFI_ArrowDeviceArray;

    fn new(device_type: ArrowDeviceType, private_data: *mut c_void) -> Self {
        Self {
            device_type,
            get_schema: Some(get_schema),
            get_next: Some(get_next),
            get_last_error: Some(get_last_error),
            release: Some(release),
            private_data,
        }
    }

    fn private_data(&self) -> Option<*mut c_void> {
        self.release.map(|_| self.private_data)
    }

    fn array(array: FFI_ArrowDeviceArray) -> FFI_ArrowDeviceArray {
        array
    }
}

impl Outgoing for HostStream {
    type Array = CArray;

    fn new(_: ArrowDeviceType, private_data: *mut c_void) -> Self {
        Self {
            get_schema: Some(get_schema),
            get_next: Some(get_next),
            get_last_error: Some(get_last_error),
            release: Some(release),
            private_data,
        }
    }

    fn private_data(&self) -> Option<*mut c_void> {
        self.release.map(|_| self.private_data)
    }

    fn array(mut array: FFI_ArrowDeviceArray) -> CArray {
        array.take_array()
    }
}

/// What the `private_data` of a stream for Python is a share of. Each call holds another share, so that a release during a call
/// leaves the stream to that call.
type Shared = Arc<Mutex<FFI_ArrowDeviceArrayStream>>;

/// A stream for Python. It releases the interpreter while its reader works. A consumer that holds the GIL may rely on it to keep
/// other threads from calling the stream meanwhile; such a call is refused.
pub(super) fn outgoing<S: Outgoing>(stream: FFI_ArrowDeviceArrayStream) -> S {
    let device_type = stream.device_type;
    let shared: Shared = Arc::new(Mutex::new(stream));
    S::new(device_type, Arc::into_raw(shared).cast_mut().cast())
}

/// Calls `body` with the stream behind a stream for Python, without the interpreter. Answers `released` if the stream is null or
/// released, and `busy` if another call is under way: on another thread, or on this one, within a call that has released the
/// interpreter. Never waits for the lock, so nobody waits for the interpreter under it.
///
/// # Safety
/// `stream` is null or points to a stream of [`outgoing`], which may be released.
unsafe fn call<S: Outgoing, T>(
    stream: *mut S,
    released: T,
    busy: T,
    body: impl FnOnce(&mut FFI_ArrowDeviceArrayStream) -> T,
) -> T {
    // SAFETY: the caller guarantees that `stream` can be read if it is not null. One that is not released still holds the
    // share that `outgoing` put into its `private_data`, so there is one to count.
    let shared: Shared = unsafe {
        let Some(share) = stream.as_ref().and_then(S::private_data) else {
            return released;
        };
        let share = share.cast_const().cast();
        Arc::increment_strong_count(share);
        Arc::from_raw(share)
    };
    let answer = match shared.try_lock() {
        Ok(mut stream) => body(&mut stream),
        // Panics are caught further in.
        Err(TryLockError::Poisoned(e)) => body(&mut e.into_inner()),
        Err(TryLockError::WouldBlock) => busy,
    };
    drop_share(shared);
    answer
}

/// The last share drops the stream, whose drop catches panics.
fn drop_share(shared: Shared) {
    if let Some(stream) = Arc::into_inner(shared) {
        detached(|| drop(stream));
    }
}

/// Has a callback of the stream behind fill `value`, which is left empty by a call that fails.
///
/// # Safety
/// The same as for [`call`].
unsafe fn fill<S: Outgoing, T: Send>(
    stream: *mut S,
    empty: fn() -> T,
    callback: impl FnOnce(&mut FFI_ArrowDeviceArrayStream, &mut T) -> c_int + Send,
) -> (c_int, T) {
    let mut value = empty();
    let body = |stream: &mut FFI_ArrowDeviceArrayStream| {
        let ask = || callback(stream, &mut value);
        detached(|| guard::call_foreign("a callback of the stream", ask)).unwrap_or(libc::EIO)
    };
    // SAFETY: the caller guarantees what `call` asks for.
    match unsafe { call(stream, libc::EINVAL, libc::EBUSY, body) } {
        0 => (0, value),
        code => (code, empty()),
    }
}

unsafe extern "C-unwind" fn get_schema<S: Outgoing>(
    stream: *mut S,
    out: *mut FFI_ArrowSchema,
) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `outgoing` made,
    // and an `out` that is valid for writes and holds nothing to release. The callback belongs to the stream that it is called
    // with; the schema is empty.
    unsafe {
        let (code, schema) = fill(stream, ForeignSchema::empty, |stream, schema| {
            ask!(stream.get_schema, libc::EINVAL, schema.as_mut_ptr())
        });
        out.cast::<ForeignSchema>().write(schema);
        code
    }
}

unsafe extern "C-unwind" fn get_next<S: Outgoing>(stream: *mut S, out: *mut S::Array) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `outgoing` made,
    // and an `out` that is valid for writes and holds nothing to release. The callback belongs to the stream that it is called
    // with; the array is empty.
    unsafe {
        let (code, array) = fill(stream, FFI_ArrowDeviceArray::empty, |stream, array| {
            ask!(stream.get_next, libc::EINVAL, array)
        });
        out.write(S::array(array));
        code
    }
}

unsafe extern "C-unwind" fn get_last_error<S: Outgoing>(stream: *mut S) -> *const c_char {
    let busy = c"another call on this stream is under way".as_ptr();
    let body = |stream: &mut FFI_ArrowDeviceArrayStream| {
        // SAFETY: the interface allows this call after a failed one, and the consumer keeps to that. The callback belongs to the
        // stream that it is called with.
        let ask = || unsafe { ask!(stream.get_last_error, ptr::null()) };
        guard::call_foreign("get_last_error", ask).unwrap_or(ptr::null())
    };
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `outgoing` made.
    unsafe { call(stream, ptr::null(), busy, body) }
}

unsafe extern "C-unwind" fn release<S: Outgoing>(stream: *mut S) {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, and to call nothing
    // on it afterwards. While it is not released, its `private_data` is the share that `outgoing` put there.
    let shared: Shared = unsafe {
        let Some(share) = stream.as_ref().and_then(S::private_data) else {
            return;
        };
        stream.write(S::empty());
        Arc::from_raw(share.cast_const().cast())
    };
    drop_share(shared);
}
