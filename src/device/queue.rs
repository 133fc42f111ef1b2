//! [`Queue`]: the queue of a backend, with counters and owners.

use std::sync::Arc;

use crate::device::backend::{CopyKind, CopyOp, DevicePtr, RawQueue};
use crate::device::event::EventRef;
use crate::device::{Counters, Device, SyncEvent};
use crate::error::Result;

/// An ordered queue of device work, such as a CUDA or HIP stream. Clones are the same queue.
///
/// Work runs asynchronously, in the order in which it was queued. Work on two queues is ordered
/// only by events: [`record`](Self::record) on one, [`wait`](Self::wait) on the other.
///
/// ```
/// use arrow_device::Devices;
///
/// # fn main() -> arrow_device::Result<()> {
/// let device = Devices::simulated()?;
/// let (first, second) = (device.default_queue(), device.new_queue()?);
/// if let Some(event) = first.record()? {
///     second.wait(&event)?; // later work of `second` runs after all work of `first` so far
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Queue {
    device: Device,
    raw: Arc<dyn RawQueue>,
}

/// Whether both handles are the same queue.
impl PartialEq for Queue {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.raw, &other.raw)
    }
}

impl Eq for Queue {}

impl Device {
    /// Returns the queue that is used when no other is named.
    pub fn default_queue(&self) -> Queue {
        Queue::new(self.clone(), self.0.default_queue.clone())
    }

    /// Creates a queue.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn new_queue(&self) -> Result<Queue> {
        Ok(Queue::new(self.clone(), self.backend().new_queue()?))
    }
}

impl Queue {
    /// Makes a queue of a stream of the device's runtime, which is given by its handle as a number. Work of both runs in one order.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`](crate::Error::NotSupported) if streams of the device have no handles, and the device's own error for
    /// a stream that cannot be its queue.
    ///
    /// # Safety
    /// The handle is that of a live stream of the device's runtime, or stands for a default stream that is the same on all threads, until the
    /// last clone of the queue is dropped.
    pub unsafe fn adopt(device: &Device, handle: usize) -> Result<Self> {
        // SAFETY: the caller guarantees the stream (see `# Safety`).
        let raw = unsafe { device.backend().adopt_queue(handle) }?;
        Ok(Self::new(device.clone(), raw))
    }

    pub(crate) fn new(device: Device, raw: Arc<dyn RawQueue>) -> Self {
        Self { device, raw }
    }

    /// Returns the device whose work this queue runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the backend's own queue, for downcasts (`downcast_ref`) to its type.
    ///
    /// Work that is given to it directly runs in this queue's order, but is not counted in
    /// [`Device::stats`]. Memory and events that it returns leak unless the caller frees and
    /// releases them, which is `unsafe`; those of
    /// [`DeviceBufferMut::allocate`](crate::DeviceBufferMut::allocate) and [`record`](Self::record)
    /// have owners.
    pub fn raw(&self) -> &Arc<dyn RawQueue> {
        &self.raw
    }

    /// Records an event after all work so far. Returns `None` if the device is synchronous, like
    /// the CPU: that work has completed.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn record(&self) -> Result<Option<SyncEvent>> {
        if self.device.is_synchronous() {
            return Ok(None);
        }
        let ptr = self.raw.record()?;
        Counters::add(&self.device.counters().events, 1);
        // SAFETY: the event was just recorded on a queue of this device, and nobody else owns it.
        Ok(Some(unsafe {
            SyncEvent::from_recorded(self.device.clone(), ptr)
        }))
    }

    /// Makes later work of this queue wait for `event`. If this device cannot wait for events of
    /// the other one, this thread waits instead.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn wait(&self, event: &SyncEvent) -> Result<()> {
        self.wait_ref(event.as_ref())
    }

    pub(crate) fn wait_ref(&self, event: EventRef<'_>) -> Result<()> {
        let (own, other) = (&self.device, event.device);
        if other != own && !own.backend().relation(other.backend()).waits {
            return event.wait();
        }
        // SAFETY: an `EventRef` is a live event of its device, which is this one or one whose
        // events this one accepts.
        if !unsafe { self.raw.wait(event.ptr) }? {
            return event.wait();
        }
        Counters::add(&self.device.counters().queue_waits, 1);
        Ok(())
    }

    /// As [`wait`](Self::wait), but does nothing if the event has completed.
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
        // SAFETY: the caller guarantees that the memory is from one `allocate` of this device, is
        // freed once, and that this queue waits for its uses on other queues (see `# Safety`).
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
        // SAFETY: the caller guarantees that sources and destinations are valid for their bytes, do
        // not overlap, and live, unchanged, until the copies have completed (see `# Safety`).
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
        // SAFETY: the caller guarantees that `dst` is valid for `bytes` bytes, and lives until the
        // fill has completed (see `# Safety`).
        unsafe { self.raw.fill(dst, byte, bytes) }?;
        let counters = self.device.counters();
        Counters::add(&counters.fills, 1);
        Counters::add(&counters.filled_bytes, bytes);
        Ok(())
    }

    /// Makes this thread wait for all work of this queue so far: one event and one host wait.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn synchronize(&self) -> Result<()> {
        match self.record()? {
            Some(event) => event.wait(),
            None => Ok(()),
        }
    }

    /// Keeps `sources` until `event`, which was recorded on this queue; if that failed, until all work of the queue so far has
    /// completed, or else of the device.
    pub(crate) fn keep_until(
        &self,
        event: &Result<Option<SyncEvent>>,
        sources: impl Send + 'static,
    ) {
        match event {
            Ok(Some(event)) => event.keep(sources),
            Ok(None) => {}
            Err(_) => match self.record() {
                Err(_) => self.device.settled(move || drop(sources)),
                event => self.keep_until(&event, sources),
            },
        }
    }
}
