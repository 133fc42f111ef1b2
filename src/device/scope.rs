//! Scopes: work of a thread that shares one entry into a device's runtime.
//!
//! What runs foreign code (the drop of a source, a release, a waker) must not run inside a scope.
//! `Device::after` sees to that: it hands all actions to the reaper then.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::device::backend::Backend;

thread_local! {
    /// How many scopes this thread is in.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// What is to run after the outermost one.
    static LATER: RefCell<Vec<Box<dyn FnOnce()>>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread is in a scope.
pub(super) fn is_inside() -> bool {
    DEPTH.get() > 0
}

/// Runs `action`, which catches its panics, after the outermost scope of this thread, or now if
/// there is none.
pub(super) fn outside(action: impl FnOnce() + 'static) {
    let mut action = Some(action);
    if is_inside() {
        // At the end of a thread there is no list any more.
        let _ = LATER.try_with(|later| {
            if let Some(action) = action.take() {
                later.borrow_mut().push(Box::new(action));
            }
        });
    }
    if let Some(action) = action {
        action();
    }
}

/// Ends a scope, also when the work panics.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth > 0 {
            return;
        }
        let later = LATER.try_with(RefCell::take).unwrap_or_default();
        for action in later {
            action();
        }
    }
}

/// Runs `work` in a scope of `backend`. `work` must not run foreign code.
pub(super) fn within<T>(backend: &dyn Backend, work: impl FnOnce() -> T) -> T {
    DEPTH.set(DEPTH.get() + 1);
    let _end = End;
    let (mut work, mut done) = (Some(work), None);
    backend.within(&mut || {
        if let Some(work) = work.take() {
            done = Some(catch_unwind(AssertUnwindSafe(work)));
        }
    });
    match (done, work) {
        (Some(done), _) => done.unwrap_or_else(|panic| resume_unwind(panic)),
        // The backend has not called it.
        (None, Some(work)) => work(),
        (None, None) => unreachable!("the work was taken, so there is its result"),
    }
}
