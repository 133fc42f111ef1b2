//! A device's type and id.

use std::fmt;

use crate::abi::ArrowDeviceType;

/// A device's type and id, the pair in an `ArrowDeviceArray`.
///
/// Displays as `cpu`, `cuda:0`, `cuda-host:1`, `sim`, `sim:3`, and parses from the same names. A
/// missing id means 0, or -1 for `cpu`. Extension devices ([`ArrowDeviceType::EXT_DEV`]) display as
/// `sim` and also parse from `ext-dev`.
///
/// ```
/// use arrow_device::{ArrowDeviceType, DeviceId};
/// let id: DeviceId = "cuda".parse()?;
/// assert_eq!(id, DeviceId::new(ArrowDeviceType::CUDA, 0));
/// assert_eq!(id.to_string(), "cuda:0");
/// assert_eq!(DeviceId::new(ArrowDeviceType::EXT_DEV, 0).to_string(), "sim");
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// The type of the device.
    pub device_type: ArrowDeviceType,
    /// The id among devices of its type; -1 for the CPU.
    pub id: i64,
}

impl DeviceId {
    /// The CPU, with the id -1, which the specification recommends.
    pub const CPU: Self = Self {
        device_type: ArrowDeviceType::CPU,
        id: -1,
    };

    /// Makes a pair of type and id.
    pub const fn new(device_type: ArrowDeviceType, id: i64) -> Self {
        Self { device_type, id }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device_type.short_name() {
            Some("cpu") => f.write_str("cpu"),
            Some("sim") if self.id == 0 => f.write_str("sim"),
            Some(name) => write!(f, "{name}:{}", self.id),
            None => write!(f, "{}:{}", self.device_type, self.id),
        }
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceId({self})")
    }
}
