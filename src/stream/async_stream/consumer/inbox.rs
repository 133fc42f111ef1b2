//! What a producer has sent and the consumer has not taken yet: the state that both sides race for.
//!
//! It is generic over what it holds and free of pointers and callbacks, so that a model checker can run it. No foreign
//! code is called, dropped or woken under the lock.

use std::collections::VecDeque;
use std::mem;
use std::task::{Poll, Waker};

use crate::stream::async_stream::sync::{Condvar, Mutex, MutexGuard, ThreadKey, this_thread};

/// How a producer broke the interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Violation {
    /// `on_schema` came twice, or after an end.
    Schema,
    /// A task or an end before the schema.
    BeforeSchema,
    /// A task or an end after the end.
    AfterEnd,
    /// A task that was not requested.
    Unrequested,
    /// The handler was released before the end.
    Released,
}

/// What `on_schema` does and answers.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Opening {
    /// Request the first tasks, then [`Inbox::opened`].
    Request,
    /// The consumer has dropped the stream.
    Abandoned,
    Refused,
}

/// What `on_next_task` answers. A task that was not taken is returned, to be extracted with null.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Reception<T> {
    Taken,
    /// The consumer has dropped the stream, which is not the producer's fault.
    Unwanted(Option<T>),
    Refused(Option<T>),
}

/// The next item.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Next<T, E> {
    Task(T),
    /// Returned once; [`Ended`](Self::Ended) follows.
    Failed(E),
    Ended,
}

/// `S`: the schema and what comes with it; `T`: tasks; `E`: errors; `P`: the producer.
#[derive(Debug)]
pub(crate) struct Inbox<S, T, E, P> {
    state: Mutex<State<S, T, E, P>>,
    /// A call of the producer has returned.
    returned: Condvar,
}

#[derive(Debug)]
struct State<S, T, E, P> {
    /// `on_schema` was called with what it asks for.
    opened: bool,
    /// Until the consumer takes it.
    schema: Option<S>,
    tasks: VecDeque<T>,
    /// How many tasks are requested and have not come.
    wanted: u64,
    end: End<E>,
    /// From the return of `on_schema` until the release.
    producer: Option<P>,
    /// The producer has reported the end or an error, and is about to release the handler.
    finished: bool,
    released: bool,
    /// The thread that is in a call of the producer.
    calling: Option<ThreadKey>,
    /// The consumer has dropped the stream.
    abandoned: bool,
    waker: Option<Waker>,
}

#[derive(Debug)]
enum End<E> {
    Open,
    Ended,
    Failed(E),
    /// The consumer has been told.
    Seen,
}

