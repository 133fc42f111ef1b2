//! Results of this library's functions: an errno, and a text for the calling thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::path::Path;
use std::ptr;

use arrow_device::Error;
use arrow_schema::ArrowError;

use roundtrip::guard;

const EIO: c_int = 5;
const EINVAL: c_int = 22;

/// An errno and a text.
pub(crate) struct Failure(c_int, String);

impl Failure {
    /// An argument is invalid.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self(EINVAL, text.into())
    }

    /// A file that cannot be read.
    pub(crate) fn file(path: &Path, e: &std::io::Error) -> Self {
        let errno = e.raw_os_error().unwrap_or(EIO);
        Self(errno, format!("{}: {e}", path.display()))
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self(e.errno(), e.to_string())
    }
}

impl From<ArrowError> for Failure {
    fn from(e: ArrowError) -> Self {
        match e {
            ArrowError::IoError(text, e) => Self(e.raw_os_error().unwrap_or(EIO), text),
            e => Error::from(e).into(),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        Self(e.raw_os_error().unwrap_or(EIO), e.to_string())
    }
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Runs the body of a function. A panic becomes EIO, with its text.
pub(crate) fn answer(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    let done = guard::catch(body).unwrap_or_else(|panic| Err(Failure(EIO, panic)));
    let Err(Failure(errno, text)) = done else {
        return 0;
    };
    let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    // A thread that is ending can no longer store a text.
    let _ = LAST.try_with(|last| last.replace(Some(text)));
    // A foreign producer may have failed with an errno of 0.
    if errno == 0 { EIO } else { errno }
}

/// Returns the text of this thread's last error. The header describes it.
#[unsafe(no_mangle)]
pub extern "C" fn arrow_device_last_error() -> *const c_char {
    let text = LAST.try_with(|last| last.borrow().as_ref().map(|text| text.as_ptr()));
    text.ok().flatten().unwrap_or(ptr::null())
}
