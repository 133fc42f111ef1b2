//! Errors of calls of Vulkan.

use arrow_device::Error;
use arrow_device::device::{DeviceId, device_error};
use ash::prelude::VkResult;
use ash::vk;

/// A call that has failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failed {
    pub(crate) call: &'static str,
    pub(crate) code: vk::Result,
}

pub(crate) type Answer<T> = Result<T, Failed>;

/// Names the call of an answer.
pub(crate) trait Of<T> {
    fn of(self, call: &'static str) -> Answer<T>;
}

impl<T> Of<T> for VkResult<T> {
    fn of(self, call: &'static str) -> Answer<T> {
        self.map_err(|code| Failed { call, code })
    }
}

impl Failed {
    /// Returns the code's name, such as `VK_ERROR_DEVICE_LOST`.
    pub(crate) fn name(self) -> String {
        match format!("{:?}", self.code) {
            number if number.parse::<i32>().is_ok() => {
                "a code that this crate does not know".to_owned()
            }
            name => format!("VK_{name}"),
        }
    }

    pub(crate) fn is_out_of_memory(self) -> bool {
        matches!(
            self.code,
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
                | vk::Result::ERROR_OUT_OF_HOST_MEMORY
                | vk::Result::ERROR_OUT_OF_POOL_MEMORY
                | vk::Result::ERROR_TOO_MANY_OBJECTS
        )
    }

    /// Returns whether the device executes nothing any more.
    pub(crate) fn is_lost(self) -> bool {
        self.code == vk::Result::ERROR_DEVICE_LOST
    }

    pub(crate) fn error(self, device: DeviceId) -> Error {
        device_error(device, self.call, self.code.as_raw(), self.name())
    }
}

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

/// Returns [`Error::DeviceNotAvailable`] because a call has failed.
pub(crate) fn absent_after(device: DeviceId, failed: Failed) -> Error {
    let (call, name, code) = (failed.call, failed.name(), failed.code.as_raw());
    absent(device, format!("{call} failed: {name} (code {code})"))
}
