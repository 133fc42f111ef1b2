//! How a oneAPI device is opened.

use std::ffi::c_void;
use std::sync::Arc;

#[cfg(doc)]
use arrow_device::Error;
use arrow_device::device::DeviceId;
use arrow_device::device::engine::Engine;
use arrow_device::{ArrowDeviceType, Device, Result};

use crate::runtime::{OneApiDevice, OneApiQueue};
use crate::sys::{Found, OneApiMemory, Owned, Sycl, absent, absent_after, raw};

/// How a oneAPI device is opened. [`Devices::open`](arrow_device::Devices::open)`("oneapi:0")` uses the defaults, after
/// [`register`](crate::register).
///
/// ```no_run
/// use arrow_device_oneapi::{OneApiConfig, OneApiMemory};
/// let device = OneApiConfig::new(0).with_memory(OneApiMemory::Shared).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct OneApiConfig {
    ordinal: usize,
    id: Option<i64>,
    memory: OneApiMemory,
    own_context: bool,
    idle_bytes: usize,
}

impl OneApiConfig {
    /// Configures the device of this number in `sycl::device::get_devices()`, with its own memory and the default context of its
    /// platform, which is that of the queues of most programs.
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            id: None,
            memory: OneApiMemory::default(),
            own_context: false,
            idle_bytes: 256 << 20,
        }
    }

    /// Sets the device id that arrays carry, instead of the device's number: for a second device of the same number, with other
    /// memory for example, in one set of devices. Other libraries know no such device.
    #[must_use]
    pub fn with_id(mut self, id: i64) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets which memory the device allocates.
    #[must_use]
    pub fn with_memory(mut self, memory: OneApiMemory) -> Self {
        self.memory = memory;
        self
    }

    /// Opens the device in a new context, whose memory and events programs cannot use in others. [`adopt`](Self::adopt) does not look at it.
    #[must_use]
    pub fn with_own_context(mut self) -> Self {
        self.own_context = true;
        self
    }

    /// Sets how many bytes of freed memory are kept for reuse, 256 MiB by default.
    /// [`Device::trim`](arrow_device::Device::trim) frees what is kept.
    #[must_use]
    pub fn with_idle_limit(mut self, bytes: usize) -> Self {
        self.idle_bytes = bytes;
        self
    }

    fn id(&self, number: usize) -> DeviceId {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        DeviceId::new(ArrowDeviceType::ONEAPI, self.id.unwrap_or(number))
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`] with the reason if the crate was built without SYCL, its library is missing, or there is no
    /// such device or none with such memory.
    pub fn open(&self) -> Result<Device> {
        let (device, queue, idle_bytes) = self.parts()?;
        // SAFETY: the queue was made of this device.
        unsafe { Engine::open(device, queue, idle_bytes) }
    }

    /// What [`open`](Self::open) gives to the engine, for tests that let its calls fail.
    #[doc(hidden)]
    pub fn parts(&self) -> Result<(OneApiDevice, Arc<OneApiQueue>, usize)> {
        let id = self.id(self.ordinal);
        let sycl = Sycl::get(id)?;
        let absent = |e| absent_after(id, e);
        check_number(sycl, id, self.ordinal)?;
        let found = sycl.device(self.ordinal, self.own_context);
        let found = found.map_err(absent)?;
        let queue = found.0.queue().map_err(absent)?;
        self.parts_of(sycl, id, found, queue)
    }

    /// Opens the device and the context of a program's queue (`sycl::queue*`), which becomes the device's default queue. The device keeps
    /// a copy of the queue, as C++ copies it; its asynchronous errors stay the program's to handle. The number of the configuration is not
    /// used: the id is that of the queue's device, unless one was set.
    ///
    /// # Errors
    /// As [`open`](Self::open), also if SYCL does not list the queue's device (a sub-device), and
    /// [`Error::InvalidArgument`] if the queue is null or not in order.
    ///
    /// # Safety
    /// `queue` is null, or points to a live `sycl::queue` of the major version of SYCL's library with which this crate was compiled.
    pub unsafe fn adopt(&self, queue: *const c_void) -> Result<Device> {
        let id = self.id(self.ordinal);
        let sycl = Sycl::get(id)?;
        let absent = |e| absent_after(id, e);
        // SAFETY: the caller guarantees a live queue, or null (see `# Safety`).
        let found = unsafe { sycl.device_of(queue) }.map_err(absent)?;
        // SAFETY: the caller guarantees a live queue, or null (see `# Safety`).
        let queue = unsafe { found.0.adopt(queue) }.map_err(absent)?;
        let id = self.id(found.1.index);
        let (device, queue, idle_bytes) = self.parts_of(sycl, id, found, queue)?;
        // SAFETY: the queue is one of this device.
        unsafe { Engine::open(device, queue, idle_bytes) }
    }

    fn parts_of(
        &self,
        sycl: Sycl,
        id: DeviceId,
        found: Found,
        queue: Owned<raw::Queue>,
    ) -> Result<(OneApiDevice, Arc<OneApiQueue>, usize)> {
        let device = OneApiDevice::new(sycl, id, self.memory, found)?;
        Ok((device, Arc::new(OneApiQueue(queue)), self.idle_bytes))
    }
}

fn check_number(sycl: Sycl, id: DeviceId, number: usize) -> Result<()> {
    let count = sycl.device_count().map_err(|e| absent_after(id, e))?;
    if number < count {
        return Ok(());
    }
    let reason = format!("SYCL lists {count} devices, which are numbered from 0");
    Err(absent(id, reason))
}
