//! What a producer has sent and the consumer has not taken yet: the state that both sides race for.
//!
//! It is generic over what it holds and free of pointers and callbacks, so that a model checker can run it. No foreign
//! code is called, dropped or woken under the lock.

use std::collections::VecDeque;
use std::mem;
use std::sync::{LockResult, PoisonError};
use std::task::{Poll, Waker};

use crate::stream::async_stream::sync::{Condvar, Mutex, MutexGuard, ThreadKey, this_thread};

/// What a producer sends after the schema.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Task,
    End,
    /// An error, which ends the stream unless it has ended.
    Error,
}

/// Why an item was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// The consumer has dropped the stream, or an error comes after the end: nobody is at fault.
    Unwanted,
    /// The producer has broken the interface: the callback, and how.
    Violation(&'static str, &'static str),
}

/// `I`: the schema, tasks, the end and errors; `P`: the producer.
#[derive(Debug)]
pub(crate) struct Inbox<I, P> {
    state: Mutex<State<I, P>>,
    /// A call of the producer has returned.
    returned: Condvar,
}

#[derive(Debug)]
struct State<I, P> {
    /// What has come and was not taken.
    items: VecDeque<I>,
    /// How many tasks are requested and have not come; `None` before the schema.
    wanted: Option<u64>,
    /// The end or an error has come: the last item.
    over: bool,
    /// From the end of the first request until the release.
    producer: Option<P>,
    /// The thread that is in a call of the producer.
    calling: Option<ThreadKey>,
    /// The consumer has dropped the stream.
    abandoned: bool,
    waker: Option<Waker>,
}

impl<I, P: Copy> Inbox<I, P> {
    pub(crate) fn new() -> Self {
        let state = State {
            items: VecDeque::new(),
            wanted: None,
            over: false,
            producer: None,
            calling: None,
            abandoned: false,
            waker: None,
        };
        Self {
            state: Mutex::new(state),
            returned: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<I, P>> {
        unpoisoned(self.state.lock())
    }

    // The producer's calls.

    /// `on_schema`, which requests the first `wanted` tasks with `request`.
    pub(crate) fn open(
        &self,
        schema: I,
        wanted: u64,
        producer: P,
        request: impl FnOnce(P),
    ) -> Result<(), Refused> {
        let mut state = self.lock();
        if state.abandoned {
            return Err(Refused::Unwanted);
        }
        if state.wanted.is_some() || state.over {
            let fault = "was called a second time, or after an end";
            return Err(Refused::Violation("on_schema", fault));
        }
        state.wanted = Some(wanted);
        state.items.push_back(schema);
        self.call(state, || request(producer));
        // During the request anything may have happened.
        let mut state = self.lock();
        if state.abandoned {
            return Err(Refused::Unwanted);
        }
        if !state.over {
            state.producer = Some(producer);
        }
        wake(state);
        Ok(())
    }

    /// `on_next_task` and `on_error`. An item that is refused is dropped.
    pub(crate) fn push(&self, kind: Kind, item: I) -> Result<(), Refused> {
        let mut state = self.lock();
        let violation = |fault| Some(Refused::Violation("on_next_task", fault));
        let refused = match (kind, state.wanted) {
            _ if state.abandoned => Some(Refused::Unwanted),
            (Kind::Error, _) => state.over.then_some(Refused::Unwanted),
            (_, None) => violation("was called before on_schema"),
            _ if state.over => violation("was called after the end"),
            (Kind::End, _) => None,
            (Kind::Task, Some(0)) => violation("has more tasks than were requested"),
            (Kind::Task, Some(wanted)) => {
                state.wanted = Some(wanted - 1);
                None
            }
        };
        if let Some(refused) = refused {
            drop(state);
            return Err(refused);
        }
        state.over = kind != Kind::Task;
        state.items.push_back(item);
        wake(state);
        Ok(())
    }

    /// `release`: the producer is not called any more once this has returned. Waits for a call of the producer on another
    /// thread. Within such a call on this thread it returns at once.
    pub(crate) fn release(&self) {
        let mut state = self.lock();
        state.producer = None;
        while state.calling.is_some_and(|thread| thread != this_thread()) {
            state = unpoisoned(self.returned.wait(state));
        }
    }

    // The consumer's calls: one at a time.

    /// The next item: the schema first, and `None` after the last one.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Option<I>> {
        // If there is an item, which is frequent, the waker is not cloned.
        let next = self.next();
        if next.is_ready() {
            return next;
        }
        let new = waker.clone();
        let old = self.lock().waker.replace(new);
        drop(old);
        self.next()
    }

    fn next(&self) -> Poll<Option<I>> {
        let mut state = self.lock();
        // Nothing is given out while `on_schema` requests the first tasks: there is one call of the producer at a time.
        if state.producer.is_none() && !state.over {
            return Poll::Pending;
        }
        match state.items.pop_front() {
            None if !state.over => Poll::Pending,
            next => Poll::Ready(next),
        }
    }

    /// Requests `n` more tasks with `request`, unless the stream has ended or the handler is released.
    pub(crate) fn request(&self, n: u64, request: impl FnOnce(P)) {
        let mut state = self.lock();
        if let (Some(producer), false) = (state.producer, state.over) {
            state.wanted = state.wanted.map(|wanted| wanted + n);
            self.call(state, || request(producer));
        }
    }

    /// The consumer drops the stream. Cancels the producer with `cancel`, unless it has reported an end or released the
    /// handler. Returns what was not taken.
    pub(crate) fn abandon(&self, cancel: impl FnOnce(P)) -> VecDeque<I> {
        let mut state = self.lock();
        state.abandoned = true;
        let (items, waker) = (mem::take(&mut state.items), state.waker.take());
        match state.producer.take() {
            Some(producer) if !state.over => self.call(state, || cancel(producer)),
            _ => drop(state),
        }
        drop(waker);
        items
    }

    /// Runs a call of the producer, which a release waits for.
    fn call(&self, mut state: MutexGuard<'_, State<I, P>>, call: impl FnOnce()) {
        struct Returned<'a, I, P: Copy>(&'a Inbox<I, P>);
        impl<I, P: Copy> Drop for Returned<'_, I, P> {
            fn drop(&mut self) {
                self.0.lock().calling = None;
                self.0.returned.notify_all();
            }
        }
        state.calling = Some(this_thread());
        drop(state);
        // Dropped if `call` unwinds, too.
        let _returned = Returned(self);
        call();
    }
}

fn wake<I, P>(mut state: MutexGuard<'_, State<I, P>>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Nothing panics under the lock.
fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}
