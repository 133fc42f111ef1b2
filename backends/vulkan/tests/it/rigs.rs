//! Vulkan devices for tests, and a program's own calls of Vulkan.

use std::sync::Arc;

use arrow_device::device::{DevicePtr, EventPtr};
use arrow_device::{Device, Queue};
use arrow_device_conformance::{Foreign, Hold, assert_balanced, found, is_required, next_id};
use arrow_device_vulkan::ash::{self, vk};
use arrow_device_vulkan::{VulkanConfig, VulkanDevice, VulkanParts, VulkanQueue, devices};

use crate::timeline;

const REQUIRED: &str = "ARROW_DEVICE_VULKAN_REQUIRED";

/// Returns whether there is a device. Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn is_there() -> bool {
    let Some(all) = found(devices(), REQUIRED) else {
        return false;
    };
    let lacks = all.first().and_then(|first| first.lacks);
    assert!(lacks.is_none() || !is_required(REQUIRED), "{lacks:?}");
    lacks.is_none()
}

/// The first device, with an id that no other device of this process has.
#[track_caller]
pub(crate) fn open() -> Device {
    VulkanConfig::new(0).with_id(next_id()).open().unwrap()
}

#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert_balanced::<VulkanDevice>(device);
}

/// What holds up a queue of a device, which it keeps.
pub(crate) struct Timeline(timeline::Timeline, #[allow(dead_code)] Device);

impl Timeline {
    pub(crate) fn new(device: &Device) -> Arc<Self> {
        let vulkan = VulkanDevice::of(device).unwrap();
        // SAFETY: the device is kept, with timeline semaphores enabled, and has the family.
        let made = unsafe { timeline::Timeline::new(vulkan.device(), vulkan.queue_family()) };
        Arc::new(Self(made, device.clone()))
    }

    /// Submits commands of a program to the queue's VkQueue, behind which nothing runs before the value is 1.
    pub(crate) fn block(&self, queue: &Queue) {
        let raw = VulkanQueue::of(queue).unwrap();
        raw.submitted().unwrap();
        // SAFETY: this thread has the queue, which is of the device's family.
        let mut block = |queue| unsafe { self.0.block(queue) };
        raw.shared_queue().with(&mut block);
    }

    pub(crate) fn signal(&self, value: u64) {
        self.0.signal(value);
    }
}

/// Keeps the device busy, by a submission of a program that waits for the host.
pub(crate) fn hold(queue: &Queue) -> Hold {
    let timeline = Timeline::new(queue.device());
    timeline.block(queue);
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

/// An event of another library on the same VkDevice. Vulkan has none that fail.
pub(crate) fn foreign(device: &Device) -> Foreign {
    let ours = device.clone();
    let functions = VulkanDevice::of(&ours).unwrap().device().clone();
    // SAFETY: the device is live.
    let event = unsafe { functions.create_event(&Default::default(), None) }.unwrap();
    // Where `sync_event` points to.
    let mut place = Box::new(event);
    let pointer = EventPtr::new((&raw mut *place).cast()).unwrap();
    let (kept, set) = (functions.clone(), functions);
    let keep = Kept(Some(Box::new(move || {
        // SAFETY: the event is destroyed once, when the suite uses it no more.
        unsafe { kept.destroy_event(*place, None) };
        drop(ours);
    })));
    // SAFETY: `keep` has the event, and the place of its handle. The device lives as long.
    let made = unsafe { Foreign::new(pointer, keep, move |_| set.set_event(event).unwrap()) };
    made.never_fails()
}

/// Another library on the same VkDevice asks about an event, and then copies what is in the VkBuffer at an address. Its submissions are
/// those of a second device of this crate, which knows nothing of the first one's memory and order.
pub(crate) fn consumer(
    device: &Device,
    event: EventPtr,
    from: DevicePtr,
    bytes: usize,
) -> Box<dyn FnMut() -> Option<Vec<u8>>> {
    let ours = device.clone();
    Box::new(move || {
        let vulkan = VulkanDevice::of(&ours).unwrap();
        let queue = ours.default_queue();
        // SAFETY: what an export carries points to a VkEvent, which lives until this has read the buffer. Each part is one of the device,
        // which `keep` keeps; the VkBuffer lives until this has read it, and nobody writes to it.
        unsafe {
            let event: vk::Event = event.as_ptr().cast::<vk::Event>().read();
            if !vulkan.device().get_event_status(event).unwrap() {
                return None;
            }
            let parts = VulkanParts {
                entry: ash::Entry::load().unwrap(),
                instance: vulkan.instance().clone(),
                physical_device: vulkan.physical_device(),
                device: vulkan.device().clone(),
                queue_family: vulkan.queue_family(),
                queue: VulkanQueue::of(&queue).unwrap().shared_queue().clone(),
                keep: Box::new(ours.clone()),
            };
            let config = VulkanConfig::new(0).with_id(next_id());
            let theirs = config.adopt(parts).unwrap();
            let (raw, offset) = vulkan.resolve(from, bytes).unwrap();
            let offset = offset as usize;
            let whole = VulkanDevice::wrap(&theirs, raw, offset + bytes, ()).unwrap();
            let read = whole.slice(offset, bytes).unwrap().to_host().unwrap();
            Some(read.to_vec())
        }
    })
}

/// Runs a function when it is dropped.
struct Kept(Option<Box<dyn FnOnce()>>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.take().unwrap()();
    }
}
