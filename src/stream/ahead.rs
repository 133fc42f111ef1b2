//! [`ahead`]: a thread that takes items before they are asked for.

use std::mem::ManuallyDrop;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::thread;

use arrow_schema::ArrowError;

use crate::abi::guard;
use crate::device::{FORKED, Process, lock};
use crate::error::{Error, Result};

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
    let task = Arc::new(Mutex::new(None::<Waker>));
    // The thread, which may outlive the receiver by far, does not keep the task.
    let waiting = Arc::downgrade(&task);
    let wake = move || {
        // A waker may panic, which must not end this thread early.
        let _ = guard::call_foreign("waking a task", || {
            let waker = waiting.upgrade().and_then(|task| lock(&task).take());
            waker.map(Waker::wake)
        });
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
    thread.spawn(run).map_err(ArrowError::from)?;
    Ok(Ahead {
        items: ManuallyDrop::new(receiver),
        process: Process::this(),
        task,
    })
}

/// What the thread of [`ahead`] has taken: an iterator, whose `next` waits, and a stream. In a child of the process, where the
/// thread does not exist, each item is an error.
#[derive(Debug)]
pub(super) struct Ahead<T> {
    pub(super) items: ManuallyDrop<Receiver<Result<T>>>,
    pub(super) process: Process,
    /// The waker of the task that waits for an item.
    #[cfg_attr(not(feature = "async"), expect(dead_code, reason = "nothing polls"))]
    pub(super) task: Arc<Mutex<Option<Waker>>>,
}

impl<T> Drop for Ahead<T> {
    fn drop(&mut self) {
        // In a child the thread may have locked the channel for ever.
        if self.process.is_this() {
            // SAFETY: it is dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.items) }
        }
    }
}

impl<T> Iterator for Ahead<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.process.is_this() {
            true => self.items.recv().ok(),
            false => Some(Err(Error::argument(FORKED))),
        }
    }
}
