//! WebGPU devices for tests, and work that ends when a test says so.

use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device::device::engine::Engine;
use arrow_device::{Device, Error, Queue};
use arrow_device_conformance::Hold;
pub(crate) use arrow_device_wgpu::register;
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, devices, wgpu};

use crate::stream_suite::Rig;
use crate::suite::{self, limit, rig};

pub(crate) const NAME: &str = "webgpu:0";

pub(crate) fn is_required() -> bool {
    suite::is_required("WEBGPU")
}

/// An id that no other device of this process has.
pub(crate) fn id() -> i64 {
    static ID: AtomicI64 = AtomicI64::new(0);
    ID.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn config() -> WgpuConfig {
    WgpuConfig::best().with_id(id())
}

/// Opens the best adapter. Says why a test is skipped where there is none, or fails if it must not be.
#[track_caller]
pub(crate) fn try_open() -> Option<Device> {
    limit();
    match config().open() {
        Ok(device) => Some(device),
        Err(e) => {
            assert!(!is_required(), "{e}");
            eprintln!("skipped: {e}");
            None
        }
    }
}

/// A `wgpu::Device` of the program's own, with the adapter's limits, except those that `lower` changes.
#[track_caller]
pub(crate) fn own_device(
    lower: impl FnOnce(&mut wgpu::Limits),
) -> Option<(wgpu::Device, wgpu::Queue)> {
    limit();
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.backends = wgpu::Backends::PRIMARY.with_env();
    let instance = wgpu::Instance::new(descriptor);
    let adapter = match now(instance.request_adapter(&wgpu::RequestAdapterOptions::default())) {
        Ok(adapter) => adapter,
        Err(e) => {
            assert!(!is_required(), "{e}");
            eprintln!("skipped: {e}");
            return None;
        }
    };
    let mut required_limits = adapter.limits();
    lower(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor {
        required_limits,
        ..Default::default()
    };
    Some(now(adapter.request_device(&descriptor)).unwrap())
}

/// Opens a device over a `wgpu::Device` with such limits.
#[track_caller]
pub(crate) fn open_with(lower: impl FnOnce(&mut wgpu::Limits)) -> Option<Device> {
    let (device, queue) = own_device(lower)?;
    Some(config().adopt(&device, &queue).unwrap())
}

/// Runs a future of wgpu, all of which are ready.
pub(crate) fn now<T>(future: impl Future<Output = T>) -> T {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut cx) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("a future of wgpu is pending"),
    }
}

/// Returns what of a device is in use, if anything is.
pub(crate) fn unclean(device: &Device) -> Option<String> {
    device.trim();
    let (memory, host, events) = in_use(device);
    let clean = memory + host + events == 0;
    (!clean).then(|| format!("{device}: {memory} allocations, {events} events"))
}

pub(crate) fn in_use(device: &Device) -> (usize, usize, usize) {
    Engine::<WgpuDevice>::of(device).unwrap().in_use()
}

/// Keeps a device busy.
pub(crate) fn hold(queue: &Queue) -> Hold {
    let device = queue.device().clone();
    let set = move |is_held| WgpuDevice::of(&device).unwrap().hold(is_held);
    set(true);
    Hold::new(move || set(false))
}

/// A device with the adapter's limits, and one whose allocations have several buffers.
pub(crate) fn all() -> Vec<Device> {
    let small = open_with(|limits| {
        limits.max_buffer_size = 4096;
        limits.max_storage_buffer_binding_size = 2048;
    });
    try_open().into_iter().chain(small).collect()
}

/// What a forked child is refused, beside the core's functions.
pub(crate) fn refused(queue: &Queue) -> Vec<Error> {
    let gpu = WgpuDevice::of(queue.device()).unwrap();
    vec![
        gpu.poll().unwrap_err(),
        config().open().unwrap_err(),
        config().adopt(gpu.device(), gpu.queue()).unwrap_err(),
        devices().unwrap_err(),
    ]
}

/// For the suite of streams. Calls of the provider fail in `conformance.rs`; `failures.rs` has what of wgpu can be made to fail.
pub(crate) fn rigs() -> Vec<Rig> {
    try_open()
        .into_iter()
        .map(|device| rig(device, None))
        .collect()
}
