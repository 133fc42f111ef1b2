//! [`Reading`]: copies into host memory that are under way.

use std::sync::Arc;

use crate::device::{CopyOp, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{HostSlab, Owner};

/// A list of copies into a slab, or out of it, that a queue was given. Slab and sources live until the
/// copies are done, whatever becomes of the reading.
#[must_use]
#[derive(Debug)]
pub(crate) struct Reading<S: Send + 'static> {
    /// After which the slab may be read; `None` if it may be now.
    event: Option<SyncEvent>,
    /// `None` once it was given away.
    kept: Option<(HostSlab, S)>,
}

impl<S: Send + 'static> Reading<S> {
    /// Gives the copies to `queue`, after all that `owners` have to be waited for.
    ///
    /// # Safety
    /// One side of each copy lies in `slab`, the other in memory that `source` keeps alive and whose
    /// events are those of `owners`.
    pub(crate) unsafe fn start(
        queue: &Queue,
        owners: &[Arc<Owner>],
        copies: &[CopyOp],
        slab: HostSlab,
        source: S,
    ) -> Result<Self> {
        let kept = (slab, source);
        if copies.is_empty() {
            return Ok(Self {
                event: None,
                kept: Some(kept),
            });
        }
        owners.iter().try_for_each(|owner| owner.wait_on(queue))?;
        // SAFETY: the caller's; what is kept lives until the event, or until the queue's work is done.
        unsafe { queue.copy(copies) }?;
        match queue.record() {
            Ok(event) => Ok(Self {
                event,
                kept: Some(kept),
            }),
            Err(e) => {
                queue.keep_until_done(kept);
                Err(e)
            }
        }
    }

    /// When the copies are done; `None` if there is nothing to wait for.
    pub(crate) fn event(&self) -> Option<&SyncEvent> {
        self.event.as_ref()
    }

    /// The event was waited for: [`finish`](Self::finish) does not wait again.
    #[cfg(feature = "async")]
    pub(crate) fn waited(&mut self) {
        self.event = None;
    }

    /// Makes this thread wait for the copies, if there are any: one host wait.
    pub(crate) fn finish(mut self) -> Result<(HostSlab, S)> {
        if let Some(event) = &self.event {
            // After an error they may run on: dropping the reading keeps what they use.
            event.wait()?;
        }
        // It is there: only this takes it.
        let kept = self.kept.take();
        kept.ok_or_else(|| Error::argument("a reading that was finished"))
    }
}

impl<S: Send + 'static> Drop for Reading<S> {
    fn drop(&mut self) {
        let (Some(event), Some(kept)) = (self.event.take(), self.kept.take()) else {
            return;
        };
        let device = event.device().clone();
        device.reaper().after(vec![event], move || drop(kept));
    }
}

/// Runs a list of copies into `slab`, or out of it, and waits for it: one host wait.
///
/// # Safety
/// The other side of each copy lies in memory of `owners`, or in memory that is freed only when the
/// queue's work is done, whatever the outcome.
pub(crate) unsafe fn read_back(
    queue: &Queue,
    owners: &[Arc<Owner>],
    copies: &[CopyOp],
    slab: HostSlab,
) -> Result<HostSlab> {
    // SAFETY: the caller's.
    let reading = unsafe { Reading::start(queue, owners, copies, slab, owners.to_vec()) }?;
    Ok(reading.finish()?.0)
}
