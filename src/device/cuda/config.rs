//! How a CUDA device is opened.

use std::sync::Arc;

use cudarc::driver::CudaContext;

#[cfg(doc)]
use super::CudaDevice;
use crate::abi::ArrowDeviceType;
use crate::device::Device;
use crate::device::gpu::Memory;
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
}

impl CudaConfig {
    /// Configures the device of this number, with the device's own memory and its primary context.
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            memory: CudaMemory::default(),
            context: None,
        }
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
