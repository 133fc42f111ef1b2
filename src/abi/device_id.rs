//! Which device: type and id.

use std::fmt;

use crate::abi::ArrowDeviceType;

/// A device's type and id, the pair that stands in `ArrowDeviceArray`.
///
/// Displays as `cpu`, `cuda:0`, `ext-dev:3`, and parses from the same names (`sim:3` means
/// `ext-dev:3`; a missing id means 0, and -1 for `cpu`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceId {
    /// The kind of device.
    pub device_type: ArrowDeviceType,
    /// Which one of its kind. -1 for the CPU.
    pub id: i64,
}

impl DeviceId {
    /// The CPU, with the id -1 that the specification recommends.
    pub const CPU: Self = Self {
        device_type: ArrowDeviceType::CPU,
        id: -1,
    };

    /// A pair of type and id.
    pub const fn new(device_type: ArrowDeviceType, id: i64) -> Self {
        Self { device_type, id }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device_type.short_name() {
            Some("cpu") => f.write_str("cpu"),
            Some(name) => write!(f, "{name}:{}", self.id),
            None => write!(f, "{}:{}", self.device_type, self.id),
        }
    }
}
