//! [`Completion`]: a future that waits for an event.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use crate::device::{SyncEvent, lock};
use crate::error::Result;

/// Is ready once an event has completed. Requests one notification from the device, however often
/// it is polled.
#[derive(Debug)]
pub(crate) struct Completion {
    event: SyncEvent,
    /// The task to wake; `None` before the first poll.
    task: Option<Arc<Task>>,
}

/// The waker of the last poll.
#[derive(Debug)]
struct Task(Mutex<Waker>);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        // The next poll replaces it.
        let waker = std::mem::replace(&mut *lock(&self.0), Waker::noop().clone());
        waker.wake();
    }
}

impl Completion {
    pub(crate) fn of(event: SyncEvent) -> Self {
        Self { event, task: None }
    }

    pub(crate) fn event(&self) -> &SyncEvent {
        &self.event
    }

    /// Polls the future in `wait`, if there is one, and removes it once it is ready.
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

/// Waits for an event, if there is one.
#[cfg(feature = "async")]
pub(crate) async fn completion(event: Option<SyncEvent>) -> Result<()> {
    match event {
        Some(event) => Completion::of(event).await,
        None => Ok(()),
    }
}

impl Future for Completion {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if let Some(task) = &self.task {
            // Wakers run foreign code: they are cloned and dropped outside the lock.
            let new = cx.waker().clone();
            let old = std::mem::replace(&mut *lock(&task.0), new);
            drop(old);
            // Queried after the waker was stored: a completion before that is seen here, and a
            // later one wakes.
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
