//! Turns the panics of libraries that read damaged files into errors.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

/// Keeps the panic hook from printing: the program reports every failure in one line of its own.
pub fn silence_panics() {
    panic::set_hook(Box::new(|_| ()));
}

/// Runs `f`. If it panics, returns the panic's text; what `f` borrowed must then not be used any
/// more.
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
