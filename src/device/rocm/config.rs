//! How a ROCm device is opened.

use std::sync::Arc;

#[cfg(doc)]
use super::RocmDevice;
use crate::abi::ArrowDeviceType;
use crate::device::Device;
use crate::device::gpu::{Memory, PAGE_LOCKED_LIMIT};
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
    pub(super) page_locked_limit: usize,
    pub(super) blocking_waits: bool,
}

impl RocmConfig {
    /// Configures the device of this number, with the device's own memory.
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            memory: RocmMemory::default(),
            page_locked_limit: PAGE_LOCKED_LIMIT,
            blocking_waits: false,
        }
    }

    /// Sets which memory the device allocates.
    #[must_use]
    pub fn with_memory(mut self, memory: RocmMemory) -> Self {
        self.memory = memory;
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
    /// [`Device::synchronize`] waits as the device's flags in HIP say (`hipSetDeviceFlags`).
    #[must_use]
    pub fn with_blocking_waits(mut self, blocking: bool) -> Self {
        self.blocking_waits = blocking;
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
