//! For a backend's own tests, which no rule replaces.

use std::env::var_os;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Once};
use std::thread;
use std::time::Duration;

use arrow_device::arrow_array::{Int64Array, RecordBatch};
use arrow_device::device::engine::Runtime;
use arrow_device::{Device, Error};

#[cfg(all(target_os = "linux", not(miri)))]
use super::Subject;
use super::kit;
use super::subject::in_use;

/// Returns what tests need, or `None` and says why they are skipped. From the first call on the process has ten minutes, so that a test that
/// hangs fails.
///
/// # Panics
/// Panics if it is missing although it [is required](is_required).
#[track_caller]
pub fn found<T>(needed: Result<T, Error>, variable: &str) -> Option<T> {
    abort_if_hung();
    needed
        .inspect_err(|e| {
            assert!(!is_required(variable), "{e}");
            eprintln!("skipped: {e}");
        })
        .ok()
}

/// Returns whether an environment variable, such as `ARROW_DEVICE_VULKAN_REQUIRED`, says that what is missing is an error.
pub fn is_required(variable: &str) -> bool {
    var_os(variable).is_some_and(|value| value != "0")
}

/// Returns an id that no other device of this process has.
pub fn next_id() -> i64 {
    static NEXT: AtomicI64 = AtomicI64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Returns a batch of one column, the numbers from 0 on.
pub fn numbers(rows: i64) -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..rows)) as _;
    RecordBatch::try_from_iter([("numbers", column)]).expect("a batch")
}

/// Asserts that values come back from a device.
///
/// # Panics
/// Panics if they do not.
#[track_caller]
pub fn assert_works(device: &Device) {
    let sent = numbers(900);
    let back = device.upload(&sent).and_then(|up| up.to_host());
    assert_eq!(back.expect("values come back"), sent);
}

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

fn abort_if_hung() {
    // Miri expects all threads to end, and shows what hangs itself.
    if cfg!(miri) {
        return;
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        thread::spawn(|| {
            thread::sleep(Duration::from_secs(600));
            eprintln!("the tests have hung: ten minutes are over");
            std::process::abort();
        });
    });
}
