//! How [`Devices`] find WebGPU devices.

use arrow_device::device::DeviceId;
use arrow_device::{ArrowDeviceType, Devices};

use crate::config::{WgpuConfig, absent};

/// Registers WebGPU with a set of devices: `Devices::open("webgpu:0")` opens adapter 0 with the defaults of
/// [`WgpuConfig`], at its first use.
///
/// Adapters are numbered in the order of `wgpu::Instance::enumerate_adapters`: by backend (Vulkan, then Metal, then Direct3D 12), and then
/// as the driver lists them. A program that chose its own `wgpu::Device` adds the device of [`adopt`](crate::adopt) instead
/// ([`Devices::add`]).
///
/// ```no_run
/// use arrow_device::Devices;
/// arrow_device_wgpu::register(Devices::global());
/// let device = Devices::open("webgpu:0")?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn register(devices: &Devices) {
    devices.register(ArrowDeviceType::WEBGPU, |number| {
        match usize::try_from(number) {
            Ok(ordinal) => WgpuConfig::new().with_adapter(ordinal).open(),
            Err(_) => {
                let id = DeviceId::new(ArrowDeviceType::WEBGPU, number);
                Err(absent(id, "WebGPU adapters are numbered from 0"))
            }
        }
    });
}
