//! [`Device`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::{available_parallelism, sleep};
use std::time::Duration;

use crate::abi::guard;
use crate::device::backend::{Backend, Capabilities, ExportSync, RawQueue, not_supported};
use crate::device::engine::Worker;
use crate::device::host_pool::{HostPool, IDLE_LIMIT};
use crate::device::{ALIGNMENT, Counters, DeviceId, HostBackend, Process, TransferStats, lock};
use crate::error::{Error, Result};

/// The name of the threads that run what comes after events.
pub(crate) const RELEASES: &str = "arrow-device release";

/// A device, with its memory, queues and counters. Clones are the same device.
///
/// [`Devices`](crate::Devices) returns devices; [`Device::new`] wraps a [`Backend`].
///
/// ```
/// use arrow_array::record_batch;
/// use arrow_device::{Device, Devices};
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let device: Device = Devices::cpu();
/// let on_device = device.upload(&batch)?;
/// assert_eq!(on_device.to_host()?, batch);
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone)]
pub struct Device(pub(super) Arc<Inner>);

pub(super) struct Inner {
    capabilities: Capabilities,
    pub(super) default_queue: Arc<dyn RawQueue>,
    counters: Counters,
    process: Process,
    /// Runs what comes after events.
    pub(super) releases: Worker,
    host_pool: HostPool,
    drop_error: Mutex<Option<Error>>,
    /// What runs once the device has settled.
    unsettled: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
    /// 0 is the default number.
    packing_threads: AtomicUsize,
    // Last, so that the fields above can still use it while they are dropped.
    backend: Arc<dyn Backend>,
}

// For callers that catch panics. A panic leaves a device usable: what is behind its locks is
// consistent whenever a lock is free (`lock`), and the rest are counters.
impl std::panic::RefUnwindSafe for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.process.is_this() {
            self.host_pool.clear(&*self.backend);
        }
    }
}

impl Device {
    /// Wraps a backend. Devices from two calls with the same backend are different devices: clone
    /// one instead.
    ///
    /// # Errors
    /// Returns the backend's error if it has no default queue.
    pub fn new(backend: Arc<dyn Backend>) -> Result<Self> {
        Ok(Self(Arc::new(Inner {
            capabilities: backend.capabilities(),
            default_queue: backend.default_queue()?,
            counters: Counters::default(),
            process: Process::this(),
            releases: Worker::new(RELEASES),
            host_pool: HostPool::new(IDLE_LIMIT),
            drop_error: Mutex::new(None),
            unsettled: Mutex::default(),
            packing_threads: AtomicUsize::new(0),
            backend,
        })))
    }

    /// Wraps a backend of host memory.
    pub(crate) fn on_host(id: DeviceId) -> Self {
        Self::new(Arc::new(HostBackend::new(id, None)))
            .expect("the host backend always has a default queue")
    }

    /// Returns the device type and id.
    pub fn id(&self) -> DeviceId {
        self.0.capabilities.id
    }

    /// Returns whether the host may read this device's memory with ordinary loads, once its event
    /// has completed.
    pub fn is_host_readable(&self) -> bool {
        self.0.capabilities.host_readable
    }

    /// Returns whether the device's memory is ordinary memory of the host, and its work done at once.
    pub(crate) fn is_host_memory(&self) -> bool {
        let of_a_program =
            || self.id() == DeviceId::CPU && self.is_host_readable() && self.is_synchronous();
        self.page().is_some() || of_a_program()
    }

    /// Returns whether all memory of the host is the device's: the CPU, but not a program's own device of that type, whose memory is
    /// special (shared with other processes, say), so that an upload copies.
    pub(crate) fn has_all_host_memory(&self) -> bool {
        self.id() == DeviceId::CPU && self.page().is_some()
    }

    /// Returns the number of bytes of which each buffer of an array on this device fills a multiple.
    pub(crate) fn alignment(&self) -> usize {
        self.page().unwrap_or(ALIGNMENT)
    }

    fn page(&self) -> Option<usize> {
        self.0.backend.downcast_ref::<HostBackend>()?.page()
    }

    /// Returns whether work has completed when the call that queues it returns, as on the CPU.
    pub fn is_synchronous(&self) -> bool {
        self.0.capabilities.synchronous
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    /// Returns an error if arrays of this device cannot be exported.
    pub(crate) fn check_export(&self) -> Result<()> {
        match self.0.capabilities.exports {
            ExportSync::Refused(reason) => Err(not_supported(self.id(), "export", reason)),
            _ => Ok(()),
        }
    }

    /// Whether this process is a child of the one that made the device.
    pub(crate) fn is_forked(&self) -> bool {
        !self.0.process.is_this()
    }

    /// Makes this thread wait for all work of the device: one host wait.
    ///
    /// What was kept until that work was done, such as the sources of an upload, is dropped by another thread, which may take a
    /// moment longer.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn synchronize(&self) -> Result<()> {
        if self.0.capabilities.synchronous {
            return Ok(());
        }
        Counters::add(&self.0.counters.host_waits, 1);
        self.0.backend.synchronize()
    }

    /// Returns all counts since the device was created.
    pub fn stats(&self) -> TransferStats {
        self.0.counters.snapshot()
    }

