//! WebGPU devices for tests, and work that ends when a test says so.

use arrow_device::Device;
use arrow_device::device::engine::Engine;
use arrow_device_conformance::{assert_balanced, found, next_id};
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, wgpu};

pub(crate) use crate::hold::hold;
use crate::hold::open_below;

const REQUIRED: &str = "ARROW_DEVICE_WEBGPU_REQUIRED";

pub(crate) fn config() -> WgpuConfig {
    WgpuConfig::best().with_id(next_id())
}

/// Opens the best adapter. Says why a test is skipped where there is none, or fails if it must not be.
#[track_caller]
pub(crate) fn try_open() -> Option<Device> {
    found(config().open(), REQUIRED)
}

pub(crate) fn open() -> Device {
    try_open().unwrap()
}

pub(crate) fn is_there() -> bool {
    try_open().is_some()
}

/// A `wgpu::Device` of the program's own, with the adapter's limits, except those that `lower` changes.
#[track_caller]
pub(crate) fn own_device(
    lower: impl FnOnce(&mut wgpu::Limits),
) -> Option<(wgpu::Device, wgpu::Queue)> {
    try_open()?;
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.backends = wgpu::Backends::PRIMARY.with_env();
    let instance = wgpu::Instance::new(descriptor);
    let adapter = now(instance.request_adapter(&Default::default())).unwrap();
    let mut required_limits = adapter.limits();
    lower(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor {
        required_limits,
        ..Default::default()
    };
    Some(open_below(&adapter, &descriptor))
}

/// Opens a device over a `wgpu::Device` with such limits.
#[track_caller]
pub(crate) fn open_with(lower: impl FnOnce(&mut wgpu::Limits)) -> Option<Device> {
    let (device, queue) = own_device(lower)?;
    Some(config().adopt(&device, &queue).unwrap())
}

pub(crate) fn with_limits(lower: impl FnOnce(&mut wgpu::Limits)) -> Device {
    open_with(lower).unwrap()
}

/// Runs a future of wgpu, all of which are ready.
pub(crate) fn now<T>(future: impl Future<Output = T>) -> T {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut cx) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("a future of wgpu is pending"),
    }
}

pub(crate) fn in_use(device: &Device) -> (usize, usize, usize) {
    Engine::<WgpuDevice>::of(device).unwrap().in_use()
}

#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert_balanced::<WgpuDevice>(device);
}
