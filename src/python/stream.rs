//! Wraps the C streams that go from this crate to Python, and back, in C streams that release the GIL and acquire it as needed.
//!
//! A consumer that holds the GIL may rely on it to keep other threads from calling its stream. These streams release the GIL
//! in the middle of a call, so a second call may come then. It is refused.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::attached::{detached, drop_attached, has_interpreter};
use crate::abi::c_data::{CArray, CSchema};
use crate::abi::{
    ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, ForeignSchema, guard,
};
use crate::error::{Error, Result};
use crate::stream::import::Stream;

/// A stream for Python. It releases the interpreter while its reader works.
pub(super) fn outgoing(stream: FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowDeviceArrayStream> {
    Ok(adapt(DeviceStream {
        stream: checked(stream)?.into_inner(),
        is_from_python: false,
    }))
}

/// A stream, and its schema.
pub(super) fn with_schema(
    stream: FFI_ArrowDeviceArrayStream,
) -> Result<(FFI_ArrowDeviceArrayStream, ForeignSchema)> {
    let mut stream = checked(stream)?;
    let schema = stream.schema()?;
    Ok((stream.into_inner(), schema))
}

/// A stream from Python. It and its arrays are released by a thread that is attached to the interpreter.
pub(super) fn incoming(stream: FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowDeviceArrayStream> {
    Ok(adapt(DeviceStream {
        stream: checked(stream)?.into_inner(),
        is_from_python: true,
    }))
}

/// Like [`incoming`], for a stream on the CPU.
pub(super) fn incoming_host(stream: HostStream) -> Result<FFI_ArrowDeviceArrayStream> {
    if stream.release.is_none() {
        return Err(Error::Released("the ArrowArrayStream"));
    }
    Ok(adapt(stream))
}

/// Checks that the stream is not released and has all its callbacks.
fn checked(stream: FFI_ArrowDeviceArrayStream) -> Result<Stream> {
    Stream::open(stream)
}

/// The same array, released by a thread that is attached to the interpreter.
pub(super) fn released_attached(inner: FFI_ArrowDeviceArray) -> FFI_ArrowDeviceArray {
    if inner.is_released() {
        return inner;
    }
    let array = CArray {
        release: Some(release_array),
        private_data: ptr::null_mut(),
        ..inner.array
    };
    let mut outer = FFI_ArrowDeviceArray {
        array,
        device_id: inner.device_id,
        device_type: inner.device_type,
        sync_event: inner.sync_event,
        reserved: inner.reserved,
    };
    outer.array.private_data = Box::into_raw(Box::new(inner)).cast();
    outer
}

unsafe extern "C-unwind" fn release_array(array: *mut CArray) {
    // SAFETY: the interface requires the consumer to pass a live array, once. Only `released_attached` installs this
    // callback, with a boxed array as `private_data`.
    unsafe {
        let inner = Box::from_raw((*array).private_data.cast::<FFI_ArrowDeviceArray>());
        (*array).private_data = ptr::null_mut();
        (*array).release = None;
        drop_attached(inner);
    }
}

/// `struct ArrowArrayStream` of the C stream interface. Dropping it releases it.
#[repr(C)]
pub(super) struct HostStream {
    get_schema: Option<unsafe extern "C-unwind" fn(*mut Self, *mut FFI_ArrowSchema) -> c_int>,
    get_next: Option<unsafe extern "C-unwind" fn(*mut Self, *mut CArray) -> c_int>,
    get_last_error: Option<unsafe extern "C-unwind" fn(*mut Self) -> *const c_char>,
    release: Option<unsafe extern "C-unwind" fn(*mut Self)>,
    private_data: *mut c_void,
}

// SAFETY: the C stream interface allows calls from any thread, one at a time.
unsafe impl Send for HostStream {}

impl HostStream {
    pub(super) const fn empty() -> Self {
        Self {
            get_schema: None,
            get_next: None,
            get_last_error: None,
            release: None,
            private_data: ptr::null_mut(),
        }
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        let this = ptr::from_mut(self);
        // SAFETY: `this` is a live struct that nothing else uses, and its `release` is its own callback. A moved or released
        // struct has none.
        let outcome = unsafe {
            guard::release_once("ArrowArrayStream.release", this, &raw mut (*this).release)
        };
        // A drop cannot report a panic of the callback. The struct is released all the same.
        drop(outcome);
    }
}

struct DeviceStream {
    stream: FFI_ArrowDeviceArrayStream,
    is_from_python: bool,
}

/// A C stream whose callbacks may be called.
///
/// # Safety
/// The methods keep to the C device stream interface if their callers pass an `out` that is valid for writes and empty.
unsafe trait Source: Send + 'static {
    fn device_type(&self) -> ArrowDeviceType;
    unsafe fn get_schema(&mut self, out: *mut FFI_ArrowSchema) -> c_int;
    unsafe fn get_next(&mut self, out: *mut FFI_ArrowDeviceArray) -> c_int;
    unsafe fn get_last_error(&mut self) -> *const c_char;
    /// Whether it and its arrays must be released by a thread that is attached to the interpreter.
    fn is_from_python(&self) -> bool;
}

// SAFETY: each method calls the producer's callback of the same name on the producer's own struct.
unsafe impl Source for DeviceStream {
    fn device_type(&self) -> ArrowDeviceType {
        self.stream.device_type
    }

    unsafe fn get_schema(&mut self, out: *mut FFI_ArrowSchema) -> c_int {
        match self.stream.get_schema {
            // SAFETY: the callback belongs to the live struct that it is called with; the caller guarantees that `out` is
            // valid for writes and empty.
            Some(get_schema) => unsafe { get_schema(&mut self.stream, out) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_next(&mut self, out: *mut FFI_ArrowDeviceArray) -> c_int {
        match self.stream.get_next {
            // SAFETY: the callback belongs to the live struct that it is called with; the caller guarantees that `out` is
            // valid for writes and empty.
            Some(get_next) => unsafe { get_next(&mut self.stream, out) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_last_error(&mut self) -> *const c_char {
        match self.stream.get_last_error {
            // SAFETY: the callback belongs to the live struct that it is called with.
            Some(get_last_error) => unsafe { get_last_error(&mut self.stream) },
            None => ptr::null(),
        }
    }

    fn is_from_python(&self) -> bool {
        self.is_from_python
    }
}

// SAFETY: each method calls the producer's callback of the same name on the producer's own struct. An `ArrowArray` becomes
// part of an `ArrowDeviceArray` on the CPU.
unsafe impl Source for HostStream {
    fn device_type(&self) -> ArrowDeviceType {
        ArrowDeviceType::CPU
    }

    unsafe fn get_schema(&mut self, out: *mut FFI_ArrowSchema) -> c_int {
        match self.get_schema {
            // SAFETY: the callback belongs to the live struct that it is called with; the caller guarantees that `out` is
            // valid for writes and empty.
            Some(get_schema) => unsafe { get_schema(self, out) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_next(&mut self, out: *mut FFI_ArrowDeviceArray) -> c_int {
        // The callback writes into `out`, whose owner releases what is there if the callback unwinds.
        // SAFETY: the caller guarantees that `out` is valid for writes and empty.
        let array = unsafe {
            FFI_ArrowDeviceArray::from_host(CArray::empty()).write_to(out);
            &raw mut (*out).array
        };
        match self.get_next {
            // SAFETY: the callback belongs to the live struct that it is called with; `array` points into `out`, and is empty.
            Some(get_next) => unsafe { get_next(self, array) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_last_error(&mut self) -> *const c_char {
        match self.get_last_error {
            // SAFETY: the callback belongs to the live struct that it is called with.
            Some(get_last_error) => unsafe { get_last_error(self) },
            None => ptr::null(),
        }
    }

    fn is_from_python(&self) -> bool {
        true
    }
}

/// What the `private_data` of a stream of [`adapt`] is a share of. Each call holds another share, so that a release
/// during a call leaves the adapter to that call.
type Shared<S> = Arc<Mutex<Adapter<S>>>;

struct Adapter<S> {
    source: S,
    /// The text of an error that is not the source's own.
    text: Option<CString>,
}

const IN_USE: &CStr = c"another call on this stream is under way";

fn adapt<S: Source>(source: S) -> FFI_ArrowDeviceArrayStream {
    let device_type = source.device_type();
    let shared = Arc::new(Mutex::new(Adapter { source, text: None }));
    // SAFETY: the callbacks below keep to the stream interface for a share of a `Mutex<Adapter<S>>`, which is `Send` and
    // `Sync` because `Source` requires `Send`.
    unsafe {
        FFI_ArrowDeviceArrayStream::from_parts(
            device_type,
            get_schema::<S>,
            get_next::<S>,
            get_last_error::<S>,
            release::<S>,
            Arc::into_raw(shared).cast_mut().cast(),
        )
    }
}

/// Calls `body` with the stream's adapter. Answers `released` if the stream is null or released, and `busy` if another
/// call is under way: on another thread, or on this one, within a call that has released the interpreter.
///
/// # Safety
/// `stream` is null or points to a stream of [`adapt`] for this `S`, which may be released.
unsafe fn call<S: Source, T>(
    stream: *mut FFI_ArrowDeviceArrayStream,
    released: T,
    busy: T,
    body: impl FnOnce(&mut Adapter<S>) -> T,
) -> T {
    // SAFETY: the caller guarantees that `stream` can be read if it is not null. One that is not released still holds the
    // share that `adapt` put into its `private_data`, so there is one to count.
    let shared: Shared<S> = unsafe {
        if stream.is_null() || (*stream).release.is_none() {
            return released;
        }
        let share = (*stream).private_data.cast_const().cast();
        Arc::increment_strong_count(share);
        Arc::from_raw(share)
    };
    let answer = match shared.try_lock() {
        Ok(mut adapter) => body(&mut adapter),
        // The producer's panics are caught further in.
        Err(TryLockError::Poisoned(e)) => body(&mut e.into_inner()),
        Err(TryLockError::WouldBlock) => busy,
    };
    drop_share(shared);
    answer
}

/// The last share drops the source.
fn drop_share<S: Source>(shared: Shared<S>) {
    let Some(adapter) = Arc::into_inner(shared) else {
        return;
    };
    let adapter = adapter.into_inner().unwrap_or_else(PoisonError::into_inner);
    let source = adapter.source;
    if source.is_from_python() {
        drop_attached(source);
    } else {
        // A panic in the reader's drop ends here.
        let _ = guard::call_foreign("release", || detached(|| drop(source)));
    }
}

impl<S: Source> Adapter<S> {
    /// Calls the source without the interpreter. A panic becomes EIO, with its text.
    fn ask(&mut self, operation: &'static str, f: impl FnOnce(&mut S) -> c_int + Send) -> c_int {
        let Self { source, text } = self;
        *text = None;
        if source.is_from_python() && !has_interpreter() {
            *text = Some(c"the Python interpreter is gone".to_owned());
            return libc::ECANCELED;
        }
        detached(|| guard::call_foreign(operation, || f(source))).unwrap_or_else(|e| {
            *text = CString::new(e.to_string().replace('\0', " ")).ok();
            e.errno()
        })
    }
}

unsafe extern "C-unwind" fn get_schema<S: Source>(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowSchema,
) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    let out = out.cast::<CSchema>();
    // SAFETY: the interface requires the consumer to pass an `out` that is valid for writes and holds nothing to release.
    unsafe { out.write(CSchema::empty()) };
    let body = |adapter: &mut Adapter<S>| {
        let mut schema = ForeignSchema::empty();
        let code = adapter.ask("get_schema", |source| {
            // SAFETY: `schema` is empty and valid for writes (contract of `Source`).
            unsafe { source.get_schema(schema.as_mut_ptr()) }
        });
        if code == 0 {
            // SAFETY: `out` is valid for writes for the whole call, and empty since the write above.
            unsafe { out.write(schema.into_inner()) };
        } else if adapter.source.is_from_python() {
            drop_attached(schema);
        }
        code
    };
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `adapt` made.
    unsafe { call(stream, libc::EINVAL, libc::EBUSY, body) }
}

unsafe extern "C-unwind" fn get_next<S: Source>(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the interface requires the consumer to pass an `out` that is valid for writes and holds nothing to release.
    unsafe { FFI_ArrowDeviceArray::empty().write_to(out) };
    let body = |adapter: &mut Adapter<S>| {
        let mut array = FFI_ArrowDeviceArray::empty();
        let code = adapter.ask("get_next", |source| {
            // SAFETY: `array` is empty and valid for writes (contract of `Source`).
            unsafe { source.get_next(&mut array) }
        });
        if adapter.source.is_from_python() {
            array = released_attached(array);
        }
        if code == 0 {
            // SAFETY: `out` is valid for writes for the whole call, and empty since the write above.
            unsafe { array.write_to(out) };
        }
        code
    };
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `adapt` made.
    unsafe { call(stream, libc::EINVAL, libc::EBUSY, body) }
}

unsafe extern "C-unwind" fn get_last_error<S: Source>(
    stream: *mut FFI_ArrowDeviceArrayStream,
) -> *const c_char {
    let body = |adapter: &mut Adapter<S>| {
        let Adapter { source, text } = adapter;
        if let Some(text) = text {
            return text.as_ptr();
        }
        if source.is_from_python() && !has_interpreter() {
            return ptr::null();
        }
        // SAFETY: the interface allows this call after a failed one, and the consumer keeps to that.
        guard::call_foreign("get_last_error", || unsafe { source.get_last_error() })
            .unwrap_or(ptr::null())
    };
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `adapt` made.
    unsafe { call::<S, _>(stream, ptr::null(), IN_USE.as_ptr(), body) }
}

unsafe extern "C-unwind" fn release<S: Source>(stream: *mut FFI_ArrowDeviceArrayStream) {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, and to call nothing
    // on it afterwards. While it is not released, its `private_data` is the share that `adapt` put there.
    let shared: Shared<S> = unsafe {
        if stream.is_null() || (*stream).release.is_none() {
            return;
        }
        let share = (*stream).private_data.cast_const().cast();
        FFI_ArrowDeviceArrayStream::mark_released(stream);
        Arc::from_raw(share)
    };
    drop_share(shared);
}

/// A device stream on the CPU, as a host stream.
pub(super) fn as_host(stream: FFI_ArrowDeviceArrayStream) -> HostStream {
    HostStream {
        get_schema: Some(host_get_schema),
        get_next: Some(host_get_next),
        get_last_error: Some(host_get_last_error),
        release: Some(host_release),
        private_data: Box::into_raw(Box::new(stream)).cast(),
    }
}

/// # Safety
/// `stream` is null, released, or a stream of [`as_host`].
unsafe fn behind(stream: *mut HostStream) -> Option<*mut FFI_ArrowDeviceArrayStream> {
    // SAFETY: the caller guarantees that `stream` can be read if it is not null.
    unsafe {
        if stream.is_null() || (*stream).release.is_none() {
            return None;
        }
        Some((*stream).private_data.cast())
    }
}

unsafe extern "C-unwind" fn host_get_schema(
    stream: *mut HostStream,
    out: *mut FFI_ArrowSchema,
) -> c_int {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `as_host`
    // made. Until its release the stream behind it lives; the consumer guarantees that `out` is valid for writes.
    unsafe {
        match behind(stream).map(|stream| (stream, (*stream).get_schema)) {
            Some((stream, Some(get_schema))) => get_schema(stream, out),
            _ => libc::EINVAL,
        }
    }
}

unsafe extern "C-unwind" fn host_get_next(stream: *mut HostStream, out: *mut CArray) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    let mut array = FFI_ArrowDeviceArray::empty();
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `as_host`
    // made, and an `out` that is valid for writes. Until its release the stream behind it lives.
    unsafe {
        out.write(CArray::empty());
        let code = match behind(stream).map(|stream| (stream, (*stream).get_next)) {
            Some((stream, Some(get_next))) => get_next(stream, &mut array),
            _ => libc::EINVAL,
        };
        if code == 0 {
            out.write(array.take_array());
        }
        code
    }
}

unsafe extern "C-unwind" fn host_get_last_error(stream: *mut HostStream) -> *const c_char {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `as_host`
    // made. Until its release the stream behind it lives.
    unsafe {
        match behind(stream).map(|stream| (stream, (*stream).get_last_error)) {
            Some((stream, Some(get_last_error))) => get_last_error(stream),
            _ => ptr::null(),
        }
    }
}

unsafe extern "C-unwind" fn host_release(stream: *mut HostStream) {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, which `as_host`
    // made with a boxed stream as `private_data`. A released stream has nothing behind it, so the box is freed once.
    unsafe {
        if let Some(behind) = behind(stream) {
            (*stream).release = None;
            (*stream).private_data = ptr::null_mut();
            drop(Box::from_raw(behind));
        }
    }
}
