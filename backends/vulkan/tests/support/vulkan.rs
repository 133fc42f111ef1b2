//! Vulkan devices for tests, and a program's own calls of Vulkan.
#![allow(dead_code)] // tests that include it use what they need

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use arrow_device::device::EventPtr;
use arrow_device::{Device, Error, Queue};
use arrow_device_conformance::Hold;
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanConfig, VulkanDevice, VulkanQueue, devices};

/// Whether a missing driver is an error: in CI.
pub(crate) fn is_required() -> bool {
    std::env::var_os("ARROW_DEVICE_VULKAN_REQUIRED").is_some_and(|value| value != "0")
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

/// Returns whether there is a device. Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn is_there() -> bool {
    limit();
    let lacks = match devices() {
        Ok(found) => found.first().and_then(|first| {
            let lacks = first.lacks?;
            Some(format!("{first} lacks {lacks}"))
        }),
        Err(e) => Some(e.to_string()),
    };
    let Some(reason) = lacks else { return true };
    assert!(!is_required(), "{reason}");
    eprintln!("skipped: {reason}");
    false
}

/// The first device, with an id that no other device of this process has.
#[track_caller]
pub(crate) fn open() -> Device {
    VulkanConfig::new(0).with_id(next_id()).open().unwrap()
}

pub(crate) fn next_id() -> i64 {
    static ID: AtomicI64 = AtomicI64::new(0);
    ID.fetch_add(1, Ordering::Relaxed)
}

/// Returns what of a device is in use, if anything is.
pub(crate) fn unclean(device: &Device) -> Option<String> {
    device.trim();
    let (memory, events, host) = VulkanDevice::of(device).unwrap().in_use();
    let clean = memory == 0 && events == 0 && host == 0;
    (!clean).then(|| {
        format!("{device}: {memory} buffers, {events} events, {host} pieces of host memory")
    })
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

/// A VkEvent of a program's, at an address of its own.
pub(crate) struct Gate {
    device: Device,
    event: Box<vk::Event>,
}

impl Gate {
    pub(crate) fn new(device: &Device) -> Arc<Self> {
        let functions = VulkanDevice::of(device).unwrap().device();
        // SAFETY: the device is live.
        let event = unsafe { functions.create_event(&vk::EventCreateInfo::default(), None) };
        Arc::new(Self {
            device: device.clone(),
            event: Box::new(event.unwrap()),
        })
    }

    /// The value of `sync_event`, valid as long as this lives.
    pub(crate) fn pointer(&self) -> EventPtr {
        EventPtr::new((&raw const *self.event).cast_mut().cast()).unwrap()
    }

    pub(crate) fn set(&self) {
        let functions = VulkanDevice::of(&self.device).unwrap().device();
        // SAFETY: the event is live, not for the device only, and nobody sets or resets it at the same time.
        unsafe { functions.set_event(*self.event) }.unwrap();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let functions = VulkanDevice::of(&self.device).unwrap().device();
        // SAFETY: the event is destroyed once. No commands use it, and queues that were told to wait for it have seen it set.
        unsafe { functions.destroy_event(*self.event, None) };
    }
}

/// Keeps a queue back on the host, by an event of a program that is pending.
pub(crate) fn hold_back(queue: &Queue) -> Hold {
    let gate = Gate::new(queue.device());
    // SAFETY: the event is of the device, and lives until the queue's work has run.
    unsafe { queue.raw().wait(gate.pointer()) }.unwrap();
    let queue = queue.clone();
    Hold::new(move || {
        gate.set();
        // The event lives until the queue has seen it.
        std::thread::spawn(move || {
            let (_, _) = VulkanQueue::of(&queue).unwrap().submitted().unwrap();
            drop(gate);
        });
    })
}

/// A timeline semaphore of a program's.
pub(crate) struct Timeline {
    device: Device,
    pub(crate) semaphore: vk::Semaphore,
}

impl Timeline {
    pub(crate) fn new(device: &Device) -> Arc<Self> {
        let functions = VulkanDevice::of(device).unwrap().device();
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let create = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device is live, with timeline semaphores enabled.
        let semaphore = unsafe { functions.create_semaphore(&create, None) };
        Arc::new(Self {
            device: device.clone(),
            semaphore: semaphore.unwrap(),
        })
    }

    pub(crate) fn signal(&self, value: u64) {
        let functions = VulkanDevice::of(&self.device).unwrap().device();
        let signal = vk::SemaphoreSignalInfo::default()
            .semaphore(self.semaphore)
            .value(value);
        // SAFETY: the semaphore is live and has a smaller value.
        unsafe { functions.signal_semaphore(&signal) }.unwrap();
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        let functions = VulkanDevice::of(&self.device).unwrap().device();
        // SAFETY: the semaphore is destroyed once, after the work that waits for it.
        unsafe { functions.destroy_semaphore(self.semaphore, None) };
    }
}

/// Keeps the device busy, by a submission that waits for the host.
pub(crate) fn hold_on_device(queue: &Queue) -> Hold {
    let timeline = Timeline::new(queue.device());
    let raw = VulkanQueue::of(queue).unwrap();
    // SAFETY: the semaphore is of the device, lives until the queue's work has run, and the host signals it.
    unsafe { raw.wait_semaphore(timeline.semaphore, 1) };
    // Submits the wait.
    raw.submitted().unwrap();
    let queue = queue.clone();
    Hold::new(move || {
        timeline.signal(1);
        std::thread::spawn(move || {
            finish_uncounted(&queue);
            drop(timeline);
        });
    })
}

/// Waits for the work of a queue, without a call that the device counts.
fn finish_uncounted(queue: &Queue) {
    let device = VulkanDevice::of(queue.device()).unwrap().device();
    let (semaphore, value) = VulkanQueue::of(queue).unwrap().submitted().unwrap();
    let (semaphores, values) = ([semaphore], [value]);
    let wait = vk::SemaphoreWaitInfo::default()
        .semaphores(&semaphores)
        .values(&values);
    // SAFETY: the semaphore is the queue's, which is live.
    unsafe { device.wait_semaphores(&wait, u64::MAX) }.unwrap();
}

/// Asserts an error that says this.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T, Error>, text: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
}
