//! Calls across the C boundary, in both directions, that never unwind.
//!
//! In a program built with `panic = "unwind"`:
//! - A Rust panic becomes [`Error::Panic`] with its text.
//! - A foreign exception (of C++, say), and a panic of another copy of the Rust runtime, ends the
//!   process: callbacks are typed `extern "C-unwind"`, so that it may unwind to the `catch_unwind`
//!   of the guard, which aborts.
//!
//! With `panic = "abort"` both end the process.

use std::any::Any;
use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// The type of a release callback. It may unwind into the guard.
pub(crate) type ReleaseFn<T> = unsafe extern "C-unwind" fn(*mut T);

/// Calls code of another library or program; a panic in it becomes [`Error::Panic`] with its text.
pub(crate) fn call_foreign<R>(operation: &'static str, f: impl FnOnce() -> R) -> Result<R> {
    // Unwind safety: after a panic, only the caller's own values are used again, and every caller
    // treats the error as "the callback ran, its effect is unknown".
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| panicked(operation, payload))
}

/// As [`call_foreign`], for code that returns a result: the body of one of this crate's own
/// `extern "C"` functions, which must never unwind.
pub(crate) fn callback<R>(operation: &'static str, f: impl FnOnce() -> Result<R>) -> Result<R> {
    call_foreign(operation, f)?
}

/// A text for C, without what would end it early.
pub(crate) fn c_text(text: String) -> Option<CString> {
    let mut text = text.into_bytes();
    text.retain(|byte| *byte != 0);
    CString::new(text).ok()
}

/// Calls a struct's release callback, if it has one, and marks the struct released even if the
/// callback did not: a panic may have cut it short, and a second call could free twice, while a
/// missing one only leaks.
///
/// # Safety
/// `slot` points to the `release` member of the struct at `this`; both are valid for reads and
/// writes, and nothing else uses the struct during the call. A callback in `slot` is the one that
/// the struct's owner installed and may be called now: `this` has not been released or moved.
pub(crate) unsafe fn release_once<T>(
    operation: &'static str,
    this: *mut T,
    slot: *mut Option<ReleaseFn<T>>,
) -> Result<()> {
    // SAFETY: the caller guarantees that `slot` is valid for reads (see `# Safety`).
    let Some(release) = (unsafe { slot.read() }) else {
        return Ok(());
    };
    // SAFETY: the caller guarantees that `release` belongs to `this` and has not run (see
    // `# Safety`).
    let result = call_foreign(operation, || unsafe { release(this) });
    // SAFETY: the caller guarantees that `slot` is valid for writes; a release callback frees what
    // the struct points to, never the struct itself.
    unsafe { slot.write(None) };
    result
}

/// What the C structs that a callback releases have in common: they are moved out of foreign memory, and released once. The
/// named member is the callback, which is null in a struct that was released or moved away; the texts name it for errors, and
/// complete the safety rules of `from_raw`.
macro_rules! released_once {
    ($struct:ident, $($callback:ident).+, $operation:literal, $contract:literal) => {
        impl $struct {
            /// Moves the struct out of `source` and leaves a released one there. Returns one whose members are all zero if
            /// `source` was released or moved away.
            ///
            /// # Safety
            /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody
            ///   else during the call; no copy of the struct is used afterwards.
            #[doc = concat!("- ", $contract)]
            pub unsafe fn from_raw(source: *mut Self) -> Self {
                // SAFETY: the caller guarantees that `source` is valid for reads and writes and
                // holds a struct (see `# Safety`). `replace` drops nothing.
                let taken = unsafe { std::ptr::replace(source, Self::empty()) };
                if taken.is_released() {
                    return Self::empty();
                }
                taken
            }

            /// Returns whether the release callback is null: the struct was released or moved away, and owns nothing.
            pub const fn is_released(&self) -> bool {
                self.$($callback).+.is_none()
            }

            /// Calls the release callback, if there is one. The struct is released even if this returns an error, for a panic.
            pub(crate) fn call_release(&mut self) -> $crate::error::Result<()> {
                // The address of the whole struct, with which the producer may reach all members.
                let this = std::ptr::from_mut(self);
                // SAFETY: `self` is the only copy of the struct (`from_raw` moves), so its callback has not run; whoever made
                // the struct guaranteed that it may run now.
                unsafe {
                    $crate::abi::guard::release_once($operation, this.cast(), &raw mut (*this).$($callback).+)
                }
            }
        }

        impl Drop for $struct {
            fn drop(&mut self) {
                // A drop cannot report an error.
                let _ = self.call_release();
            }
        }
    };
}
pub(super) use released_once;

/// Returns the text of a foreign producer, which may be null.
///
/// # Safety
/// `text` is null or points to a string that ends with a null byte.
pub(crate) unsafe fn foreign_text(text: *const c_char) -> String {
    match text.is_null() {
        true => "the producer gives no text".to_owned(),
        // SAFETY: the caller guarantees a string (see `# Safety`).
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    }
}

/// Returns the error for a caught payload. Never panics and never drops a payload of unknown type,
/// whose destructor could panic.
fn panicked(operation: &'static str, payload: Box<dyn Any + Send>) -> Error {
    let text = payload.downcast_ref::<&'static str>();
    let text = text.map(|text| Cow::Borrowed(*text));
    let text = text.or_else(|| Some(payload.downcast_ref::<String>()?.clone().into()));
    let message = text.unwrap_or_else(|| {
        // Its drop may panic, too.
        std::mem::forget(payload);
        Cow::Borrowed("a panic without a text")
    });
    Error::Panic { operation, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("the payload's destructor ran");
        }
    }

    fn text(e: Error) -> String {
        assert_eq!(e.errno(), libc::EIO);
        e.to_string()
    }

    #[test]
    fn results_pass() {
        assert_eq!(call_foreign("f", || 7).unwrap(), 7);
        assert_eq!(callback("f", || Ok(7)).unwrap(), 7);
        let refused = callback::<()>("f", || Err(Error::argument("no"))).unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument(_)));
    }

    #[test]
    fn panics_become_errors() {
        let e = callback::<()>("f", || panic!("plain")).unwrap_err();
        assert_eq!(text(e), "f panicked: plain");
        let e = callback::<()>("g", || panic!("with {}", 1)).unwrap_err();
        assert_eq!(text(e), "g panicked: with 1");
    }

    #[test]
    fn a_payload_that_panics_on_drop_stays_inside() {
        // The bomb leaks on purpose. It has no size, so Miri sees no leak either.
        let e = callback::<()>("f", || std::panic::panic_any(Bomb)).unwrap_err();
        assert_eq!(text(e), "f panicked: a panic without a text");
    }
}
