//! What a producer has given and the consumer has not taken yet: the state that both sides race for.
//!
//! Generic over what it holds, and free of pointers and callbacks, so that a model checker can run it.
//! Nothing foreign is called, dropped or woken under the lock.

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
    /// A task that was not asked for.
    Unrequested,
    /// The handler was released before the end.
    Released,
}

/// What `on_schema` is answered, and what it must do before.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Opening {
    /// Request the first tasks, then [`Inbox::opened`].
    Request,
    /// Nobody wants the stream any more.
    Abandoned,
    Refused,
}

/// What `on_next_task` is answered. A task that was not taken is given back, to be extracted with null.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Reception<T> {
    Taken,
    /// Nobody wants it; that is no fault of the producer's.
    Unwanted(Option<T>),
    Refused(Option<T>),
}

/// The next item.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Next<T, E> {
    Task(T),
    /// Only once; [`Ended`](Self::Ended) from then on.
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
    /// What was asked for and has not come.
    wanted: u64,
    end: End<E>,
    /// From the return of `on_schema` until the release.
    producer: Option<P>,
    /// The producer has told an end or an error: it is about to release.
    finished: bool,
    released: bool,
    /// The thread that is in a call of the producer.
    calling: Option<ThreadKey>,
    /// The consumer is gone.
    abandoned: bool,
    waker: Option<Waker>,
}

#[derive(Debug)]
enum End<E> {
    Open,
    Ended,
    Failed(E),
    /// The consumer knows.
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

    /// Ends the stream with an error, unless it has ended: what a producer does after that changes nothing.
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

    /// `on_schema`; the first `wanted` tasks are about to be requested.
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

    /// After the request of [`open`](Self::open), which may have done anything. `false`: nobody wants the
    /// stream any more.
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

    /// A call of the producer's that breaks the interface, or one of it that failed.
    pub(crate) fn refuse(&self, e: E) {
        Self::fail(self.lock(), e);
    }

    /// `release`: the producer is not called any more when this returns. Waits for a call of it on another
    /// thread; within such a call on this thread it returns at once.
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
        // While `on_schema` runs its answer decides.
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
        // Often there is something: no clone then.
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

    /// Requests one more task with `request`, if the producer is still there to ask.
    pub(crate) fn request_one(&self, request: impl FnOnce(P)) {
        let mut state = self.lock();
        let (Some(producer), End::Open) = (state.producer, &state.end) else {
            return;
        };
        state.wanted += 1;
        self.call(state, || request(producer));
    }

    /// Nobody takes anything any more. `cancel` tells the producer, if it is still there and has told no
    /// end; what was queued is given back, to be extracted with null.
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
        // Also if it unwinds.
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
