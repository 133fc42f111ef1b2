//! [`Callback`]: how wgpu tells that work has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Tells somebody that wgpu has called back.
pub(crate) type Tell = Box<dyn FnOnce() + Send>;

/// What wgpu has said of the end of work.
#[derive(Default)]
pub(crate) struct Ended {
    /// All work before the event of this number has ended.
    pub(crate) done: AtomicU64,
    /// wgpu has dropped a callback without a call.
    pub(crate) is_lost: AtomicBool,
}

/// What wgpu calls back for an event. It is lost if a callback of the program panics before it in the same poll.
pub(crate) struct Callback {
    pub(crate) ended: Arc<Ended>,
    pub(crate) number: u64,
    pub(crate) is_called: bool,
    /// Whom nobody else tells of it.
    pub(crate) told: Option<Tell>,
}

impl Callback {
    pub(crate) fn call(mut self) {
        self.ended.done.fetch_max(self.number, Ordering::AcqRel);
        self.is_called = true;
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        if !self.is_called {
            self.ended.is_lost.store(true, Ordering::Release);
        }
        if let Some(tell) = self.told.take() {
            tell();
        }
    }
}
