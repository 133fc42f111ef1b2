//! How a CUDA device is opened.

use std::sync::Arc;

use cudarc::driver::CudaContext;

#[cfg(doc)]
use super::CudaDevice;
use crate::abi::ArrowDeviceType;
use crate::device::Device;
use crate::device::gpu::{Memory, PAGE_LOCKED_LIMIT};
use crate::error::Result;

/// Which memory a [`CudaDevice`] allocates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum CudaMemory {
    /// The device's own memory (ARROW_DEVICE_CUDA).
    #[default]
    Device,
    /// Page-locked host memory (ARROW_DEVICE_CUDA_HOST).
    Host,
    /// Managed memory (ARROW_DEVICE_CUDA_MANAGED).
    Managed,
}

impl CudaMemory {
    /// Returns the device type of arrays in such memory.
    pub fn device_type(self) -> ArrowDeviceType {
        match self {
            Self::Device => ArrowDeviceType::CUDA,
            Self::Host => ArrowDeviceType::CUDA_HOST,
            Self::Managed => ArrowDeviceType::CUDA_MANAGED,
        }
    }

    pub(super) fn kind(self) -> Memory {
        match self {
            Self::Device => Memory::Device,
            Self::Host => Memory::Host,
            Self::Managed => Memory::Managed,
        }
    }
}

/// How a CUDA device is opened. [`Devices::open`](crate::Devices::open)`("cuda:0")` uses the
/// defaults.
///
/// ```no_run
/// use arrow_device::cuda::{CudaConfig, CudaMemory};
/// let device = CudaConfig::new(0).with_memory(CudaMemory::Managed).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CudaConfig {
    pub(super) ordinal: usize,
    pub(super) memory: CudaMemory,
    pub(super) context: Option<Arc<CudaContext>>,
    pub(super) page_locked_limit: usize,
    pub(super) blocking_waits: bool,
}

impl CudaConfig {
    /// Configures the device of this number, with the device's own memory and its primary context.
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            memory: CudaMemory::default(),
            context: None,
            page_locked_limit: PAGE_LOCKED_LIMIT,
            blocking_waits: false,
        }
    }

    /// Configures the device of a cudarc context, in that context.
    pub fn from_context(context: Arc<CudaContext>) -> Self {
        Self::new(context.ordinal()).with_context(context)
    }

    /// Sets which memory the device allocates.
    #[must_use]
    pub fn with_memory(mut self, memory: CudaMemory) -> Self {
        self.memory = memory;
        self
    }

    /// Sets another context than the device's primary one. The device keeps it alive.
    #[must_use]
    pub fn with_context(mut self, context: Arc<CudaContext>) -> Self {
        self.context = Some(context);
        self
    }

    /// Sets how many bytes of page-locked memory the device may hold for staging and downloads, 2
    /// GiB by default. Beyond that they use ordinary memory, which is slower; pieces of up to 64
    /// KiB may take 1 MiB more. Idle pieces are kept for reuse
    /// ([`Device::set_idle_slab_limit`](crate::Device::set_idle_slab_limit)).
    #[must_use]
    pub fn with_page_locked_limit(mut self, bytes: usize) -> Self {
        self.page_locked_limit = bytes;
        self
    }

    /// Sets whether a thread that waits for the device sleeps until the device wakes it, instead of
    /// asking again and again. The default is to ask, which keeps a core busy and returns sooner:
    /// most waits are short, because this crate waits for copies that are already under way.
    ///
    /// It applies to waits of the program's threads ([`SyncEvent::wait`](crate::SyncEvent::wait),
    /// downloads, host reads) and to those of this crate's own threads, which wait only after an
    /// error: otherwise they poll at intervals of up to a millisecond. Whoever waits for an event
    /// that this device exports sleeps too.
    /// [`Device::synchronize`] waits for streams of others as well, for which the driver has an
    /// event since CUDA 12.5. With an older one it waits as the context's flags say.
    #[must_use]
    pub fn with_blocking_waits(mut self, blocking: bool) -> Self {
        self.blocking_waits = blocking;
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](crate::Error::DeviceNotAvailable) with the reason if
    /// there is no driver or no such device,
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a context of another device,
    /// and otherwise [`Error::Device`](crate::Error::Device) with the driver's error.
    pub fn open(&self) -> Result<Device> {
        Device::new(Arc::new(super::open(self)?))
    }
}