    /// Sets how many threads may pack a large upload: the thread that calls the upload, and others, which live as long
    /// as the call. 1 means no other thread, 0 the default: half of the cores, but at most 8. More than 8 are not used.
    ///
    /// There is about one for each 1.25 MiB of packed bytes, so that others help from 2 MiB on. Memory that is copied from where it
    /// is, such as page-locked buffers of 1 MiB and more, is not packed.
    ///
    /// ```
    /// # use arrow_device::Devices;
    /// let device = Devices::cpu();
    /// device.set_packing_threads(1);
    /// ```
    pub fn set_packing_threads(&self, threads: usize) {
        self.0.packing_threads.store(threads, Ordering::Relaxed);
    }

    /// Returns how many threads may pack a large upload ([`set_packing_threads`](Self::set_packing_threads)).
    pub(crate) fn packing_threads(&self) -> usize {
        static CORES: OnceLock<usize> = OnceLock::new();
        match self.0.packing_threads.load(Ordering::Relaxed) {
            // The system is asked once, because it reads files to answer.
            0 => {
                let half = |cores: std::num::NonZeroUsize| (cores.get() / 2).clamp(1, 8);
                *CORES.get_or_init(|| available_parallelism().map_or(1, half))
            }
            threads => threads,
        }
    }

    /// Returns the last error of an operation that cannot return one (a release, a drop), and
    /// forgets it.
    pub fn take_drop_error(&self) -> Option<Error> {
        lock(&self.0.drop_error).take()
    }

    /// Returns the backend, for downcasts (`downcast_ref`) to its own type and for queries
    /// such as [`Backend::classify`].
    ///
    /// Direct calls are not counted in [`stats`](Self::stats), and the memory, events and queues
    /// that they return have no owner (see [`Backend`]).
    pub fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    /// Keeps an error for [`take_drop_error`](Self::take_drop_error).
    pub(crate) fn park_drop_error(&self, e: Error) {
        Counters::add(&self.0.counters.drop_errors, 1);
        let last = lock(&self.0.drop_error).replace(e);
        // Not under the lock: it may be a value of the program's.
        drop(last);
    }

    /// Waits until no work that was queued before runs any more, as long as it takes. An error, which means that the device has
    /// failed and runs nothing more ([`Backend::is_over`]), is kept for [`take_drop_error`](Self::take_drop_error).
    pub(crate) fn settle(&self) {
        Counters::add(&self.0.counters.host_waits, 1);
        while let Err(e) = self.0.backend.synchronize() {
            if self.0.backend.is_over() {
                return self.park_drop_error(e);
            }
            // Such as a lack of memory, which says nothing about the work.
            sleep(Duration::from_millis(10));
        }
    }

    /// Runs `action` on the release thread once no work that was queued before runs any more. The thread settles once for all
    /// actions that have come by then. A panic is kept for [`take_drop_error`](Self::take_drop_error).
    pub(crate) fn settled(&self, action: impl FnOnce() + Send + 'static) {
        if self.is_forked() {
            // There is no such work, and the list may be locked for ever.
            return self.parking("release", action);
        }
        lock(&self.0.unsettled).push(Box::new(action));
        let device = self.clone();
        self.when(Vec::new(), move || {
            let actions = std::mem::take(&mut *lock(&device.0.unsettled));
            if actions.is_empty() {
                return;
            }
            device.settle();
            for action in actions {
                device.parking("release", action);
            }
        });
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.0.counters
    }

    /// Runs `f`, which drops or releases something, and keeps its panic for
    /// [`take_drop_error`](Self::take_drop_error).
    pub(crate) fn parking(&self, operation: &'static str, f: impl FnOnce()) {
        if let Err(e) = guard::call_foreign(operation, f) {
            self.park_drop_error(e);
        }
    }

    pub(crate) fn host_pool(&self) -> Option<&HostPool> {
        (!self.is_forked()).then_some(&self.0.host_pool)
    }

    /// Returns a reference that does not keep the device alive: for a table of devices that hands out the same one again.
    ///
    /// ```
    /// use arrow_device::Devices;
    /// let device = Devices::cpu();
    /// assert_eq!(device.downgrade().upgrade(), Some(device));
    /// ```
    pub fn downgrade(&self) -> WeakDevice {
        WeakDevice(Arc::downgrade(&self.0))
    }
}

/// A reference to a device that does not keep it alive; [`Device::downgrade`] makes one.
#[derive(Clone, Debug)]
pub struct WeakDevice(Weak<Inner>);

impl WeakDevice {
    /// Returns the device, if it is still used.
    pub fn upgrade(&self) -> Option<Device> {
        self.0.upgrade().map(Device)
    }
}

impl PartialEq for WeakDevice {
    fn eq(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for WeakDevice {}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.capabilities.id)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id().fmt(f)
    }
}

/// The devices of [`host_memory`] that are used. Not in a set of devices, where `get` must keep returning that the backend is
/// missing.
static HOST_MEMORY: Mutex<BTreeMap<DeviceId, WeakDevice>> = Mutex::new(BTreeMap::new());

/// Returns a device for page-locked or Metal's memory as plain host memory: the same one for an id
/// as long as it is used.
pub(crate) fn host_memory(id: DeviceId) -> Device {
    let mut devices = lock(&HOST_MEMORY);
    if let Some(device) = devices.get(&id).and_then(WeakDevice::upgrade) {
        return device;
    }
    let device = Device::on_host(id);
    // Ids come from producers: those that are not used any more must not take memory for ever.
    devices.retain(|_, device| device.0.strong_count() > 0);
    devices.insert(id, device.downgrade());
    device
}
