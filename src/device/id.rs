//! Which device: type and id.

use std::fmt;
use std::str::FromStr;

use crate::abi::ArrowDeviceType;
use crate::error::{Error, Result};

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

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let (name, id) = match s.split_once(':') {
            Some((name, id)) => (name, Some(id)),
            None => (s, None),
        };
        let device_type = ArrowDeviceType::ALL
            .into_iter()
            .find(|t| t.short_name() == Some(name))
            .or((name == "sim").then_some(ArrowDeviceType::EXT_DEV))
            .ok_or_else(|| {
                let known: Vec<_> = ArrowDeviceType::ALL
                    .iter()
                    .filter_map(|t| t.short_name())
                    .collect();
                Error::argument(format!(
                    "unknown device '{s}': use sim or one of {}, with ':' and an id if needed",
                    known.join(", ")
                ))
            })?;
        let id = match id {
            None if device_type == ArrowDeviceType::CPU => -1,
            None => 0,
            Some(id) => id
                .parse()
                .map_err(|_| Error::argument(format!("device '{s}': '{id}' is not a number")))?,
        };
        Ok(Self { device_type, id })
    }
}
