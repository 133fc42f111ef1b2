//! [`ahead`]: a thread that takes items before they are asked for.

use std::mem::ManuallyDrop;
#[cfg(feature = "async")]
use std::sync::mpsc::TryRecvError;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::Waker;
#[cfg(feature = "async")]
use std::task::{Context, Poll};
use std::thread;

use arrow_schema::ArrowError;

use crate::abi::guard;
use crate::device::{Process, lock};
use crate::error::Result;

/// Starts a thread that takes items until `most` of them wait, at least one, and then one more. It ends with the items, after an
/// error, which a panic is too, or at the next item after the receiver was dropped.
///
/// # Errors
/// That of the system if it starts no thread.
pub(super) fn ahead<T: Send + 'static>(
    mut items: impl Iterator<Item = Result<T>> + Send + 'static,
    most: usize,
) -> Result<Ahead<T>> {
    // A channel without room would block the thread before it says that there is an item.
    let (sender, receiver) = sync_channel(most.clamp(1, 1 << 16));
    let task = Task::default();
    let to_wake = task.clone();
    let wake = move || {
        let waker = lock(&to_wake).take();
        // A waker may panic, which must not end this thread early.
        let _ = guard::call_foreign("waking a task", || waker.map(Waker::wake));
    };
    let run = move || {
        while let Some(item) = guard::callback("next", || items.next().transpose()).transpose() {
            let is_last = item.is_err();
            // If the receiver was dropped, the item comes back and is dropped here.
            let taken = guard::call_foreign("drop of a batch", || sender.send(item).is_ok());
            wake();
            if is_last || !matches!(taken, Ok(true)) {
                break;
            }
        }
        let _ = guard::call_foreign("drop of a reader", || drop(items));
        drop(sender);
        // The end can be seen.
        wake();
    };
    let thread = thread::Builder::new().name("arrow-device reader".into());
    thread.spawn(run).map_err(|e| {
        ArrowError::IoError(
            format!("the thread of a reader could not be started: {e}"),
            e,
        )
    })?;
    Ok(Ahead {
        items: ManuallyDrop::new(receiver),
        process: Process::this(),
        task,
    })
}

/// What the thread of [`ahead`] has taken.
#[derive(Debug)]
pub(super) struct Ahead<T> {
    items: ManuallyDrop<Receiver<Result<T>>>,
    /// That of the thread.
    pub(super) process: Process,
    task: Task,
}

/// The waker of the task that waits for an item.
type Task = Arc<Mutex<Option<Waker>>>;

impl<T> Ahead<T> {
    /// Waits for the next item; `None` at the end.
    pub(super) fn next(&self) -> Option<Result<T>> {
        self.items.recv().ok()
    }

    /// As [`next`](Self::next), but is pending.
    #[cfg(feature = "async")]
    pub(super) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        let next = || match self.items.try_recv() {
            Ok(item) => Poll::Ready(Some(item)),
            Err(TryRecvError::Disconnected) => Poll::Ready(None),
            Err(TryRecvError::Empty) => Poll::Pending,
        };
        let first = next();
        if first.is_ready() {
            return first;
        }
        let new = cx.waker().clone();
        let old = lock(&self.task).replace(new);
        drop(old);
        // An item may have come before the waker was registered.
        next()
    }
}

impl<T> Drop for Ahead<T> {
    fn drop(&mut self) {
        // In a child the thread does not exist, and it may have been in the middle of a send.
        if self.process.is_this() {
            // SAFETY: nothing uses the receiver after this.
            unsafe { ManuallyDrop::drop(&mut self.items) }
            // The thread, which may outlive this by far, must not keep the task.
            let task = lock(&self.task).take();
            drop(task);
        }
    }
}
