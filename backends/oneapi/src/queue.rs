//! In-order queues.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::parts::queue_number;
use arrow_device::device::{CopyOp, DevicePtr, EventPtr, RawQueue};

use crate::memory::After;
use crate::object::Owned;
use crate::shared::Shared;
use crate::sys::raw;

/// A queue of a oneAPI device, of which [`Queue::raw`](arrow_device::Queue::raw) is one.
pub struct OneApiQueue {
    shared: Arc<Shared>,
    queue: Arc<Owned<raw::Queue>>,
    /// For the pool.
    number: u64,
}

impl fmt::Debug for OneApiQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OneApiQueue({} {:p})", self.shared.id, self.sycl_queue())
    }
}

impl OneApiQueue {
    pub(crate) fn new(shared: Arc<Shared>, queue: Arc<Owned<raw::Queue>>) -> Arc<Self> {
        shared.add_queue(&queue);
        Arc::new(Self {
            shared,
            queue,
            number: queue_number(),
        })
    }

    /// Returns the `sycl::queue*`, which lives as long as this value. Work that a program gives to it runs in this queue's order.
    pub fn sycl_queue(&self) -> *mut c_void {
        self.queue.sycl_queue()
    }
}

// SAFETY:
// - memory is of SYCL's aligned allocation, and in use by one caller at a time: `Blocks` gives it to another queue only after the
//   event of its free.
// - The queue is in order; the events of others that it waits for are barriers in it.
// - An event of `record` is SYCL's event after all earlier work of the queue.
unsafe impl RawQueue for OneApiQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        self.shared.check()?;
        self.shared.blocks.allocate(self.number, bytes)
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> Result<()> {
        let shared = &self.shared;
        shared.check_process()?;
        match self.queue.record() {
            Ok(event) => {
                let queue = self.queue.clone();
                let after = After { event, queue };
                shared.blocks.free(base, self.number, Some(after))
            }
            Err(failed) => {
                // When the memory is free is not known.
                shared.blocks.free(base, self.number, None)?;
                Err(shared.error(failed))
            }
        }
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let shared = &self.shared;
        shared.check()?;
        for (done, copy) in copies.iter().enumerate() {
            // SAFETY: the caller guarantees the memory until the copies have completed (see `# Safety`). One call of SYCL's
            // copies in every direction.
            let queued = unsafe { self.queue.copy(copy.dst, copy.src, copy.bytes) };
            if let Err(failed) = queued {
                if done > 0 {
                    // After an error none of them runs.
                    shared.end(&self.queue);
                }
                return Err(shared.error(failed));
            }
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        self.shared.check()?;
        // SAFETY: the caller guarantees the memory until the fill has completed (see `# Safety`).
        unsafe { self.queue.fill(dst, byte, bytes) }.map_err(|failed| self.shared.error(failed))
    }

    fn record(&self) -> Result<EventPtr> {
        let shared = &self.shared;
        shared.check()?;
        let event = self.queue.record().map_err(|failed| shared.error(failed))?;
        let recorded = shared.recorded(event, self.queue.clone());
        Ok(recorded.publish())
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        // SAFETY: the caller guarantees a live event (see `# Safety`), and the queue is this one's.
        unsafe { self.shared.order(self.sycl_queue(), true, event) }
    }

    fn stream_handle(&self) -> Option<usize> {
        Some(self.sycl_queue().expose_provenance())
    }
}

impl Drop for OneApiQueue {
    fn drop(&mut self) {
        // SYCL's queue may go before its work has ended.
        if self.shared.check_process().is_ok() {
            self.shared.leave(self.queue.clone(), self.queue.record());
        }
    }
}
