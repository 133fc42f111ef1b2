//! [`Reading`]: copies between a device and host memory that have not completed yet.

use std::sync::Arc;

use crate::device::{CopyOp, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{HostSlab, Owner};

/// A list of copies into a slab, or out of it, that was given to a queue. The slab and the sources live until the copies have
/// completed, even if the reading is dropped.
#[must_use]
#[derive(Debug)]
pub(crate) struct Reading<S: Send + 'static> {
    /// The event after which the slab may be read; `None` if it may be read now.
    event: Option<SyncEvent>,
    /// `None` once it was returned.
    kept: Option<(HostSlab, S)>,
}

impl<S: Send + 'static> Reading<S> {
    /// Gives the copies to `queue`, after the events of `owners`.
    ///
    /// # Safety
    /// One side of each copy lies in `slab`, the other in memory that `source` keeps alive and that is ready after the events
    /// of `owners`.
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
        // SAFETY: the caller guarantees that both sides of each copy lie in `slab` and in memory of `source` (see `# Safety`),
        // which `kept` holds until the event, or until the queue's work has completed.
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

    /// Returns the event that completes with the copies; `None` if there is nothing to wait for.
    pub(crate) fn event(&self) -> Option<&SyncEvent> {
        self.event.as_ref()
    }

    /// Makes this thread wait for the copies, unless the event is known to have completed: one host wait. Returns the slab and the source.
    pub(crate) fn finish(mut self) -> Result<(HostSlab, S)> {
        let event = self.event.as_ref();
        if let Some(event) = event.filter(|event| !event.as_ref().is_known_complete()) {
            // After an error the copies may still run: dropping the reading keeps the memory that they use.
            event.wait()?;
        }
        // Only this and the drop take it.
        let kept = self.kept.take();
        kept.ok_or_else(|| Error::argument("the reading has finished already"))
    }
}

impl<S: Send + 'static> Drop for Reading<S> {
    fn drop(&mut self) {
        let (Some(event), Some(kept)) = (self.event.take(), self.kept.take()) else {
            return;
        };
        let device = event.device().clone();
        device.after(vec![event], move || drop(kept));
    }
}
