//! One device: how it is found.

use std::ffi::c_int;
use std::fmt;

use hip_runtime_sys::hipDeviceAttribute_t;

use super::library::Hip;
use crate::device::DeviceId;
use crate::device::gpu::{Library, Memory, absent, find};
use crate::error::Result;

/// A device.
pub(super) struct Rocm {
    pub(super) hip: &'static Hip,
    /// The device's number in the runtime.
    pub(super) ordinal: c_int,
    /// The runtime's version.
    pub(super) version: c_int,
    /// Whether threads that wait sleep.
    pub(super) blocking_waits: bool,
}

impl Rocm {
    pub(super) fn new(id: DeviceId, memory: Memory, blocking_waits: bool) -> Result<Self> {
        let (hip, ordinal) = find::<Hip>(id)?;
        let version = hip.quietly(|| hip.api().version());
        let version =
            version.ok_or_else(|| absent(id, "the HIP runtime does not say its version"))?;
        if memory == Memory::Host && hip.api().launch_host.is_none() {
            return Err(absent(
                id,
                "the HIP runtime has neither hipLaunchHostFunc nor hipStreamAddCallback, one of \
                 which copies between page-locked memory need; update ROCm",
            ));
        }
        Ok(Self {
            hip,
            ordinal,
            version,
            blocking_waits,
        })
    }

    /// Whether a device attribute is set. The runtime may not know it: then it is not. The
    /// attributes that this crate asks for have the same numbers from HIP 5.2 to 7.14.
    pub(super) fn has(&self, attribute: hipDeviceAttribute_t) -> bool {
        let mut value = 0;
        let ask = self.hip.hipDeviceGetAttribute.function;
        // SAFETY: `value` is valid for the write of an int.
        let ask = || unsafe { ask(&raw mut value, attribute, self.ordinal) };
        self.hip.quietly(ask) == 0 && value != 0
    }
}

impl fmt::Debug for Rocm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HIP device {}", self.ordinal)
    }
}
