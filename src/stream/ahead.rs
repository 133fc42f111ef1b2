//! [`ahead`]: a thread that takes items before they are asked for.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use arrow_schema::ArrowError;

use crate::abi::guard;
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
) -> Result<Receiver<Result<T>>> {
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
    Ok(receiver)
}
