//! A task's wait for an event.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use crate::device::SyncEvent;
use crate::error::Result;

/// Ends once an event has completed. Asks the device for one notification, however often it is polled.
#[derive(Debug)]
pub(crate) struct Completion {
    event: SyncEvent,
    /// The task to wake; `None` until it was polled.
    task: Option<Arc<Task>>,
}

/// Whoever polled last.
#[derive(Debug)]
struct Task(Mutex<Waker>);

impl Task {
    fn lock(&self) -> MutexGuard<'_, Waker> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        // Who polls puts another in its place.
        let waker = std::mem::replace(&mut *self.lock(), Waker::noop().clone());
        waker.wake();
    }
}

impl Completion {
    pub(crate) fn of(event: SyncEvent) -> Self {
        Self { event, task: None }
    }

    /// Polls what is in `wait`, if there is something, and takes it out once it is done.
    pub(crate) fn poll_all(wait: &mut Option<Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let Some(completion) = wait else {
            return Poll::Ready(Ok(()));
        };
        let done = Pin::new(completion).poll(cx);
        if done.is_ready() {
            *wait = None;
        }
        done
    }
}

impl Future for Completion {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if let Some(task) = &self.task {
            // Wakers are anybody's code: cloned and dropped outside the lock.
            let new = cx.waker().clone();
            let old = std::mem::replace(&mut *task.lock(), new);
            drop(old);
            // Asked after the waker is there: an end before this is seen here, one after it wakes.
            return match self.event.is_complete()? {
                true => Poll::Ready(Ok(())),
                false => Poll::Pending,
            };
        }
        let task = Arc::new(Task(Mutex::new(cx.waker().clone())));
        if self.event.notify(&Waker::from(task.clone()))? {
            return Poll::Ready(Ok(()));
        }
        self.task = Some(task);
        Poll::Pending
    }
}
