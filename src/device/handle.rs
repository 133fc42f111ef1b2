//! [`Device`].

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::abi::guard;
use crate::device::backend::{Backend, RawQueue};
use crate::device::block::SlabPool;
use crate::device::order::new_queue_id;
use crate::device::reaper::{Reaper, ReaperOf};
use crate::device::{Counters, DeviceId, Queue, TransferStats};
use crate::error::{Error, Result};

/// A device: memory, queues and counters. Clones are the same device.
///
/// Get one from [`Devices`](crate::Devices), or wrap a [`Backend`] with [`Device::new`].
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    id: DeviceId,
    host_readable: bool,
    synchronous: bool,
    default_queue: Arc<dyn RawQueue>,
    default_queue_id: u64,
    counters: Counters,
    reaper: Reaper,
    slabs: SlabPool,
    drop_error: Mutex<Option<Error>>,
    // Last, so that everything above can still use it while dropped.
    backend: Arc<dyn Backend>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.slabs.clear(&*self.backend);
    }
}

impl Device {
    /// Wraps a backend. Two handles made from one backend are two devices to this crate: keep one
    /// and clone it.
    pub fn new(backend: Arc<dyn Backend>) -> Result<Self> {
        Ok(Self(Arc::new(Inner {
            id: backend.id(),
            host_readable: backend.host_readable(),
            synchronous: backend.is_synchronous(),
            default_queue: backend.default_queue()?,
            default_queue_id: new_queue_id(),
            counters: Counters::default(),
            reaper: Reaper::default(),
            slabs: SlabPool::default(),
            drop_error: Mutex::new(None),
            backend,
        })))
    }

    /// Device type and id.
    pub fn id(&self) -> DeviceId {
        self.0.id
    }

    /// Whether the host may read this device's memory with ordinary loads, once its event has
    /// completed.
    pub fn is_host_readable(&self) -> bool {
        self.0.host_readable
    }

    /// Whether all work has completed when the call that asked for it returns (the CPU).
    pub fn is_synchronous(&self) -> bool {
        self.0.synchronous
    }

    /// The queue that work runs on when no other is named.
    pub fn default_queue(&self) -> Queue {
        let (raw, id) = (self.0.default_queue.clone(), self.0.default_queue_id);
        Queue::with_id(self.clone(), raw, id)
    }

    /// A further queue.
    pub fn new_queue(&self) -> Result<Queue> {
        Ok(Queue::new(self.clone(), self.0.backend.new_queue()?))
    }

    /// A queue of the backend's own making, as this device's.
    ///
    /// # Safety
    /// It is a queue of this device's backend.
    pub unsafe fn wrap_queue(&self, raw: Arc<dyn RawQueue>) -> Queue {
        Queue::new(self.clone(), raw)
    }

    /// Makes this thread wait for all work of the device: one host wait.
    pub fn synchronize(&self) -> Result<()> {
        if self.0.synchronous {
            return Ok(());
        }
        Counters::add(&self.0.counters.host_waits, 1);
        self.0.backend.synchronize()
    }

    /// Everything counted so far.
    pub fn stats(&self) -> TransferStats {
        self.0.counters.snapshot()
    }

    /// The last error of a place that cannot report one (a release, a drop), once.
    pub fn take_drop_error(&self) -> Option<Error> {
        self.0
            .drop_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// The backend, for downcasts to its own type ([`Backend::as_any`]) and for questions such as
    /// [`Backend::classify`].
    ///
    /// What is called on it directly is not counted ([`stats`](Self::stats)); memory, events and queues that it returns
    /// have no owner of this crate's (see [`Backend`]).
    pub fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    pub(crate) fn park_drop_error(&self, e: Error) {
        Counters::add(&self.0.counters.drop_errors, 1);
        *self
            .0
            .drop_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(e);
    }

    /// Makes sure that no work of the device runs any more that was queued before: waits for all of
    /// it. An error says that the device has failed and runs nothing more ([`Backend::settle`]); it is
    /// parked.
    pub(crate) fn settle(&self) {
        Counters::add(&self.0.counters.host_waits, 1);
        if let Err(e) = self.0.backend.settle() {
            self.park_drop_error(e);
        }
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// Runs `f`, which lets go of something; what it throws is parked.
    pub(crate) fn parking(&self, operation: &'static str, f: impl FnOnce()) {
        if let Err(e) = guard::call_foreign(operation, f) {
            self.park_drop_error(e);
        }
    }

    pub(crate) fn reaper(&self) -> ReaperOf<'_> {
        ReaperOf::new(self, &self.0.reaper)
    }

    pub(crate) fn slabs(&self) -> &SlabPool {
        &self.0.slabs
    }

    pub(crate) fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.0))
    }
}

/// A device that lives as long as others use it.
pub(crate) struct WeakDevice(Weak<Inner>);

impl WeakDevice {
    /// The device, if anything still uses it.
    pub(crate) fn upgrade(&self) -> Option<Device> {
        self.0.upgrade().map(Device)
    }

    pub(crate) fn is_used(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.id)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.id.fmt(f)
    }
}
