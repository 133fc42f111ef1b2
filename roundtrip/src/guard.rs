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
    panic::catch_unwind(AssertUnwindSafe(f)).map_err(text)
}

fn text(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&'static str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => {
            // Its destructor could panic, too.
            std::mem::forget(payload);
            "panic without a text".to_owned()
        }
    }
}
