//! Device ids from names.

use std::str::FromStr;

use crate::abi::{ArrowDeviceType, DeviceId};
use crate::error::{Error, Result};

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
            .or((name == "ext-dev").then_some(ArrowDeviceType::EXT_DEV))
            .ok_or_else(|| {
                let known: Vec<_> = ArrowDeviceType::ALL
                    .iter()
                    .filter_map(|t| t.short_name())
                    .collect();
                Error::argument(format!(
                    "unknown device '{s}': use one of {}, followed by ':' and a number if needed",
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
