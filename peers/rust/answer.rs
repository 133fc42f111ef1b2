//! How the functions of the tests answer. Apart from the C library's own, so that a call of the tests does not change
//! the error that is under test.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use arrow_device::{Device, Devices, Error, SyncPolicy, metal};
use arrow_schema::ArrowError;

const EIO: c_int = 5;
const EINVAL: c_int = 22;
/// Values are not as expected.
const DIFFERS: c_int = -1;

pub(crate) struct Failure(c_int, String);

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn differs(text: impl Into<String>) -> Self {
        Self(DIFFERS, text.into())
    }

    /// For a reader's item.
    pub(crate) fn into_error(self) -> Error {
        ArrowError::InvalidArgumentError(self.1).into()
    }
}

impl From<&str> for Failure {
    fn from(text: &str) -> Self {
        Self(EINVAL, text.into())
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

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a function's body; a panic is EIO with its text.
pub(crate) fn answer(body: impl FnOnce() -> Outcome<()>) -> c_int {
    let done = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|t| t.to_string()));
        Err(Failure(EIO, format!("panicked: {text:?}")))
    });
    let Err(Failure(code, text)) = done else {
        return 0;
    };
    let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    // A thread that is ending has no text any more.
    let _ = LAST.try_with(|last| last.replace(text));
    if code == 0 { EIO } else { code }
}

/// The text of this thread's last failure of a function `peers_...`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().as_ptr());
    text.unwrap_or(ptr::null())
}

/// # Safety
/// `text` is null, or null-terminated and lives for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Outcome<&'a str> {
    if text.is_null() {
        return Err("a text is null".into());
    }
    // SAFETY: the caller guarantees that `text` is null-terminated (see `# Safety`).
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map_err(|_| "a text is not UTF-8".into())
}

/// # Safety
/// As [`text`].
pub(crate) unsafe fn device(name: *const c_char) -> Outcome<Device> {
    // SAFETY: the caller guarantees that `name` is null or null-terminated (see `# Safety`).
    match unsafe { text(name) }? {
        // As ArrowMetal names it.
        "metal" => Ok(metal::shared_memory(-1)),
        name => Ok(Devices::open(name)?),
    }
}

pub(crate) fn policy(wait: bool) -> SyncPolicy {
    match wait {
        true => SyncPolicy::Wait,
        false => SyncPolicy::Event,
    }
}
