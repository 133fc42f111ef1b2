//! [`Reading`]: copies between a device and host memory that have not completed yet.

use std::sync::Arc;

use crate::device::{CopyOp, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{HostSlab, Owner};

/// A list of copies into a slab, or out of it, that was given to a queue. The slab and the sources live until the copies have
/// completed, even if the reading is dropped.
#[must_use]
#[derive(Debug)]
pub(crate) struct Reading {
    /// The event after which the slab may be read; `None` if it may be read now.
    event: Option<SyncEvent>,
    /// `None` once it was returned.
    kept: Option<(HostSlab, Vec<Arc<Owner>>)>,
}

impl Reading {
    /// Gives the copies to `queue`, after the events of `owners`.
    ///
    /// # Safety
    /// One side of each copy lies in `slab`, the other in memory of `owners`.
    pub(crate) unsafe fn start(
        queue: &Queue,
        owners: Vec<Arc<Owner>>,
        copies: &[CopyOp],
        slab: HostSlab,
    ) -> Result<Self> {
        let mut event = Ok(None);
        if !copies.is_empty() {
            owners.iter().try_for_each(|owner| owner.wait_on(queue))?;
            // SAFETY: the caller guarantees that both sides of each copy lie in `slab` and in memory of `owners` (see `# Safety`),
            // which `kept` holds until the event, or until the queue's work has completed.
            unsafe { queue.copy(copies) }?;
            event = queue.record();
        }
        let kept = (slab, owners);
        match event {
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

    /// Makes this thread wait for the copies, unless the event is known to have completed: one host wait. Returns the slab.
    pub(crate) fn finish(mut self) -> Result<HostSlab> {
        let event = self.event.as_ref();
        if let Some(event) = event.filter(|event| !event.as_ref().is_known_complete()) {
            // After an error the copies may still run: dropping the reading keeps the memory that they use.
            event.wait()?;
        }
        // Only this and the drop take it.
        let kept = self.kept.take().map(|(slab, _)| slab);
        kept.ok_or_else(|| Error::argument("the reading has finished already"))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let (Some(event), Some(kept)) = (&self.event, self.kept.take()) {
            event.keep(kept);
        }
    }
}
