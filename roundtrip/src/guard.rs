//! Panics of libraries that read odd files, as errors.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

/// Keeps the panic hook from printing: this program reports a failure in one line of its own.
pub fn silence_panics() {
    panic::set_hook(Box::new(|_| ()));
}

/// Runs `f` and gives the text of its panic if it panics. What `f` borrows must not be used
/// afterwards if it did.
pub fn catch<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    panic::catch_unwind(AssertUnwindSafe(f)).map_err(|payload| text(payload.as_ref()))
}

fn text(payload: &(dyn Any + Send)) -> String {
    if let Some(s) = payload.downcast_ref::<&str>() {
        (*s).to_owned()
    } else if let Some(s) = payload.downcast_ref::<String>() {
        s.clone()
    } else {
        "panic without a text".to_owned()
    }
}
