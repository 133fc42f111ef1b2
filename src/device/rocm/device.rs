//! One device: how it is found.

use std::ffi::c_int;
use std::fmt;

use hip_runtime_sys::hipDeviceAttribute_t;

use super::library::Hip;
use crate::device::DeviceId;
use crate::device::gpu::{Library, absent, find};
use crate::error::Result;

/// A device.
pub(super) struct Rocm {
    pub(super) hip: &'static Hip,
    /// The device's number in the runtime.
    pub(super) ordinal: c_int,
    /// The runtime's version.
    pub(super) version: c_int,
}

impl Rocm {
    pub(super) fn new(id: DeviceId) -> Result<Self> {
        let (hip, ordinal) = find::<Hip>(id)?;
        let version = hip.quietly(|| hip.api().version());
        let version =
            version.ok_or_else(|| absent(id, "the HIP runtime does not say its version"))?;
        Ok(Self {
            hip,
            ordinal,
            version,
        })
    }

    /// Whether a device attribute is set. The runtime may not know it: then it is not. The
    /// attributes that this crate asks for have the same numbers from HIP 5.2 to 7.14.
    pub(super) fn has(&self, attribute: hipDeviceAttribute_t) -> bool {
        let mut value = 0;
        let ask = self.hip.hipDeviceGetAttribute.function;
        // SAFETY: `value` is valid for the write of an int.
        let ask = || unsafe { ask(&raw mut value, attribute as c_int, self.ordinal) };
        self.hip.quietly(ask) == 0 && value != 0
    }
}

impl fmt::Debug for Rocm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HIP device {}", self.ordinal)
    }
}
