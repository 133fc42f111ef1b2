//! WebGPU devices for tests, and work that ends when a test says so.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Once;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use arrow_device::{Device, Devices, Error, ImportOptions, Queue};
use arrow_device_conformance::Hold;
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, adopt, wgpu};

use crate::stream_suite::Rig;

/// Whether a missing adapter is an error: in CI.
pub(crate) fn is_required() -> bool {
    std::env::var_os("ARROW_DEVICE_WEBGPU_REQUIRED").is_some_and(|value| value != "0")
}

/// Ends the process if its tests hang.
fn limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(600));
            eprintln!("the tests have hung: ten minutes are over");
            std::process::abort();
        });
    });
}

/// A configuration with an id that no other device of this process has.
pub(crate) fn config() -> WgpuConfig {
    static ID: AtomicI64 = AtomicI64::new(0);
    WgpuConfig::new().with_id(ID.fetch_add(1, Ordering::Relaxed))
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
    let instance =
        wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
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
    Some(adopt(&device, &queue, &config()).unwrap())
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
    let (memory, events) = WgpuDevice::of(device).unwrap().in_use();
    let clean = memory == 0 && events == 0;
    (!clean).then(|| format!("{device}: {memory} allocations, {events} events"))
}

/// Returns whether `done` becomes true within ten seconds.
pub(crate) fn soon(mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(10) {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// Waits until a device has given everything back, which a thread of its own does.
#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert!(soon(|| unclean(device).is_none()), "{:?}", unclean(device));
}

/// Keeps a device busy.
pub(crate) fn hold(queue: &Queue) -> Hold {
    let device = queue.device().clone();
    let set = move |is_held| WgpuDevice::of(&device).unwrap().hold(is_held);
    set(true);
    Hold::new(move || set(false))
}

/// Asserts an error that says this.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T, Error>, text: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
}

/// For the suite of streams: the best adapter, if there is any.
pub(crate) fn rigs() -> Vec<Rig> {
    let Some(device) = try_open() else {
        return Vec::new();
    };
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let (subject, nth) = (device.clone(), Rc::new(Cell::new(0)));
    let asked = nth.clone();
    vec![Rig {
        device,
        options: ImportOptions::default().with_devices(devices),
        unclean: Box::new(move || unclean(&subject)),
        // wgpu cannot be told to fail at its nth call (`failures.rs` has what can be made to fail), and the suite wants to see a few
        // failures.
        fail_nth: Box::new(move |n| nth.set(n)),
        failed: Box::new(move || asked.get() <= 5),
    }]
}
