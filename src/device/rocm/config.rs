//! How a ROCm device is opened.

use std::sync::Arc;

#[cfg(doc)]
use super::RocmDevice;
use crate::abi::ArrowDeviceType;
use crate::device::Device;
use crate::device::gpu::Memory;
use crate::error::Result;

/// Which memory a [`RocmDevice`] allocates. The specification has no device type for managed memory
/// of ROCm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum RocmMemory {
    /// The device's own memory (ARROW_DEVICE_ROCM).
    #[default]
    Device,
    /// Page-locked host memory (ARROW_DEVICE_ROCM_HOST).
    Host,
}

impl RocmMemory {
    /// Returns the device type of arrays in such memory.
    pub fn device_type(self) -> ArrowDeviceType {
        match self {
            Self::Device => ArrowDeviceType::ROCM,
            Self::Host => ArrowDeviceType::ROCM_HOST,
        }
    }

    pub(super) fn kind(self) -> Memory {
        match self {
            Self::Device => Memory::Device,
            Self::Host => Memory::Host,
        }
    }
}

/// How a ROCm device is opened. [`Devices::open`](crate::Devices::open)`("rocm:0")` uses the
/// defaults.
///
/// ```no_run
/// use arrow_device::rocm::{RocmConfig, RocmMemory};
/// let device = RocmConfig::new(0).with_memory(RocmMemory::Host).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RocmConfig {
    pub(super) ordinal: usize,
    pub(super) memory: RocmMemory,
}

impl RocmConfig {
    /// Configures the device of this number, with the device's own memory.
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            memory: RocmMemory::default(),
        }
    }

    /// Sets which memory the device allocates.
    #[must_use]
    pub fn with_memory(mut self, memory: RocmMemory) -> Self {
        self.memory = memory;
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](crate::Error::DeviceNotAvailable) with the reason if
    /// there is no HIP runtime or no such device, and otherwise
    /// [`Error::Device`](crate::Error::Device) with the runtime's error.
    pub fn open(&self) -> Result<Device> {
        Device::new(Arc::new(super::open(self)?))
    }
}
