//! Vulkan devices for tests, and a program's own calls of Vulkan.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device::device::EventPtr;
use arrow_device::{Device, Error, Queue};
use arrow_device_conformance::{Foreign, Hold, abort_if_hung, assert_balanced};
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanConfig, VulkanDevice, VulkanQueue, devices};

pub(crate) fn is_required() -> bool {
    std::env::var_os("ARROW_DEVICE_VULKAN_REQUIRED").is_some_and(|value| value != "0")
}

/// Returns whether there is a device. Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn is_there() -> bool {
    abort_if_hung();
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

#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert_balanced::<VulkanDevice>(device);
}

/// Asserts an error that says this.
#[track_caller]
pub(crate) fn assert_error<T>(result: Result<T, Error>, text: &str) {
    let error = result.map(drop).unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
}

/// A timeline semaphore of a program's, and commands that wait for it.
pub(crate) struct Timeline {
    device: Device,
    pub(crate) semaphore: vk::Semaphore,
    pool: vk::CommandPool,
}

impl Timeline {
    pub(crate) fn new(device: &Device) -> Arc<Self> {
        let functions = VulkanDevice::of(device).unwrap().device();
        let mut kind =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let create = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        let family = VulkanDevice::of(device).unwrap().queue_family();
        let pool = vk::CommandPoolCreateInfo::default().queue_family_index(family);
        // SAFETY: the device is live, with timeline semaphores enabled, and has the family.
        let (semaphore, pool) = unsafe {
            (
                functions.create_semaphore(&create, None),
                functions.create_command_pool(&pool, None),
            )
        };
        Arc::new(Self {
            device: device.clone(),
            semaphore: semaphore.unwrap(),
            pool: pool.unwrap(),
        })
    }

    /// Submits commands of a program to the queue's VkQueue, behind which nothing runs before the semaphore has the value 1.
    pub(crate) fn block(&self, queue: &Queue) {
        let functions = VulkanDevice::of(&self.device).unwrap().device();
        let allocate = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .command_buffer_count(1);
        let all = vk::PipelineStageFlags::ALL_COMMANDS;
        let (none, begin) = (
            vk::DependencyFlags::empty(),
            vk::CommandBufferBeginInfo::default(),
        );
        // SAFETY: the device is live; all is made, recorded and used as its structures say.
        let commands = unsafe {
            let commands = functions.allocate_command_buffers(&allocate).unwrap();
            functions.begin_command_buffer(commands[0], &begin).unwrap();
            functions.cmd_pipeline_barrier(commands[0], all, all, none, &[], &[], &[]);
            functions.end_command_buffer(commands[0]).unwrap();
            commands
        };
        let (semaphores, values, stages) = ([self.semaphore], [1], [all]);
        let mut wait = vk::TimelineSemaphoreSubmitInfo::default().wait_semaphore_values(&values);
        let submit = [vk::SubmitInfo::default()
            .wait_semaphores(&semaphores)
            .wait_dst_stage_mask(&stages)
            .command_buffers(&commands)
            .push_next(&mut wait)];
        let raw = VulkanQueue::of(queue).unwrap();
        raw.submitted().unwrap();
        raw.shared_queue().with(&mut |queue| {
            // SAFETY: this thread has the queue; the commands and the semaphore live until they have run.
            unsafe { functions.queue_submit(queue, &submit, vk::Fence::null()) }.unwrap();
        });
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
        // SAFETY: both are destroyed once, after the work that waits.
        unsafe {
            functions.destroy_command_pool(self.pool, None);
            functions.destroy_semaphore(self.semaphore, None);
        }
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

/// Runs a function when it is dropped.
struct Kept(Option<Box<dyn FnOnce()>>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.take().unwrap()();
    }
}
