//! The device.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_device::device::parts::Failure;
use arrow_device::device::{
    Backend, Capabilities, DeviceId, DevicePtr, EventPtr, PointerInfo, Queue, RawQueue, Relation,
};
use arrow_device::{Device, Error, Result};

use crate::event::{self, Recorded};
use crate::memory::{Blocks, OneApiMemory};
use crate::queue::OneApiQueue;
use crate::shared::{Found, Shared, check_queue};
use crate::sys::{self, Memory, Sycl};

/// A oneAPI device: the backend of an arrow-device device.
pub struct OneApiDevice {
    pub(crate) shared: Arc<Shared>,
    default_queue: Arc<OneApiQueue>,
    memory: OneApiMemory,
    name: String,
    is_cpu: bool,
    has_host_memory: bool,
}

impl fmt::Debug for OneApiDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "OneApiDevice({} {:?}, {})",
            self.shared.id,
            self.name,
            self.memory.name()
        )
    }
}

impl OneApiDevice {
    pub(crate) fn new(
        sycl: &'static Sycl,
        id: DeviceId,
        memory: OneApiMemory,
        found: Found,
    ) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);

        let absent = |failed: sys::Failed| failed.absent(id);
        let name = found.device.name().map_err(absent)?;
        let properties = found.device.properties().map_err(absent)?;
        if !properties.has(memory.kind()) {
            let kind = memory.name();
            let reason = format!(
                "\"{name}\" has no unified shared memory (USM) of the kind {kind}, which arrow-device needs"
            );
            return Err(sys::absent(id, reason));
        }
        let failure = Arc::new(Failure::default());
        let blocks = Blocks::new(
            id,
            found.device.clone(),
            found.context.clone(),
            memory.kind(),
            failure.clone(),
        );
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared::new(sycl, id, number, &found, blocks, failure));
        Ok(Self {
            default_queue: OneApiQueue::new(shared.clone(), found.queue),
            shared,
            memory,
            name,
            is_cpu: properties.is_cpu(),
            has_host_memory: properties.has(Memory::Host),
        })
    }

    /// Returns the backend of a oneAPI device, or `None` for one of another type.
    pub fn of(device: &Device) -> Option<&Self> {
        device.backend().downcast_ref()
    }

    /// Returns SYCL's name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns which memory this device allocates.
    pub fn memory(&self) -> OneApiMemory {
        self.memory
    }

    /// Returns whether the address is one of unified shared memory of this device's context, of whatever kind and whoever
    /// allocated it.
    ///
    /// # Errors
    /// Returns [`Error::Device`] with SYCL's error.
    pub fn owns(&self, address: DevicePtr) -> Result<bool> {
        let kind = self.shared.context.kind(address);
        let kind = kind.map_err(|failed| self.shared.error(failed))?;
        Ok(kind.is_some())
    }

    /// Returns whether a queue of this device has recorded the event.
    pub(crate) fn has_recorded(&self, event: EventPtr) -> bool {
        Recorded::find(event).is_some_and(|event| event.device == self.shared.number)
    }

    /// Makes a queue of a program's `sycl::queue*`: work of both runs in one order. The queue is copied, as C++ copies it.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if it is not a queue of this device's context, or is out of order, and
    /// [`Error::Device`] with SYCL's error.
    ///
    /// # Safety
    /// `queue` points to a live `sycl::queue` of the major version of SYCL's library with which this crate was compiled.
    pub unsafe fn adopt_queue(&self, queue: *const c_void) -> Result<Arc<dyn RawQueue>> {
        let shared = &self.shared;
        let failed = |failed: sys::Failed| shared.error(failed);
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        unsafe { check_queue(shared.sycl, shared.id, queue) }?;
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let context = unsafe { shared.sycl.context_of(queue) }.map_err(failed)?;
        if !context.is(&shared.context) {
            return Err(Error::InvalidArgument(
                format!(
                    "{}: the queue that is adopted is of another context than the device; open one with OneApiConfig::from_queue",
                    shared.id
                )
                .into(),
            ));
        }
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let queue = unsafe { shared.sycl.adopt(queue) }.map_err(failed)?;
        Ok(OneApiQueue::new(shared.clone(), Arc::new(queue)))
    }

    /// Returns how much is left: allocations of device and of host memory, recorded events, watched ones, frees to be made.
    #[doc(hidden)]
    pub fn outstanding(&self) -> [usize; 5] {
        let (device, host, frees) = self.shared.blocks.outstanding();
        [
            device,
            host,
            Recorded::count(self.shared.number),
            self.shared.watched(),
            frees,
        ]
    }
}

