//! Device memory to host memory: one list of copies, one host wait, one slab.

use std::sync::{Arc, OnceLock};

use crate::data::DeviceArray;
use crate::device::{CopyKind, CopyOp, Counters, Device, Devices, Queue, SyncEvent};
use crate::error::Result;
use crate::memory::{Memory, Owner, Reading, Ready};
use crate::transfer::fix::{Fix, fix_in_place};
use crate::transfer::plan::Plan;

/// The queues of a download, which belong to the array's device.
#[derive(Clone, Debug)]
pub(crate) struct DownloadQueues {
    copies: Queue,
    /// For reads of sizes that are stored in device memory, which come before the copies; made for the first such read.
    /// `None` if they share the queue of the copies.
    sizes: Option<Arc<OnceLock<Queue>>>,
}

impl DownloadQueues {
    /// Makes queues for downloads one after the other. Sizes are not read behind the copies of an earlier download: a wait
    /// for them would be one for those.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let copies = device.new_queue()?;
        let sizes = Some(Arc::default());
        Ok(Self { copies, sizes })
    }

    pub(crate) fn copies(&self) -> &Queue {
        &self.copies
    }

    pub(super) fn sizes(&self) -> Result<&Queue> {
        let Some(sizes) = &self.sizes else {
            return Ok(&self.copies);
        };
        if let Some(queue) = sizes.get() {
            return Ok(queue);
        }
        let queue = self.copies.device().new_queue()?;
        Ok(sizes.get_or_init(|| queue))
    }
}

impl From<Queue> for DownloadQueues {
    fn from(copies: Queue) -> Self {
        let sizes = None;
        Self { copies, sizes }
    }
}

/// Copies of an array's rows that were queued. All buffers share one slab of the source device's pool.
#[derive(Debug)]
pub(super) struct ToSlab {
    plan: Plan,
    reading: Reading<DeviceArray>,
}

impl ToSlab {
    /// Queues the copies of a plan. Does not wait.
    pub(super) fn start(plan: Plan, array: &DeviceArray, queue: &Queue) -> Result<Self> {
        let slab = array.device().host_slab(plan.bytes)?;
        let copies: Vec<_> = plan
            .pieces()
            .filter(|(piece, _)| !matches!(piece.fix, Fix::Ready(_)))
            .map(|(piece, _)| CopyOp {
                src: piece.src,
                dst: slab.as_device_ptr().offset(piece.dst),
                bytes: piece.src_bytes(),
                kind: CopyKind::DeviceToHost,
            })
            .collect();
        // SAFETY: the plan's sources lie in the array's buffers, which `array` keeps alive and whose events are those of its
        // owners; its destinations lie in the slab, which has the bytes that the plan says.
        let reading =
            unsafe { Reading::start(queue, &array.owners(), &copies, slab, array.clone()) }?;
        Ok(Self { plan, reading })
    }

    /// Returns the event after which the copies are done, or `None` if there are none.
    pub(super) fn event(&self) -> Option<&SyncEvent> {
        self.reading.event()
    }

    /// Says that the event was waited for: [`finish`](Self::finish) does not wait again.
    pub(super) fn waited(&mut self) {
        self.reading.waited();
    }

    /// Waits for the copies, and applies the fixes.
    pub(super) fn finish(self) -> Result<DeviceArray> {
        let (mut slab, array) = self.reading.finish()?;
        for (piece, _) in self.plan.pieces() {
            if !piece.is_plain() {
                let copied = &array.device().counters().host_copied_bytes;
                Counters::add(copied, piece.dst_bytes);
            }
            let region = &mut slab[piece.dst..][..piece.region()];
            // SAFETY: a plan of one array has no pieces with other sources.
            unsafe { fix_in_place(&piece, &self.plan.made, &[], region) };
        }
        let base = slab.as_device_ptr();
        let owner = Owner::new(Devices::cpu(), Memory::Slab(slab), Ready::Now);
        let node = self.plan.place(array.data_type(), base, &Arc::new(owner));
        Ok(array.like(Devices::cpu(), node))
    }
}
