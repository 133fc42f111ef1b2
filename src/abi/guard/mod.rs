//! Calls across the C boundary, in both directions, that never unwind.
//!
//! What a guard catches, with `panic = "unwind"`:
//! - **A Rust panic of this program's own runtime** becomes [`Error::Panic`] with its text.
//! - **A foreign exception** (thrown by C++ or any other language) becomes [`Error::Panic`] too, on
//!   x86-64 Linux with glibc; for C++ the text names its type. It is destroyed by who threw it, and the
//!   drops of the Rust frames that it leaves run. `catch_unwind` of stable Rust would end the process;
//!   `foreign` tells how it is kept from there.
//!
//! What ends the process, in a defined way, because foreign callbacks are typed `extern "C-unwind"`:
//! - foreign exceptions elsewhere: "Rust cannot catch foreign exceptions, aborting";
//! - an exception of a library that has an unwinder of its own (`-static-libgcc`);
//! - a panic of another copy of the Rust runtime, in another library: as the first;
//! - the forced end of a thread (`pthread_exit`) from within a callback.
//!
//! With `panic = "abort"` nothing is caught: a panic has ended the process before, and an exception ends
//! it at the first Rust frame.

#[cfg(all(
    target_arch = "x86_64",
    target_pointer_width = "64",
    target_os = "linux",
    target_env = "gnu",
    not(miri)
))]
mod foreign;

use std::any::Any;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// A release callback, as it is called: it may unwind, and the guard deals with it.
pub(crate) type ReleaseFn<T> = unsafe extern "C-unwind" fn(*mut T);

/// Without the unwinder's help: foreign exceptions pass, and meet `catch_unwind`.
#[cfg(not(all(
    target_arch = "x86_64",
    target_pointer_width = "64",
    target_os = "linux",
    target_env = "gnu",
    not(miri)
)))]
mod foreign {
    pub(super) fn call<R>(f: impl FnOnce() -> R) -> Result<R, std::borrow::Cow<'static, str>> {
        Ok(f())
    }
}

/// Calls foreign code; a panic or a foreign exception in it becomes [`Error::Panic`] with its text.
pub(crate) fn call_foreign<R>(operation: &'static str, f: impl FnOnce() -> R) -> Result<R> {
    // Unwind safety: after a panic nothing of `f` is used again but what its caller owns, and every
    // caller in this crate treats an error as "the callback ran, its effect is unknown".
    match catch_unwind(AssertUnwindSafe(|| foreign::call(f))) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(message)) => Err(Error::Panic { operation, message }),
        Err(payload) => Err(panicked(operation, payload)),
    }
}

/// Calls other Rust code, which panics but throws nothing else: for less than [`call_foreign`].
pub(crate) fn call_rust<R>(operation: &'static str, f: impl FnOnce() -> Result<R>) -> Result<R> {
    // Unwind safety: as above.
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|payload| Err(panicked(operation, payload)))
}

/// Runs the body of one of this crate's own `extern "C"` functions, which must never unwind.
pub(crate) fn callback<R>(operation: &'static str, f: impl FnOnce() -> Result<R>) -> Result<R> {
    call_foreign(operation, f)?
}

/// Calls a struct's release callback, if it has one, and marks the struct released if the callback
/// did not (a panic may have cut it short; a second call could free twice, none only leaks).
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
    // SAFETY: the caller gives a valid slot.
    let Some(release) = (unsafe { slot.read() }) else {
        return Ok(());
    };
    // SAFETY: the caller vouches that `release` belongs to `this` and has not run.
    let result = call_foreign(operation, || unsafe { release(this) });
    // SAFETY: as above; a release callback frees what the struct points to, never the struct.
    unsafe { slot.write(None) };
    result
}

/// The error for a caught payload. Never panics and never runs the payload's own destructor, which
/// could.
fn panicked(operation: &'static str, payload: Box<dyn Any + Send>) -> Error {
    let message: Cow<'static, str> = match payload.downcast::<&'static str>() {
        Ok(text) => Cow::Borrowed(*text),
        Err(payload) => match payload.downcast::<String>() {
            Ok(text) => Cow::Owned(*text),
            Err(payload) => {
                std::mem::forget(payload);
                Cow::Borrowed("a panic without a text")
            }
        },
    };
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
        let e = call_rust::<()>("h", || panic!("with {}", 2)).unwrap_err();
        assert_eq!(text(e), "h panicked: with 2");
    }

    #[test]
    fn a_payload_that_panics_on_drop_stays_inside() {
        // The bomb leaks on purpose. It has no size, so Miri sees no leak either.
        let e = callback::<()>("f", || std::panic::panic_any(Bomb)).unwrap_err();
        assert_eq!(text(e), "f panicked: a panic without a text");
    }
}