/// Makes a queue of a program's `sycl::queue*`, on the device of its context.
///
/// # Errors
/// As [`OneApiDevice::adopt_queue`]; also [`Error::InvalidArgument`] for a device of another type.
///
/// # Safety
/// As [`OneApiDevice::adopt_queue`].
pub unsafe fn adopt_queue(device: &Device, queue: *const c_void) -> Result<Queue> {
    let not_ours = || Error::InvalidArgument(format!("{device} is not a oneAPI device").into());
    let backend = OneApiDevice::of(device).ok_or_else(not_ours)?;
    // SAFETY: the caller guarantees a live queue (see `# Safety`).
    let raw = unsafe { backend.adopt_queue(queue) }?;
    // SAFETY: the queue was just made by this device's backend.
    Ok(unsafe { device.wrap_queue(raw) })
}

// SAFETY:
// - shared and host memory can be read by the host, and is initialised when it is allocated.
// - `classify` knows this device's own allocations with their lengths, and accepts nothing else for certain; on a device that the host
//   reads it refuses what SYCL does not know as shared or host memory.
// - An event that SYCL reports complete has been waited for once more, which makes its work visible to the host.
// - `settle` waits for the last work of all queues, of dropped ones too.
unsafe impl Backend for OneApiDevice {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.shared.id);
        this.host_readable = self.memory != OneApiMemory::Device;
        this
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.default_queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let shared = &self.shared;
        shared.check()?;
        let queue = shared
            .context
            .queue(&shared.device)
            .map_err(|failed| shared.error(failed))?;
        Ok(OneApiQueue::new(shared.clone(), Arc::new(queue)))
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        self.shared.check_process()?;
        match Recorded::find(event) {
            Some(recorded) if recorded.device == self.shared.number => Ok(()),
            Some(other) => Err(Error::InvalidArgument(
                format!(
                    "sync_event is an event of {}, another device than this {} with other memory or in another context; import with \
                     a set of devices that has that one (arrow_device_oneapi::register_with)",
                    other.id, self.shared.id
                )
                .into(),
            )),
            // SAFETY: the caller guarantees that an aligned address can be read (see `# Safety`).
            None => unsafe { event::check(self.shared.id, event) },
        }
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        unsafe { self.shared.is_complete(event) }
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: the caller guarantees that the event lives during the call (see `# Safety`).
        event::wait(|| unsafe { self.shared.is_complete(event) })
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if self.shared.check_process().is_ok() {
            Recorded::release(event);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        self.shared.blocks.classify(address, bytes)
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        self.shared.check_process()?;
        self.has_host_memory
            .then(|| self.shared.blocks.allocate_host(bytes))
            .transpose()
    }

    unsafe fn free_host(&self, address: DevicePtr, _bytes: usize) {
        if self.shared.check_process().is_ok() {
            self.shared.blocks.free_host(address);
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        !address.is_null() && (self.is_cpu || self.shared.blocks.is_host(address, bytes))
    }

    fn relation(&self, other: &dyn Backend) -> Relation {
        let Some(other) = other.downcast_ref::<Self>() else {
            return Relation::default();
        };
        Relation {
            copies: other.shared.context.is(&self.shared.context),
            waits: true,
        }
    }

    unsafe fn stream_wait(&self, stream: usize, event: EventPtr) -> Result<bool> {
        let queue: *mut c_void = std::ptr::with_exposed_provenance_mut(stream);
        let shared = &self.shared;
        if queue.is_null() {
            let id = shared.id;
            return Err(Error::InvalidArgument(
                format!("{id}: a stream cannot wait for an event: 0 is no sycl::queue*, and SYCL has no default queue; pass the \
                         address of a queue")
                .into(),
            ));
        }
        // SAFETY: the caller guarantees the handle of a live queue (see `# Safety`).
        let context =
            unsafe { shared.sycl.context_of(queue) }.map_err(|failed| shared.error(failed))?;
        // SAFETY: the caller guarantees the handle of a live queue, and a live event (see `# Safety`).
        unsafe { shared.order(queue, context.is(&shared.context), event) }?;
        Ok(true)
    }

    fn trim(&self) {
        if self.shared.check_process().is_ok() {
            self.shared.blocks.free_idle(true);
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.check()?;
        self.shared.finish()
    }

    fn settle(&self) -> Result<()> {
        self.shared.finish()
    }
}
