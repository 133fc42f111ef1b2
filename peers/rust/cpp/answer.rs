//! How these functions answer: 0, an errno, or [`DIFFERS`], and a text for this thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use arrow_device::Error;
use arrow_schema::ArrowError;

const EIO: c_int = 5;
const EINVAL: c_int = 22;
/// Values are not as expected.
pub(crate) const DIFFERS: c_int = -1;

/// A code and a text.
pub(crate) struct Failure(c_int, String);

impl Failure {
    /// Not what was expected.
    pub(crate) fn differs(text: impl Into<String>) -> Self {
        Self(DIFFERS, text.into())
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

impl From<&str> for Failure {
    fn from(text: &str) -> Self {
        Self(EINVAL, text.into())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a function's body; a panic is EIO with its text.
pub(crate) fn answer(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    let done = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|t| t.to_string()));
        Err(Failure(EIO, format!("panicked: {text:?}")))
    });
    let Err(Failure(code, text)) = done else {
        return 0;
    };
    let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    let _ = LAST.try_with(|last| last.replace(text));
    if code == 0 { EIO } else { code }
}

/// The text of this thread's last error, valid until its next one.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_cpp_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().as_ptr());
    text.unwrap_or(ptr::null())
}
