//! How a oneAPI device is opened.

use std::ffi::c_void;
use std::sync::Arc;

#[cfg(doc)]
use arrow_device::Error;
use arrow_device::device::DeviceId;
use arrow_device::device::engine::Engine;
use arrow_device::{ArrowDeviceType, Device, Result};

use crate::handles::{OneApiDevice, OneApiQueue};
use crate::sys::{Found, OneApiMemory, Owned, Sycl, absent, absent_after, raw};

/// How much freed memory a device keeps for its next use.
const IDLE_BYTES: usize = 256 << 20;

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

#[derive(Clone, Debug)]
enum Source {
    /// A number in `sycl::device::get_devices()`, and whether the context is one of the device's own.
    Number(usize, bool),
    /// A program's queue, and the number of its device.
    Queue(Arc<OneApiQueue>, usize),
}

impl OneApiConfig {
    /// Configures the device of this number in `sycl::device::get_devices()`, with its own memory and the default context of its
    /// platform, which is that of the queues of most programs.
    pub fn new(number: usize) -> Self {
        Self::of(Source::Number(number, false))
    }

    fn of(source: Source) -> Self {
        Self {
            source,
            memory: OneApiMemory::default(),
            id: None,
        }
    }

    /// Configures the device and the context of a program's queue (`sycl::queue*`), which becomes the device's default queue. The
    /// device keeps a copy of the queue, as C++ copies it; its asynchronous errors stay the program's to handle.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the queue is null or not in order, and [`Error::DeviceNotAvailable`] if SYCL is missing, or
    /// does not list the queue's device (a sub-device).
    ///
    /// # Safety
    /// `queue` is null, or points to a live `sycl::queue` of the major version of SYCL's library with which this crate was compiled.
    pub unsafe fn adopt(queue: *const c_void) -> Result<Self> {
        let id = DeviceId::new(ArrowDeviceType::ONEAPI, 0);
        // SAFETY: the caller guarantees a live queue, or null (see `# Safety`).
        let ((_, properties), queue) = unsafe { adopt(Sycl::get(id)?, id, queue) }?;
        let queue = Arc::new(OneApiQueue(queue));
        Ok(Self::of(Source::Queue(queue, properties.index)))
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
    /// Returns [`Error::DeviceNotAvailable`] with the reason if the crate was built without SYCL, its library is missing, or there is no
    /// such device or none with such memory.
    pub fn open(&self) -> Result<Device> {
        let (device, stream, idle_bytes) = self.clone().parts()?;
        // SAFETY: the stream was made of this device.
        unsafe { Engine::open(device, stream, idle_bytes) }
    }

    /// Returns what [`open`](Self::open) makes a device of: the runtime, the stream of its default queue, and how many bytes of freed memory it
    /// keeps.
    #[doc(hidden)]
    pub fn parts(self) -> Result<(OneApiDevice, Arc<OneApiQueue>, usize)> {
        let (Source::Number(number, _) | Source::Queue(_, number)) = &self.source;
        let id = DeviceId::new(ArrowDeviceType::ONEAPI, self.id.unwrap_or(*number as i64));
        let sycl = Sycl::get(id)?;
        let (found, queue) = match &self.source {
            // SAFETY: the queue is live, as long as `self` is.
            Source::Queue(queue, _) => unsafe { adopt(sycl, id, queue.sycl_queue()) }?,
            Source::Number(number, own) => {
                let absent = |e| absent_after(id, e);
                check_number(sycl, id, *number)?;
                let found = sycl.device(*number, *own).map_err(absent)?;
                let queue = found.0.queue().map_err(absent)?;
                (found, queue)
            }
        };
        let device = OneApiDevice::new(sycl, id, self.memory, found)?;
        Ok((device, Arc::new(OneApiQueue(queue)), IDLE_BYTES))
    }
}

/// Takes a copy of a queue, with its device and context.
///
/// # Safety
/// `queue` is null, or points to a live `sycl::queue`.
unsafe fn adopt(
    sycl: Sycl,
    id: DeviceId,
    queue: *const c_void,
) -> Result<(Found, Owned<raw::Queue>)> {
    // SAFETY: the caller guarantees a live queue (see `# Safety`).
    let found = unsafe { sycl.device_of(queue) }.map_err(|e| absent_after(id, e))?;
    // SAFETY: the caller guarantees that the queue is null or live (see `# Safety`).
    let queue = unsafe { found.0.adopt(queue) }.map_err(|e| absent_after(id, e))?;
    Ok((found, queue))
}

fn check_number(sycl: Sycl, id: DeviceId, number: usize) -> Result<()> {
    let count = sycl.device_count().map_err(|e| absent_after(id, e))?;
    let reason = match count {
        _ if number < count => return Ok(()),
        0 => "there is no SYCL device".into(),
        1 => "there is one SYCL device, 0".into(),
        n => format!("there are {n} SYCL devices, 0 to {}", n - 1),
    };
    Err(absent(id, reason))
}
