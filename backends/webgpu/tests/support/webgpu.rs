//! WebGPU devices for tests, and work that ends when a test says so.
#![allow(dead_code)] // tests that include it use what they need

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use arrow_device::{Device, Error, Queue};
use arrow_device_conformance::Hold;
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, adopt, wgpu};
use ash::vk;
use wgpu::hal::api::Vulkan;

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

/// A `wgpu::Device` of the program's own, with the adapter's limits but for those that `lower` changes.
#[track_caller]
pub(crate) fn own_device(lower: impl FnOnce(&mut wgpu::Limits)) -> Option<(wgpu::Device, wgpu::Queue)> {
    limit();
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
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

/// A semaphore of Vulkan that the work of a `wgpu::Queue` waits for.
struct Gate {
    device: wgpu::Device,
    semaphore: vk::Semaphore,
}

impl Gate {
    /// Makes what is submitted from now on wait.
    fn new(device: &wgpu::Device) -> Arc<Self> {
        // SAFETY: what is made here is destroyed with the gate, after the work that waits for it; nothing of wgpu's is destroyed.
        // The tests submit nothing else meanwhile, so that the queue is not used at the same time.
        unsafe {
            let hal = device.as_hal::<Vulkan>().expect("a device of Vulkan");
            let raw = hal.raw_device();
            let mut timeline =
                vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
            let info = vk::SemaphoreCreateInfo::default().push_next(&mut timeline);
            let semaphore = raw.create_semaphore(&info, None).unwrap();
            let (semaphores, values) = ([semaphore], [1]);
            let mut values = vk::TimelineSemaphoreSubmitInfo::default().wait_semaphore_values(&values);
            let submit = vk::SubmitInfo::default()
                .wait_semaphores(&semaphores)
                .wait_dst_stage_mask(&[vk::PipelineStageFlags::ALL_COMMANDS])
                .push_next(&mut values);
            raw.queue_submit(hal.raw_queue(), &[submit], vk::Fence::null()).unwrap();
            drop(hal);
            Arc::new(Self {
                device: device.clone(),
                semaphore,
            })
        }
    }

    fn open(&self) {
        // SAFETY: the semaphore is live.
        unsafe {
            let hal = self.device.as_hal::<Vulkan>().expect("a device of Vulkan");
            let info = vk::SemaphoreSignalInfo::default().semaphore(self.semaphore).value(1);
            hal.raw_device().signal_semaphore(&info).unwrap();
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.device.poll(wgpu::PollType::wait_indefinitely());
        // SAFETY: all work has ended, and this is the only owner.
        unsafe {
            let hal = self.device.as_hal::<Vulkan>().expect("a device of Vulkan");
            let raw = hal.raw_device();
            raw.queue_wait_idle(hal.raw_queue()).unwrap();
            raw.destroy_semaphore(self.semaphore, None);
        }
    }
}

/// Keeps a device busy.
pub(crate) fn hold_device(device: &wgpu::Device) -> Hold {
    let gate = Gate::new(device);
    Hold::new(move || gate.open())
}

/// Keeps a queue busy.
pub(crate) fn hold(queue: &Queue) -> Hold {
    hold_device(WgpuDevice::of(queue.device()).unwrap().device())
}

/// Asserts an error that says this.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T, Error>, text: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
}
