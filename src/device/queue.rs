//! Queues, counted.

use std::sync::Arc;

use crate::device::backend::{CopyKind, CopyOp, DevicePtr, RawQueue};
use crate::device::event::EventRef;
use crate::device::order::new_queue_id;
use crate::device::{Counters, Device, Place, SyncEvent};
use crate::error::Result;

/// An ordered queue of a device's work: a CUDA or HIP stream. Clones are the same queue.
///
/// Work runs in order, later. Two queues are ordered only by events: [`record`](Self::record) on
/// one, [`wait`](Self::wait) on the other.
#[derive(Clone, Debug)]
pub struct Queue {
    device: Device,
    raw: Arc<dyn RawQueue>,
    /// For the order of its events.
    id: u64,
}

impl Queue {
    pub(crate) fn new(device: Device, raw: Arc<dyn RawQueue>) -> Self {
        Self::with_id(device, raw, new_queue_id())
    }

    /// `id` is of `raw` only.
    pub(super) fn with_id(device: Device, raw: Arc<dyn RawQueue>, id: u64) -> Self {
        Self { device, raw, id }
    }

    /// The device whose work this queue runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The backend's own queue, for downcasts to its type ([`RawQueue::as_any`]).
    ///
    /// Work that is given to it directly runs in this queue's order, but is not counted
    /// ([`Device::stats`]); memory and events that it returns are the caller's to free and release, which is `unsafe`, and
    /// leak otherwise. [`DeviceBufferMut::allocate`](crate::DeviceBufferMut::allocate) and [`record`](Self::record) have
    /// owners.
    pub fn raw(&self) -> &Arc<dyn RawQueue> {
        &self.raw
    }

    /// Whether both handles are the same queue.
    pub fn same_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.raw, &other.raw)
    }

    /// Records an event after all work so far. `None` if the device works synchronously (the CPU):
    /// then that work has completed.
    pub fn record(&self) -> Result<Option<SyncEvent>> {
        if self.device.is_synchronous() {
            return Ok(None);
        }
        let (ptr, place) = Place::of(self.id, || self.raw.record());
        let ptr = ptr?;
        Counters::add(&self.device.counters().events, 1);
        // SAFETY: just recorded on a queue of this device and given to nobody else.
        Ok(Some(unsafe {
            SyncEvent::from_recorded(self.device.clone(), ptr, place)
        }))
    }

    /// Makes later work of this queue wait for `event`. An event of another device, which this one
    /// cannot wait for, is waited for by this thread instead.
    pub fn wait(&self, event: &SyncEvent) -> Result<()> {
        self.wait_ref(event.as_ref())
    }

    pub(crate) fn wait_ref(&self, event: EventRef<'_>) -> Result<()> {
        let same = event.device() == &self.device;
        if !same
            && !self
                .device
                .backend()
                .accepts_events_of(event.device().backend())
        {
            return event.wait();
        }
        Counters::add(&self.device.counters().queue_waits, 1);
        // SAFETY: the event is live (contract of `EventRef`) and of a device that this one reaches.
        unsafe { self.raw.wait(event.ptr()) }
    }

    /// As [`wait`](Self::wait), without a wait if the event has completed.
    pub(crate) fn wait_ref_unless_complete(&self, event: &SyncEvent) -> Result<()> {
        if event.is_complete()? {
            return Ok(());
        }
        self.wait(event)
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let ptr = self.raw.allocate(bytes)?;
        let counters = self.device.counters();
        Counters::add(&counters.allocations, 1);
        Counters::add(&counters.allocated_bytes, bytes);
        Ok(ptr)
    }

    /// # Safety
    /// As [`RawQueue::free`].
    pub(crate) unsafe fn free(&self, base: DevicePtr, bytes: usize) {
        Counters::add(&self.device.counters().frees, 1);
        // SAFETY: the caller guarantees that the memory is from one `allocate` of this device, is freed once, and that this
        // queue waited for its uses on others (see `# Safety`).
        if let Err(e) = unsafe { self.raw.free(base, bytes) } {
            self.device.park_drop_error(e);
        }
    }

    /// # Safety
    /// As [`RawQueue::copy`].
    pub(crate) unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller guarantees that sources and destinations are valid for their bytes, and live, unchanged, until
        // the copies have completed (see `# Safety`).
        unsafe { self.raw.copy(copies) }?;
        let counters = self.device.counters();
        Counters::add(&counters.copies, copies.len());
        for copy in copies {
            let counter = match copy.kind {
                CopyKind::HostToDevice => &counters.bytes_to_device,
                CopyKind::DeviceToHost => &counters.bytes_to_host,
                CopyKind::DeviceToDevice => &counters.bytes_on_device,
            };
            Counters::add(counter, copy.bytes);
        }
        Ok(())
    }

    /// # Safety
    /// As [`RawQueue::fill`].
    pub(crate) unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees that `dst` is valid for `bytes` bytes, and lives until the fill has completed (see
        // `# Safety`).
        unsafe { self.raw.fill(dst, byte, bytes) }?;
        Counters::add(&self.device.counters().fills, 1);
        Ok(())
    }

    /// Makes this thread wait for all work of this queue so far: one event, one host wait.
    pub fn synchronize(&self) -> Result<()> {
        match self.record()? {
            Some(event) => event.wait(),
            None => Ok(()),
        }
    }

    /// Keeps `sources` alive until all work of this queue so far has completed. If no event can be
    /// recorded the reaper waits for the device.
    pub(crate) fn keep_until_done<T: Send + 'static>(&self, sources: T) {
        match self.record() {
            Ok(None) => drop(sources),
            Ok(Some(event)) => self
                .device
                .reaper()
                .after(vec![event], move || drop(sources)),
            Err(_) => {
                let device = self.device.clone();
                self.device.reaper().later(move || {
                    device.settle();
                    drop(sources);
                });
            }
        }
    }
}
