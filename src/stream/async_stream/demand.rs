//! What a consumer has requested: the state that its calls and the producer's task race for.
//!
//! Like `Inbox`, it is free of pointers and callbacks, so that a model checker can run it.

use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};

use crate::stream::async_stream::sync::{Mutex, MutexGuard};

/// What the producer's task does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// Produce. The flag says whether a batch may be sent.
    Produce(bool),
    /// The consumer has requested this many, which is not at least 1.
    Invalid(i64),
    Cancelled,
}

#[derive(Debug)]
pub(crate) struct Demand(Mutex<State>);

#[derive(Default, Debug)]
struct State {
    wanted: i64,
    /// The producer found no request when it last looked.
    vain: bool,
    invalid: Option<i64>,
    cancelled: bool,
    waker: Option<Waker>,
    /// How many calls of the consumer are waking the task.
    waking: usize,
}

impl Demand {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State::default()))
    }

    /// Nothing panics under the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The consumer's `request`, on any thread. Sums saturate.
    pub(crate) fn request(&self, n: i64) {
        self.change(|state| match n {
            1.. => state.wanted = state.wanted.saturating_add(n),
            n => state.invalid = state.invalid.or(Some(n)),
        });
    }

    /// The consumer's `cancel`, on any thread.
    pub(crate) fn cancel(&self) {
        self.change(|state| state.cancelled = true);
    }

    /// Nothing changes after a cancellation or the end.
    fn change(&self, change: impl FnOnce(&mut State)) {
        struct Woken<'a>(&'a Demand);
        impl Drop for Woken<'_> {
            fn drop(&mut self) {
                self.0.lock().waking -= 1;
            }
        }
        let mut state = self.lock();
        if state.cancelled {
            return;
        }
        change(&mut state);
        let Some(waker) = state.waker.take() else {
            return;
        };
        state.waking += 1;
        drop(state);
        // Dropped if the waker panics, too.
        let _woken = Woken(self);
        waker.wake();
    }

    /// Returns what to do next, for `work` of [`poll`](Self::poll).
    pub(crate) fn turn(&self) -> Turn {
        let mut state = self.lock();
        let turn = state.turn();
        state.vain = turn == Turn::Produce(false);
        turn
    }

    /// Polls `work` while something is to be produced, and again if a request came after `work` had looked for one in vain. `work` may be
    /// pending for other reasons, and then waits for what wakes it. `Err` says what to do instead.
    pub(crate) fn poll<T>(
        &self,
        cx: &mut Context<'_>,
        mut work: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<Result<T, Turn>> {
        loop {
            let turn = self.lock().turn();
            if !matches!(turn, Turn::Produce(_)) {
                return Poll::Ready(Err(turn));
            }
            if let Poll::Ready(done) = work(cx) {
                return Poll::Ready(Ok(done));
            }
            let waker = cx.waker().clone();
            let mut state = self.lock();
            // Dropped after the lock.
            let _old = state.waker.replace(waker);
            let rests =
                matches!(state.turn(), Turn::Produce(requested) if !(requested && state.vain));
            drop(state);
            if rests {
                return Poll::Pending;
            }
        }
    }

    /// One batch is about to be sent.
    pub(crate) fn take_one(&self) {
        self.lock().wanted -= 1;
    }

    /// From now on the consumer's calls change nothing. Returns what was to be done next.
    pub(crate) fn close(&self) -> Turn {
        let mut state = self.lock();
        let turn = state.turn();
        (state.cancelled, state.invalid) = (true, None);
        let waker = state.waker.take();
        drop(state);
        drop(waker);
        turn
    }

    /// Whether a call of the consumer is waking the task now. After [`close`](Self::close) none begins.
    pub(crate) fn is_waking(&self) -> bool {
        self.lock().waking > 0
    }
}

impl State {
    fn turn(&self) -> Turn {
        match (self.invalid, self.cancelled) {
            (Some(n), _) => Turn::Invalid(n),
            (None, true) => Turn::Cancelled,
            (None, false) => Turn::Produce(self.wanted > 0),
        }
    }
}
