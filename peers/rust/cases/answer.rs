//! How the functions of the tests answer. Apart from the example library's own, so that a call of the tests does not
//! change the error that is under test.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use arrow_device::{Device, Devices, Error, SyncPolicy, metal};
use arrow_schema::ArrowError;

const EIO: c_int = 5;
const EINVAL: c_int = 22;

pub(crate) struct Failure(c_int, String);

pub(super) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self(EINVAL, text.into())
    }

    /// For a reader's item.
    pub(crate) fn into_error(self) -> Error {
        ArrowError::InvalidArgumentError(self.1).into()
    }
}

impl From<String> for Failure {
    /// A difference between values.
    fn from(text: String) -> Self {
        Self(EIO, text)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self(e.errno(), e.to_string())
    }
}

impl From<ArrowError> for Failure {
    fn from(e: ArrowError) -> Self {
        Error::from(e).into()
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        Self(e.raw_os_error().unwrap_or(EIO), e.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

pub(super) fn no_panic<T>(body: impl FnOnce() -> T) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
        let text = match payload.downcast::<String>() {
            Ok(text) => *text,
            Err(payload) => match payload.downcast::<&str>() {
                Ok(text) => text.to_string(),
                Err(_) => "without a text".into(),
            },
        };
        Failure(EIO, format!("panic: {text}"))
    })
}

/// Runs a function's body; a panic is EIO with its text.
pub(super) fn answer(body: impl FnOnce() -> Outcome<()>) -> c_int {
    let Err(Failure(errno, text)) = no_panic(body).and_then(|done| done) else {
        return 0;
    };
    let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    // A thread that is ending has no text any more.
    let _ = LAST.try_with(|last| last.replace(text));
    if errno == 0 { EIO } else { errno }
}

/// The text of this thread's last failure of a function `peers_...`.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().as_ptr());
    text.unwrap_or(ptr::null())
}

/// # Safety
/// `pointer` is null, or valid for `'a`.
pub(super) unsafe fn borrow<'a, T>(pointer: *const T, name: &str) -> Outcome<&'a T> {
    // SAFETY: the caller guarantees that `pointer` is null or alive (see `# Safety`).
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::invalid(format!("{name} is null")))
}

/// # Safety
/// `text` is null, or null-terminated and lives for `'a`.
pub(super) unsafe fn text<'a>(text: *const c_char, name: &str) -> Outcome<&'a str> {
    if text.is_null() {
        return Err(Failure::invalid(format!("{name} is null")));
    }
    // SAFETY: the caller guarantees that `text` is null-terminated (see `# Safety`).
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))
}

/// # Safety
/// As [`text`].
pub(super) unsafe fn device(name: *const c_char) -> Outcome<Device> {
    // SAFETY: the caller guarantees that `name` is null or null-terminated (see `# Safety`).
    match unsafe { text(name, "device") }? {
        // As ArrowMetal names it.
        "metal" => Ok(metal::shared_memory(-1)),
        name => Ok(Devices::open(name)?),
    }
}

pub(super) fn policy(wait: bool) -> SyncPolicy {
    if wait {
        SyncPolicy::Wait
    } else {
        SyncPolicy::Event
    }
}

/// Moves to `out`, which the caller gave for writing.
///
/// # Safety
/// `out` is null or valid for a write; what is there is not released.
pub(super) unsafe fn put<T>(out: *mut T, value: T, name: &str) -> Outcome<()> {
    if out.is_null() {
        return Err(Failure::invalid(format!("{name} is null")));
    }
    // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
    unsafe { out.write(value) };
    Ok(())
}

/// As [`put`], both or neither.
///
/// # Safety
/// As [`put`], for both.
pub(super) unsafe fn put_both<A, S>(
    out: *mut A,
    array: A,
    out_schema: *mut S,
    schema: S,
) -> Outcome<()> {
    if out.is_null() {
        return Err(Failure::invalid("out is null"));
    }
    // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
    unsafe {
        put(out_schema, schema, "out_schema")?;
        put(out, array, "out")
    }
}
