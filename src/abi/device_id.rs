//! [`DeviceId`].

use std::fmt;

use crate::abi::ArrowDeviceType;

/// The type and id of a device, as in `ArrowDeviceArray`.
///
/// It is printed as `cpu`, `cuda:0` or `ext-dev:3`, and parsed from the same names. `sim:3` means `ext-dev:3`; a missing id
/// means 0, or -1 for `cpu`.
///
/// ```
/// use arrow_device::{ArrowDeviceType, DeviceId};
/// let id: DeviceId = "cuda:1".parse()?;
/// assert_eq!(id, DeviceId::new(ArrowDeviceType::CUDA, 1));
/// assert_eq!(id.to_string(), "cuda:1");
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
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

    /// Combines a type and an id.
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
