//! How [`Devices`] find Vulkan devices.

use arrow_device::{ArrowDeviceType, Devices};

use crate::codes::absent;
use crate::config::VulkanConfig;

/// Registers Vulkan with a set of devices: `Devices::open("vulkan:0")` opens the first physical device, with the defaults of
/// [`VulkanConfig`], at its first use.
///
/// Memory and events belong to a VkDevice, which an id does not name. An import uses the device that the set has for the id: add the
/// one of [`VulkanConfig::adopt`] with [`Devices::add`] before the id is used for another.
///
/// ```no_run
/// use arrow_device::Devices;
/// arrow_device_vulkan::register(Devices::global());
/// let device = Devices::open("vulkan:0")?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn register(devices: &Devices) {
    devices.register(ArrowDeviceType::VULKAN, |number| {
        match usize::try_from(number) {
            Ok(number) => VulkanConfig::new(number).open(),
            Err(_) => {
                let id = VulkanConfig::new(0).with_id(number).id();
                Err(absent(id, "Vulkan devices are numbered from 0"))
            }
        }
    });
}
