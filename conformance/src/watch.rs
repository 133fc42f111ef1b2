//! The watchdog: a check runs on a thread of its own, which is given up if it does not return.

use std::cell::RefCell;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{any::Any, thread};

/// What a check did last, shared with the thread that waits for it.
type Step = Arc<Mutex<Option<&'static str>>>;

thread_local! {
    static STEP: RefCell<Option<Step>> = const { RefCell::new(None) };
}

/// Records what this thread is about to do, in case it does not come back.
pub(super) fn note(step: &'static str) {
    STEP.with_borrow(|last| {
        if let Some(last) = last {
            *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(step);
        }
    });
}

/// How a check ended.
pub(super) enum Ended<T> {
    Returned(T),
    Panicked(String),
    /// It did not return within the limit, and may run for ever.
    Never(String),
}

/// Runs `check` on a new thread, and waits for it up to `limit`.
pub(super) fn watch<T: Send + 'static>(
    name: &'static str,
    limit: Duration,
    check: impl FnOnce() -> T + Send + 'static,
) -> Ended<T> {
    let step = Step::default();
    let (sender, done) = channel::<()>();
    let shared = step.clone();
    let thread = thread::Builder::new().name(name.into()).spawn(move || {
        // Dropped when the thread ends, by a panic too.
        let _sender = sender;
        STEP.set(Some(shared));
        check()
    });
    let thread = match thread {
        Ok(thread) => thread,
        Err(e) => return Ended::Panicked(format!("no thread could be started: {e}")),
    };
    // Miri's clock has little to do with time.
    if !cfg!(miri) && done.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
        let last = *step.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last.map_or(String::new(), |step| {
            format!("; the last thing it did: {step}")
        });
        return Ended::Never(format!("did not return within {limit:?}{last}"));
    }
    match thread.join() {
        Ok(value) => Ended::Returned(value),
        Err(panic) => Ended::Panicked(panic_text(&*panic)),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    match panic.downcast_ref::<&str>() {
        Some(text) => (*text).into(),
        None => match panic.downcast_ref::<String>() {
            Some(text) => text.clone(),
            None => "panicked without a text".into(),
        },
    }
}
