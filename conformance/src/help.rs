//! For a backend's own tests, which no rule replaces.

use std::sync::Once;
use std::thread;
use std::time::Duration;

use arrow_device::device::engine::Runtime;
use arrow_device::{Device, Error};

#[cfg(all(target_os = "linux", not(miri)))]
use super::Subject;
use super::kit;
use super::subject::in_use;

/// Returns whether `done` becomes true within a minute: some layers of drivers hold a thread up for ten seconds at a time.
pub fn soon(done: impl FnMut() -> bool) -> bool {
    kit::soon(Duration::from_secs(60), done)
}

/// Asserts an error that says this.
///
/// # Panics
/// Panics if there is none, or another one.
#[track_caller]
pub fn assert_error<T>(result: Result<T, Error>, text: &str) {
    let error = result.map_or_else(|e| e.to_string(), |_| "no error".into());
    assert!(error.contains(text), "{error}");
}

/// Waits until a device over the engine has given everything back, which a thread of its own does.
///
/// # Panics
/// Panics if something is in use a minute later.
#[track_caller]
pub fn assert_balanced<R: Runtime>(device: &Device) {
    if !soon(|| in_use::<R>(device).is_ok()) {
        panic!("{:?}", in_use::<R>(device));
    }
}

/// Waits until the balance of a subject is even.
#[cfg(all(target_os = "linux", not(miri)))]
pub(super) fn assert_even(subject: &Subject) {
    if let Some(balance) = &subject.balance {
        assert!(soon(|| balance().is_ok()), "{:?}", balance());
    }
}

/// Ends the process ten minutes after the first call, so that a test that hangs fails.
pub fn abort_if_hung() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        thread::spawn(|| {
            thread::sleep(Duration::from_secs(600));
            eprintln!("the tests have hung: ten minutes are over");
            std::process::abort();
        });
    });
}
