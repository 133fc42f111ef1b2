//! [`ahead`]: a thread that takes items before they are asked for.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use arrow_schema::ArrowError;

use crate::abi::guard;
use crate::device::Process;
use crate::error::Result;

/// Starts a thread that takes items until `most` of them wait, at least one, and then one more. It ends with the items, after an
/// error, which a panic is too, or at the next item after the receiver was dropped. It calls `changed` for each item that the
/// receiver can take, and for the end.
///
/// # Errors
/// That of the system if it starts no thread.
pub(super) fn ahead<T: Send + 'static>(
    mut items: impl Iterator<Item = Result<T>> + Send + 'static,
    most: usize,
    changed: impl Fn() + Send + 'static,
) -> Result<Ahead<T>> {
    // A channel without room would block the thread before it says that there is an item.
    let (sender, receiver) = sync_channel(most.clamp(1, 1 << 16));
    let run = move || {
        while let Some(item) = guard::callback("next", || items.next().transpose()).transpose() {
            let is_last = item.is_err();
            // If the receiver was dropped, the item comes back and is dropped here.
            let taken = guard::call_foreign("drop of a batch", || sender.send(item).is_ok());
            changed();
            if is_last || !matches!(taken, Ok(true)) {
                break;
            }
        }
        let _ = guard::call_foreign("drop of a reader", || drop(items));
        // Before `changed`, which says that the end can be seen.
        drop(sender);
        changed();
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
    })
}

/// What the thread of [`ahead`] has taken.
#[derive(Debug)]
pub(super) struct Ahead<T> {
    items: ManuallyDrop<Receiver<Result<T>>>,
    /// That of the thread.
    pub(super) process: Process,
}

impl<T> Deref for Ahead<T> {
    type Target = Receiver<Result<T>>;

    fn deref(&self) -> &Self::Target {
        &self.items
    }
}

impl<T> Drop for Ahead<T> {
    fn drop(&mut self) {
        // In a child the thread does not exist, and it may have been in the middle of a send.
        if self.process.is_this() {
            // SAFETY: nothing uses the receiver after this.
            unsafe { ManuallyDrop::drop(&mut self.items) }
        }
    }
}
