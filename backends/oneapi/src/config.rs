//! How a oneAPI device is opened.

use std::ffi::c_void;
use std::sync::Arc;

use arrow_device::device::DeviceId;
use arrow_device::{ArrowDeviceType, Device, Result};

use crate::device::OneApiDevice;
use crate::memory::OneApiMemory;
use crate::shared::{Found, check_queue};
use crate::sys::{self, Sycl};

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
    source: Source,
    memory: OneApiMemory,
    id: Option<i64>,
}

#[derive(Clone)]
enum Source {
    /// A number in `sycl::device::get_devices()`, and whether the context is one of the device's own.
    Number(usize, bool),
    /// Those of a queue.
    Queue(Found, usize),
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(number, own) => f.debug_tuple("Number").field(number).field(own).finish(),
            Self::Queue(_, number) => f.debug_tuple("Queue").field(number).finish(),
        }
    }
}

impl OneApiConfig {
    /// Configures the device of this number in `sycl::device::get_devices()`, with its own memory and the default context of its
    /// platform, which is that of the queues of most programs.
    pub fn new(number: usize) -> Self {
        Self {
            source: Source::Number(number, false),
            memory: OneApiMemory::default(),
            id: None,
        }
    }

    /// Configures the device and the context of a program's queue (`sycl::queue*`), which becomes the device's default queue. The
    /// device keeps a copy of the queue, as C++ copies it; its asynchronous errors stay the program's to handle.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](arrow_device::Error::InvalidArgument) if the queue is not in order, and
    /// [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) if SYCL is missing, or does not list the queue's
    /// device (a sub-device).
    ///
    /// # Safety
    /// `queue` points to a live `sycl::queue` of the major version of SYCL's library with which this crate was compiled.
    pub unsafe fn from_queue(queue: *const c_void) -> Result<Self> {
        let id = DeviceId::new(ArrowDeviceType::ONEAPI, 0);
        let sycl = Sycl::get(id)?;
        let absent = |failed: sys::Failed| failed.absent(id);
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        unsafe { check_queue(sycl, id, queue) }?;
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let (device, number) = unsafe { sycl.device_of(queue) }.map_err(absent)?;
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let context = unsafe { sycl.context_of(queue) }.map_err(absent)?;
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let queue = unsafe { sycl.adopt(queue) }.map_err(absent)?;
        let found = Found {
            device: Arc::new(device),
            context: Arc::new(context),
            queue: Arc::new(queue),
        };
        Ok(Self {
            source: Source::Queue(found, number),
            memory: OneApiMemory::default(),
            id: None,
        })
    }

    /// Sets which memory the device allocates.
    #[must_use]
    pub fn with_memory(mut self, memory: OneApiMemory) -> Self {
        self.memory = memory;
        self
    }

    /// Opens the device in a new context, whose memory and events programs cannot use in others. Has no effect on the device of a
    /// queue.
    #[must_use]
    pub fn with_own_context(mut self) -> Self {
        if let Source::Number(_, own) = &mut self.source {
            *own = true;
        }
        self
    }

    /// Sets the device id that arrays carry, instead of the device's number: for a second device of the same number, with other
    /// memory for example, in one set of devices. Other libraries know no such device.
    #[must_use]
    pub fn with_id(mut self, id: i64) -> Self {
        self.id = Some(id);
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) with the reason if the crate was built
    /// without SYCL, its library is missing, or there is no such device or none with such memory.
    pub fn open(&self) -> Result<Device> {
        let (Source::Number(number, _) | Source::Queue(_, number)) = &self.source;
        let id = DeviceId::new(ArrowDeviceType::ONEAPI, self.id.unwrap_or(*number as i64));
        let sycl = Sycl::get(id)?;
        let found = match &self.source {
            Source::Queue(found, _) => found.clone(),
            Source::Number(number, own) => find(sycl, id, *number, *own)?,
        };
        Device::new(Arc::new(OneApiDevice::new(sycl, id, self.memory, found)?))
    }
}

/// Finds a device by its number.
fn find(sycl: &'static Sycl, id: DeviceId, number: usize, own: bool) -> Result<Found> {
    let absent = |failed: sys::Failed| failed.absent(id);
    let count = sycl.device_count().map_err(absent)?;
    if number >= count {
        let reason = match count {
            0 => "there is no SYCL device".into(),
            1 => "there is one SYCL device, 0".into(),
            n => format!("there are {n} SYCL devices, 0 to {}", n - 1),
        };
        return Err(sys::absent(id, reason));
    }
    let device = sycl.device(number).map_err(absent)?;
    let context = device.context(own).map_err(absent)?;
    let queue = context.queue(&device).map_err(absent)?;
    Ok(Found {
        device: Arc::new(device),
        context: Arc::new(context),
        queue: Arc::new(queue),
    })
}
