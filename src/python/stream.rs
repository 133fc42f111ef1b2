//! Streams and arrays between this crate and Python: C streams in front of C streams, which see to the interpreter.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;

use arrow_schema::ffi::FFI_ArrowSchema;

use super::attached::{detached, drop_attached};
use crate::abi::c_data::{CArray, CSchema};
use crate::abi::{ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, guard};
use crate::error::{Error, Result};

/// A stream that goes to Python: whoever calls it lets go of the interpreter meanwhile.
pub(super) fn outgoing(stream: FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowDeviceArrayStream> {
    let stream = complete(stream)?;
    Ok(adapt(DeviceStream {
        stream,
        is_from_python: false,
    }))
}

/// A stream from Python: it and its arrays are released as what comes from Python must be.
pub(super) fn incoming(stream: FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowDeviceArrayStream> {
    let stream = complete(stream)?;
    Ok(adapt(DeviceStream {
        stream,
        is_from_python: true,
    }))
}

/// As [`incoming`], for a stream on the CPU.
pub(super) fn incoming_host(stream: HostStream) -> Result<FFI_ArrowDeviceArrayStream> {
    if stream.release.is_none() {
        return Err(Error::Released("the ArrowArrayStream"));
    }
    let callbacks = [
        stream.get_schema.is_some(),
        stream.get_next.is_some(),
        stream.get_last_error.is_some(),
    ];
    check_callbacks(callbacks)?;
    Ok(adapt(stream))
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
        let inner = (*array).private_data.cast::<FFI_ArrowDeviceArray>();
        (*array).private_data = ptr::null_mut();
        (*array).release = None;
        if !inner.is_null() {
            drop_attached(Box::from_raw(inner));
        }
    }
}

/// The schema that a stream gives.
pub(super) fn schema(stream: &mut FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowSchema> {
    let this = ptr::from_mut(stream);
    let mut out = FFI_ArrowSchema::empty();
    // SAFETY: `stream` is one of `adapt`, with all its callbacks, and alive; `out` is ours.
    let (code, text) = unsafe {
        match (stream.get_schema, stream.get_last_error) {
            (Some(get_schema), Some(get_last_error)) => match get_schema(this, &mut out) {
                0 => return Ok(out),
                code => (code, get_last_error(this)),
            },
            _ => return Err(Error::Released("the ArrowDeviceArrayStream")),
        }
    };
    let message = if text.is_null() {
        "the producer gives no text".into()
    } else {
        // SAFETY: terminated, and valid until the next call.
        let text = unsafe { std::ffi::CStr::from_ptr(text) };
        text.to_string_lossy().into_owned().into()
    };
    Err(Error::Foreign {
        operation: "get_schema",
        errno: code,
        message,
    })
}

fn complete(stream: FFI_ArrowDeviceArrayStream) -> Result<FFI_ArrowDeviceArrayStream> {
    if stream.is_released() {
        return Err(Error::Released("the ArrowDeviceArrayStream"));
    }
    check_callbacks([
        stream.get_schema.is_some(),
        stream.get_next.is_some(),
        stream.get_last_error.is_some(),
    ])?;
    Ok(stream)
}

fn check_callbacks(present: [bool; 3]) -> Result<()> {
    let names = [
        "stream.get_schema",
        "stream.get_next",
        "stream.get_last_error",
    ];
    match names.iter().zip(present).find(|(_, present)| !present) {
        Some((name, _)) => Err(Error::invalid(*name, "is null")),
        None => Ok(()),
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
        let mut array = CArray::empty();
        let code = match self.get_next {
            // SAFETY: as above; `array` is ours.
            Some(get_next) => unsafe { get_next(self, &mut array) },
            None => libc::EINVAL,
        };
        if !array.is_released() {
            // SAFETY: `out` is the caller's.
            unsafe { FFI_ArrowDeviceArray::from_host(array).write_to(out) };
        }
        code
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
    source: S,
    /// Of an error that is not the source's own.
    text: Option<CString>,
}

fn adapt<S: Source>(source: S) -> FFI_ArrowDeviceArrayStream {
    let device_type = source.device_type();
    let adapter = Box::new(Adapter { source, text: None });
    // SAFETY: the callbacks below keep to the stream interface for a boxed `Adapter`, which is `Send`, because `Source`
    // does.
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
/// `stream` is null or a stream of [`adapt`] for this `S`, that nobody else uses during `'a`.
unsafe fn adapter<'a, S>(stream: *mut FFI_ArrowDeviceArrayStream) -> Option<&'a mut Adapter<S>> {
    // SAFETY: the caller's; a stream that is not released has its adapter.
    unsafe {
        let stream = stream.as_ref()?;
        if stream.is_released() {
            return None;
        }
        stream.private_data.cast::<Adapter<S>>().as_mut()
    }
}

/// Calls the source without the interpreter; what is caught on the way is EIO, with its text.
fn call<S: Source>(
    adapter: &mut Adapter<S>,
    operation: &'static str,
    f: impl FnOnce(&mut S) -> c_int + Send,
) -> c_int {
    adapter.text = None;
    let source = &mut adapter.source;
    detached(|| guard::call_foreign(operation, || f(source))).unwrap_or_else(|e| {
        adapter.text = CString::new(e.to_string().replace('\0', " ")).ok();
        e.errno()
    })
}

/// An address that another thread may use while this one waits for it.
struct Out<T>(*mut T);

// SAFETY: the consumer gives a pointer for the length of the call, whatever thread works for it.
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
    // SAFETY: the consumer's.
    let Some(adapter) = (unsafe { adapter::<S>(stream) }) else {
        return libc::EINVAL;
    };
    if out.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the consumer's: `out` is valid for a write and holds nothing that must be released.
    unsafe { out.cast::<CSchema>().write(CSchema::empty()) };
    let to = Out(out);
    // SAFETY: valid, and empty now.
    call(adapter, "get_schema", move |source| unsafe {
        source.get_schema(to.get())
    })
}

unsafe extern "C-unwind" fn get_next<S: Source>(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    // SAFETY: the consumer's.
    let Some(adapter) = (unsafe { adapter::<S>(stream) }) else {
        return libc::EINVAL;
    };
    if out.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: as in `get_schema`.
    unsafe { FFI_ArrowDeviceArray::empty().write_to(out) };
    let mut array = FFI_ArrowDeviceArray::empty();
    let to = Out(&raw mut array);
    // SAFETY: ours, and empty.
    let code = call(adapter, "get_next", move |source| unsafe {
        source.get_next(to.get())
    });
    if adapter.source.is_from_python() {
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
    let Some(adapter) = (unsafe { adapter::<S>(stream) }) else {
        return ptr::null();
    };
    if let Some(text) = &adapter.text {
        return text.as_ptr();
    }
    let source = &mut adapter.source;
    // SAFETY: the source's last operation failed.
    guard::call_foreign("get_last_error", || unsafe { source.get_last_error() })
        .unwrap_or(ptr::null())
}

unsafe extern "C-unwind" fn release<S: Source>(stream: *mut FFI_ArrowDeviceArrayStream) {
    // SAFETY: the consumer's: a valid stream, released once.
    unsafe {
        if adapter::<S>(stream).is_none() {
            return;
        }
        let adapter = (*stream).private_data.cast::<Adapter<S>>();
        FFI_ArrowDeviceArrayStream::mark_released(stream);
        let adapter = Box::from_raw(adapter);
        let source = adapter.source;
        if source.is_from_python() {
            drop_attached(source);
        } else {
            // A panic of the reader's drop ends here.
            let _ = guard::call_foreign("release", || detached(|| drop(source)));
        }
    }
}