impl<S, T, E: From<Violation>, P: Copy> Inbox<S, T, E, P> {
    pub(crate) fn new() -> Self {
        let state = State {
            opened: false,
            schema: None,
            tasks: VecDeque::new(),
            wanted: 0,
            end: End::Open,
            producer: None,
            finished: false,
            released: false,
            calling: None,
            abandoned: false,
            waker: None,
        };
        Self {
            state: Mutex::new(state),
            returned: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<S, T, E, P>> {
        self.state.lock()
    }

    /// Ends the stream with an error, unless it has ended. What a producer does after the end changes nothing.
    fn fail(mut state: MutexGuard<'_, State<S, T, E, P>>, e: E) {
        let unused = match state.end {
            End::Open if !state.abandoned => {
                state.end = End::Failed(e);
                None
            }
            _ => Some(e),
        };
        Self::wake(state);
        drop(unused);
    }

    fn wake(mut state: MutexGuard<'_, State<S, T, E, P>>) {
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    // The producer's calls.

    /// `on_schema`, which is about to request the first `wanted` tasks.
    pub(crate) fn open(&self, wanted: u64) -> Opening {
        let mut state = self.lock();
        if state.abandoned {
            return Opening::Abandoned;
        }
        if state.opened || state.released || !matches!(state.end, End::Open) {
            Self::fail(state, Violation::Schema.into());
            return Opening::Refused;
        }
        state.opened = true;
        state.wanted = wanted;
        state.calling = Some(this_thread());
        Opening::Request
    }

    /// Called after the request of [`open`](Self::open), during which anything may have happened. Returns false if the
    /// consumer has dropped the stream.
    pub(crate) fn opened(&self, producer: P, schema: S) -> bool {
        let mut state = self.lock();
        state.calling = None;
        let abandoned = state.abandoned;
        // Dropped outside the lock.
        let mut unused = None;
        if abandoned {
            unused = Some(schema);
        } else {
            state.schema = Some(schema);
            state.producer = (!state.released).then_some(producer);
        }
        self.returned.notify_all();
        Self::wake(state);
        drop(unused);
        !abandoned
    }

    /// `on_next_task`; `None` is the end.
    pub(crate) fn task(&self, task: Option<T>) -> Reception<T> {
        let mut state = self.lock();
        if state.abandoned {
            return Reception::Unwanted(task);
        }
        let violation = match (&state.end, &task) {
            _ if !state.opened => Some(Violation::BeforeSchema),
            (End::Open, _) if state.released => Some(Violation::AfterEnd),
            (End::Open, Some(_)) if state.wanted == 0 => Some(Violation::Unrequested),
            (End::Open, _) => None,
            _ => Some(Violation::AfterEnd),
        };
        if let Some(violation) = violation {
            Self::fail(state, violation.into());
            return Reception::Refused(task);
        }
        match task {
            Some(task) => {
                state.wanted -= 1;
                state.tasks.push_back(task);
            }
            None => {
                state.end = End::Ended;
                state.finished = true;
            }
        }
        Self::wake(state);
        Reception::Taken
    }

    /// `on_error`.
    pub(crate) fn reported(&self, e: E) {
        let mut state = self.lock();
        state.finished = true;
        Self::fail(state, e);
    }

    /// A call by the producer that breaks the interface, or a call of the producer that failed.
    pub(crate) fn refuse(&self, e: E) {
        Self::fail(self.lock(), e);
    }

    /// `release`: the producer is not called any more once this has returned. Waits for a call of the producer on another
    /// thread. Within such a call on this thread it returns at once.
    pub(crate) fn release(&self) {
        let mut state = self.lock();
        state.producer = None;
        state.released = true;
        while state.calling.is_some_and(|thread| thread != this_thread()) {
            state = self.returned.wait(state);
        }
        match state.end {
            End::Open => Self::fail(state, Violation::Released.into()),
            _ => Self::wake(state),
        }
    }

    // The consumer's calls: one at a time.

    /// The schema, once.
    pub(crate) fn poll_schema(&self, waker: &Waker) -> Poll<Result<S, E>> {
        let new = waker.clone();
        let mut state = self.lock();
        if let Some(schema) = state.schema.take() {
            return Poll::Ready(Ok(schema));
        }
        // While `on_schema` runs, its answer decides.
        if state.calling.is_none() {
            if let End::Failed(e) = Self::see(&mut state.end) {
                return Poll::Ready(Err(e));
            }
        }
        let old = state.waker.replace(new);
        drop(state);
        drop(old);
        Poll::Pending
    }

    /// The next item, once there is a schema.
    pub(crate) fn poll_next(&self, waker: &Waker) -> Poll<Next<T, E>> {
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

    fn next(&self) -> Poll<Next<T, E>> {
        let mut state = self.lock();
        if let Some(task) = state.tasks.pop_front() {
            return Poll::Ready(Next::Task(task));
        }
        match Self::see(&mut state.end) {
            End::Open => Poll::Pending,
            End::Failed(e) => Poll::Ready(Next::Failed(e)),
            End::Ended | End::Seen => Poll::Ready(Next::Ended),
        }
    }

    fn see(end: &mut End<E>) -> End<E> {
        match end {
            End::Open => End::Open,
            end => mem::replace(end, End::Seen),
        }
    }

    /// An error that ends the stream, if one has come.
    pub(crate) fn take_error(&self) -> Option<E> {
        let mut state = self.lock();
        if !matches!(state.end, End::Failed(_)) {
            return None;
        }
        match Self::see(&mut state.end) {
            End::Failed(e) => Some(e),
            _ => None,
        }
    }

    /// Requests `n` more tasks with `request`, unless the stream has ended or the handler is released.
    pub(crate) fn request(&self, n: u64, request: impl FnOnce(P)) {
        let mut state = self.lock();
        let (Some(producer), End::Open) = (state.producer, &state.end) else {
            return;
        };
        state.wanted += n;
        self.call(state, || request(producer));
    }

    /// The consumer drops the stream. Cancels the producer with `cancel`, unless it has reported an end or released the
    /// handler. Returns what was queued, to be extracted with null.
    pub(crate) fn abandon(&self, cancel: impl FnOnce(P)) -> Abandoned<S, T, E> {
        let mut state = self.lock();
        state.abandoned = true;
        let rest = Abandoned {
            schema: state.schema.take(),
            tasks: mem::take(&mut state.tasks),
            end: mem::replace(&mut state.end, End::Seen),
            waker: state.waker.take(),
        };
        let finished = state.finished;
        if let Some(producer) = state.producer.take().filter(|_| !finished) {
            self.call(state, || cancel(producer));
        }
        rest
    }

    /// Runs a call of the producer, which a release waits for.
    fn call(&self, mut state: MutexGuard<'_, State<S, T, E, P>>, call: impl FnOnce()) {
        state.calling = Some(this_thread());
        drop(state);
        // Dropped if `call` unwinds, too.
        let returned = Returned(self);
        call();
        drop(returned);
    }
}

struct Returned<'a, S, T, E, P>(&'a Inbox<S, T, E, P>);

impl<S, T, E, P> Drop for Returned<'_, S, T, E, P> {
    fn drop(&mut self) {
        self.0.state.lock().calling = None;
        self.0.returned.notify_all();
    }
}

/// What an abandoned stream held.
#[derive(Debug)]
#[allow(dead_code)] // Dropped outside the lock.
pub(crate) struct Abandoned<S, T, E> {
    schema: Option<S>,
    pub(crate) tasks: VecDeque<T>,
    end: End<E>,
    waker: Option<Waker>,
}
