//! Which panics are defects.
//!
//! libFuzzer's own hook aborts at every panic. But arrow-rs panics on some of what it is asked to check, and
//! this crate catches that and reports an error. So a panic is a defect if nobody catches it, or if
//! it begins in this crate's own source or in the targets', caught or not.

use std::cell::RefCell;
use std::panic::AssertUnwindSafe;
use std::panic::{Location, PanicHookInfo, catch_unwind, resume_unwind, set_hook, take_hook};
use std::sync::{Mutex, Once, PoisonError};

thread_local! {
    /// The last panic of other crates, for the case that nobody catches it.
    static OTHERS: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Panics of ours, on any thread.
static OURS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Whether the source belongs to this repository: others' lies in the registry or the toolchain.
fn is_ours(location: Option<&Location<'_>>) -> bool {
    const OTHERS: [&str; 3] = ["/registry/", "/rustc/", "support/gen.rs"];
    location.is_none_or(|at| !OTHERS.iter().any(|other| at.file().contains(other)))
}

/// Installs the hook, in place of libFuzzer's.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // libFuzzer's aborts; the standard one is what it took the place of.
        drop(take_hook());
        set_hook(Box::new(|info: &PanicHookInfo<'_>| {
            if is_ours(info.location()) {
                eprintln!("{info}\n{}", std::backtrace::Backtrace::force_capture());
                ours().push(info.to_string());
            } else {
                let text = format!("{info}\n{}", std::backtrace::Backtrace::force_capture());
                OTHERS.with_borrow_mut(|other| *other = text);
            }
        }));
    });
}

fn ours() -> std::sync::MutexGuard<'static, Vec<String>> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work`, which fails if a panic was a defect.
pub(crate) fn watched(work: impl FnOnce()) {
    watch();
    let result = catch_unwind(AssertUnwindSafe(work));
    let panics = std::mem::take(&mut *ours());
    match result {
        Err(payload) => {
            if panics.is_empty() {
                OTHERS.with_borrow(|text| eprintln!("nobody caught: {text}"));
            }
            resume_unwind(payload)
        }
        Ok(()) if !panics.is_empty() => {
            let text = format!("a panic of this crate was caught: {panics:?}");
            eprintln!("{text}");
            resume_unwind(Box::new(text))
        }
        Ok(()) => {}
    }
}

/// Runs what may panic in other crates; `None` if it does.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
