//! Host functions under way, and the frees that wait for them: what the modes `FREE_BLOCKS` and
//! `INSTANT` need.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A host function that has run for this long is taken for one that blocks.
const BLOCKED: Duration = Duration::from_millis(10);

/// The host functions of an engine, and the frees that wait for them.
#[derive(Default)]
pub(crate) struct HostFunctions {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    /// Functions that are queued or running.
    functions: usize,
    /// Since when one runs; an engine runs one at a time.
    running: Option<Instant>,
    /// Frees that keep other calls from the engine.
    frees: usize,
}

impl HostFunctions {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a function as queued, until the result is dropped.
    pub(crate) fn queue(self: &Arc<Self>) -> Queued {
        self.state().functions += 1;
        Queued(self.clone())
    }

    pub(crate) fn are_under_way(&self) -> bool {
        self.state().functions > 0
    }

    /// Whether one has run for so long that it is taken for one that blocks.
    pub(crate) fn are_blocked(&self) -> bool {
        let running = self.state().running;
        running.is_some_and(|since| since.elapsed() > BLOCKED)
    }

    /// Keeps all other calls from the engine until the result is dropped.
    pub(crate) fn begin_free(self: &Arc<Self>) -> BlockingFree {
        self.state().frees += 1;
        BlockingFree(self.clone())
    }

    /// Waits while frees keep other calls from the engine. No lock may be held.
    pub(crate) fn pass_frees(&self) {
        let passed = self.freed.wait_while(self.state(), |state| state.frees > 0);
        drop(passed.unwrap_or_else(PoisonError::into_inner));
    }
}

/// A host function that has not ended, whether or not it will be called.
pub(crate) struct Queued(Arc<HostFunctions>);

impl Queued {
    /// The function is called now. It has ended once the result is dropped.
    pub(crate) fn run(self) -> Self {
        self.0.state().running = Some(Instant::now());
        self
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.functions -= 1;
        state.running = None;
    }
}

/// A free during which all other calls of its engine wait.
pub(crate) struct BlockingFree(Arc<HostFunctions>);

impl Drop for BlockingFree {
    fn drop(&mut self) {
        self.0.state().frees -= 1;
        self.0.freed.notify_all();
    }
}
