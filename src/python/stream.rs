//! Streams and arrays between this crate and Python: C streams in front of C streams, which see to the interpreter.
//!
//! A consumer that keeps the interpreter to itself may believe that nobody else gets at its stream meanwhile. Here the
//! interpreter is let go of in the middle of a call: a second call that comes then is refused, not run.

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::attached::{detached, drop_attached, has_interpreter};
use crate::abi::c_data::{CArray, CSchema};
use crate::abi::{
    ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, ForeignSchema, guard,
};
use crate::error::{Error, Result};
use crate::interchange::ImportOptions;
use crate::stream::import::Stream;

/// A stream that goes to Python: whoever calls it lets go of the interpreter meanwhile.
pub(super) fn outgoing(stream: FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowDeviceArrayStream> {
    Ok(adapt(DeviceStream {
        stream: checked(stream)?.into_inner(),
        is_from_python: false,
    }))
}

/// A stream, and the schema that it gives.
pub(super) fn with_schema(
    stream: FFI_ArrowDeviceArrayStream,
) -> Result<(FFI_ArrowDeviceArrayStream, ForeignSchema)> {
    let mut stream = checked(stream)?;
    let schema = stream.schema()?;
    Ok((stream.into_inner(), schema))
}

/// A stream from Python: it and its arrays are released as what comes from Python must be.
pub(super) fn incoming(stream: FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowDeviceArrayStream> {
    Ok(adapt(DeviceStream {
        stream: checked(stream)?.into_inner(),
        is_from_python: true,
    }))
}

/// As [`incoming`], for a stream on the CPU.
pub(super) fn incoming_host(stream: HostStream) -> Result<FFI_ArrowDeviceArrayStream> {
    if stream.release.is_none() {
        return Err(Error::Released("the ArrowArrayStream"));
    }
    Ok(adapt(stream))
}

/// With all its callbacks.
fn checked(stream: FFI_ArrowDeviceArrayStream) -> Result<Stream> {
    Stream::open(stream, ImportOptions::default())
}

/// The same array, released as what comes from Python must be.
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
    // SAFETY: the consumer's: a valid array of `released_attached`, released once.
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

// SAFETY: as for `FFI_ArrowDeviceArrayStream`.
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
        // SAFETY: as for `FFI_ArrowDeviceArrayStream`.
        let outcome = unsafe {
            guard::release_once("ArrowArrayStream.release", this, &raw mut (*this).release)
        };
        // A drop cannot report it. The struct is released all the same.
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
/// The methods keep to the C device stream interface, for `out` that is valid for writes and empty.
unsafe trait Source: Send + 'static {
    fn device_type(&self) -> ArrowDeviceType;
    unsafe fn get_schema(&mut self, out: *mut FFI_ArrowSchema) -> c_int;
    unsafe fn get_next(&mut self, out: *mut FFI_ArrowDeviceArray) -> c_int;
    unsafe fn get_last_error(&mut self) -> *const c_char;
    /// It and its arrays are released as what comes from Python must be.
    fn is_from_python(&self) -> bool;
}

// SAFETY: calls go to the producer's own callbacks, on its own struct.
unsafe impl Source for DeviceStream {
    fn device_type(&self) -> ArrowDeviceType {
        self.stream.device_type
    }

    unsafe fn get_schema(&mut self, out: *mut FFI_ArrowSchema) -> c_int {
        match self.stream.get_schema {
            // SAFETY: the producer's callback; `out` is the caller's.
            Some(get_schema) => unsafe { get_schema(&mut self.stream, out) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_next(&mut self, out: *mut FFI_ArrowDeviceArray) -> c_int {
        match self.stream.get_next {
            // SAFETY: as above.
            Some(get_next) => unsafe { get_next(&mut self.stream, out) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_last_error(&mut self) -> *const c_char {
        match self.stream.get_last_error {
            // SAFETY: as above.
            Some(get_last_error) => unsafe { get_last_error(&mut self.stream) },
            None => ptr::null(),
        }
    }

    fn is_from_python(&self) -> bool {
        self.is_from_python
    }
}

// SAFETY: as above; an `ArrowArray` is put into an `ArrowDeviceArray` on the CPU.
unsafe impl Source for HostStream {
    fn device_type(&self) -> ArrowDeviceType {
        ArrowDeviceType::CPU
    }

    unsafe fn get_schema(&mut self, out: *mut FFI_ArrowSchema) -> c_int {
        match self.get_schema {
            // SAFETY: the producer's callback, on its own struct; `out` is the caller's.
            Some(get_schema) => unsafe { get_schema(self, out) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_next(&mut self, out: *mut FFI_ArrowDeviceArray) -> c_int {
        // Written where it is to be: what the callback leaves when it unwinds is `out`'s owner's.
        // SAFETY: `out` is the caller's, and empty.
        let array = unsafe {
            FFI_ArrowDeviceArray::from_host(CArray::empty()).write_to(out);
            &raw mut (*out).array
        };
        match self.get_next {
            // SAFETY: as above; `array` is valid and empty.
            Some(get_next) => unsafe { get_next(self, array) },
            None => libc::EINVAL,
        }
    }

    unsafe fn get_last_error(&mut self) -> *const c_char {
        match self.get_last_error {
            // SAFETY: as above.
            Some(get_last_error) => unsafe { get_last_error(self) },
            None => ptr::null(),
        }
    }

    fn is_from_python(&self) -> bool {
        true
    }
}

/// The `private_data` of a stream of [`adapt`].
struct Adapter<S> {
    state: AtomicU8,
    /// Of the one call that is under way.
    inner: UnsafeCell<Inner<S>>,
}

struct Inner<S> {
    source: S,
    /// Of an error that is not the source's own.
    text: Option<CString>,
}

/// States of an adapter.
const IDLE: u8 = 0;
const BUSY: u8 = 1;
/// The call that is under way frees it at its end.
const BUSY_AND_RELEASED: u8 = 2;

const IN_USE: &CStr = c"another call on this stream is under way";

fn adapt<S: Source>(source: S) -> FFI_ArrowDeviceArrayStream {
    let device_type = source.device_type();
    let adapter = Box::new(Adapter {
        state: AtomicU8::new(IDLE),
        inner: UnsafeCell::new(Inner { source, text: None }),
    });
    // SAFETY: the callbacks below keep to the stream interface for a boxed `Adapter`, whose content is `Send`, because
    // `Source` does.
    unsafe {
        FFI_ArrowDeviceArrayStream::from_parts(
            device_type,
            get_schema::<S>,
            get_next::<S>,
            get_last_error::<S>,
            release::<S>,
            Box::into_raw(adapter).cast(),
        )
    }
}

/// # Safety
/// `stream` is null or a stream of [`adapt`] for this `S`.
unsafe fn adapter<S>(stream: *mut FFI_ArrowDeviceArrayStream) -> Option<NonNull<Adapter<S>>> {
    // SAFETY: the caller's; a stream that is not released has its adapter.
    unsafe {
        if stream.is_null() || (*stream).release.is_none() {
            return None;
        }
        NonNull::new((*stream).private_data.cast())
    }
}

/// The one call of an adapter that is under way.
struct Call<S: Source>(NonNull<Adapter<S>>);

impl<S: Source> Call<S> {
    /// # Safety
    /// As [`adapter`].
    unsafe fn begin(stream: *mut FFI_ArrowDeviceArrayStream) -> Result<Self, c_int> {
        // SAFETY: the caller's.
        let adapter = unsafe { adapter::<S>(stream) }.ok_or(libc::EINVAL)?;
        // SAFETY: alive while the stream is not released.
        let state = unsafe { &(*adapter.as_ptr()).state };
        match state.compare_exchange(IDLE, BUSY, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(Self(adapter)),
            Err(_) => Err(libc::EBUSY),
        }
    }

    fn inner(&mut self) -> &mut Inner<S> {
        // SAFETY: this is the only call, and frees the adapter only when it ends.
        unsafe { &mut *(*self.0.as_ptr()).inner.get() }
    }

    /// Calls the source without the interpreter; what is caught on the way is EIO, with its text.
    fn ask(&mut self, operation: &'static str, f: impl FnOnce(&mut S) -> c_int + Send) -> c_int {
        let Inner { source, text } = self.inner();
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

impl<S: Source> Drop for Call<S> {
    fn drop(&mut self) {
        // SAFETY: alive until this call has ended.
        let state = unsafe { &(*self.0.as_ptr()).state };
        if state
            .compare_exchange(BUSY, IDLE, Ordering::Release, Ordering::Relaxed)
            .is_err()
        {
            // SAFETY: released meanwhile, and left to this call.
            unsafe { free(self.0) };
        }
    }
}

/// # Safety
/// Nobody uses the adapter any more.
unsafe fn free<S: Source>(adapter: NonNull<Adapter<S>>) {
    // SAFETY: made by `adapt`, freed once.
    let adapter = unsafe { Box::from_raw(adapter.as_ptr()) };
    let source = adapter.inner.into_inner().source;
    if source.is_from_python() {
        drop_attached(source);
    } else {
        // A panic of the reader's drop ends here.
        let _ = guard::call_foreign("release", || detached(|| drop(source)));
    }
}

/// An address that is used for the length of a call.
struct Out<T>(*mut T);

// SAFETY: the consumer gives a pointer for the length of the call, whatever the thread is attached to meanwhile.
unsafe impl<T> Send for Out<T> {}

impl<T> Out<T> {
    /// A method, so that closures capture the whole.
    fn get(self) -> *mut T {
        self.0
    }
}

unsafe extern "C-unwind" fn get_schema<S: Source>(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowSchema,
) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the consumer's: `out` is valid for a write and holds nothing that must be released.
    unsafe { out.cast::<CSchema>().write(CSchema::empty()) };
    // SAFETY: the consumer's.
    let mut call = match unsafe { Call::<S>::begin(stream) } {
        Ok(call) => call,
        Err(code) => return code,
    };
    let mut schema = ForeignSchema::empty();
    let to = Out(schema.as_mut_ptr());
    // SAFETY: ours, and empty.
    let code = call.ask("get_schema", move |source| unsafe {
        source.get_schema(to.get())
    });
    if code == 0 {
        // SAFETY: as above.
        unsafe { out.cast::<CSchema>().write(schema.into_inner()) };
    } else if call.inner().source.is_from_python() {
        drop_attached(schema);
    }
    code
}

unsafe extern "C-unwind" fn get_next<S: Source>(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: as in `get_schema`.
    unsafe { FFI_ArrowDeviceArray::empty().write_to(out) };
    // SAFETY: the consumer's.
    let mut call = match unsafe { Call::<S>::begin(stream) } {
        Ok(call) => call,
        Err(code) => return code,
    };
    let mut array = FFI_ArrowDeviceArray::empty();
    let to = Out(&raw mut array);
    // SAFETY: ours, and empty.
    let code = call.ask("get_next", move |source| unsafe {
        source.get_next(to.get())
    });
    if call.inner().source.is_from_python() {
        array = released_attached(array);
    }
    if code == 0 {
        // SAFETY: as above.
        unsafe { array.write_to(out) };
    }
    code
}

unsafe extern "C-unwind" fn get_last_error<S: Source>(
    stream: *mut FFI_ArrowDeviceArrayStream,
) -> *const c_char {
    // SAFETY: the consumer's.
    let mut call = match unsafe { Call::<S>::begin(stream) } {
        Ok(call) => call,
        Err(libc::EBUSY) => return IN_USE.as_ptr(),
        Err(_) => return ptr::null(),
    };
    let Inner { source, text } = call.inner();
    if let Some(text) = text {
        return text.as_ptr();
    }
    if source.is_from_python() && !has_interpreter() {
        return ptr::null();
    }
    // SAFETY: the source's last operation failed.
    guard::call_foreign("get_last_error", || unsafe { source.get_last_error() })
        .unwrap_or(ptr::null())
}

unsafe extern "C-unwind" fn release<S: Source>(stream: *mut FFI_ArrowDeviceArrayStream) {
    // SAFETY: the consumer's: a valid stream, released once.
    let Some(adapter) = (unsafe { adapter::<S>(stream) }) else {
        return;
    };
    // SAFETY: as above.
    unsafe { FFI_ArrowDeviceArrayStream::mark_released(stream) };
    // SAFETY: alive: it is freed here, or by the call that is under way once this has told it to.
    let state = unsafe { &(*adapter.as_ptr()).state };
    loop {
        if state
            .compare_exchange(IDLE, BUSY, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
        {
            // SAFETY: no call is under way, and none can begin on a released stream.
            return unsafe { free(adapter) };
        }
        let told = state.compare_exchange(
            BUSY,
            BUSY_AND_RELEASED,
            Ordering::Release,
            Ordering::Relaxed,
        );
        if told.is_ok() {
            return;
        }
    }
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
    // SAFETY: the caller's.
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
    // SAFETY: the consumer's; the stream behind it is alive, and one of `adapt`, with all its callbacks.
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
    // SAFETY: as in `host_get_schema`; `out` is valid for a write.
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
    // SAFETY: as in `host_get_schema`.
    unsafe {
        match behind(stream).map(|stream| (stream, (*stream).get_last_error)) {
            Some((stream, Some(get_last_error))) => get_last_error(stream),
            _ => ptr::null(),
        }
    }
}

unsafe extern "C-unwind" fn host_release(stream: *mut HostStream) {
    // SAFETY: as in `host_get_schema`; released once.
    unsafe {
        if let Some(behind) = behind(stream) {
            (*stream).release = None;
            (*stream).private_data = ptr::null_mut();
            drop(Box::from_raw(behind));
        }
    }
}
