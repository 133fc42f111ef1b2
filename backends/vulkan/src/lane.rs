//! [`Lane`]: the order of one queue's work, counted by a timeline semaphore.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arrow_device::Result;
use arrow_device::device::parts::{exit, queue_number};
use ash::vk;

use crate::codes::{Answer, Failed, Of};
use crate::context::Context;

/// The order of one queue's work. Each batch has a number, from 1 on, to which it sets the lane's timeline semaphore once it and
/// all batches before it have completed.
pub(crate) struct Lane {
    pub(crate) context: Arc<Context>,
    pub(crate) number: u64,
    /// Which of the device's VkQueues the lane submits to.
    pub(crate) queue: usize,
    pub(crate) timeline: vk::Semaphore,
    /// The last number that was given to a batch.
    given: AtomicU64,
    /// The last number whose batch was submitted.
    submitted: AtomicU64,
    /// The last number that was seen complete.
    done: AtomicU64,
    /// Memory was freed whose batch could not be submitted: the next batch stands for it.
    owes: AtomicBool,
}

/// A point in the work of a lane: it is reached once the batch of the number has completed.
#[derive(Clone)]
pub(crate) struct Point {
    pub(crate) lane: Arc<Lane>,
    pub(crate) number: u64,
}

impl Point {
    pub(crate) fn is_reached(&self) -> Answer<bool> {
        self.lane.is_complete(self.number)
    }
}

impl Lane {
    pub(crate) fn new(context: &Arc<Context>, queue: usize) -> Result<Arc<Self>> {
        let mut timeline = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(0);
        let create = vk::SemaphoreCreateInfo::default().push_next(&mut timeline);
        // SAFETY: the device is live, with timelineSemaphore enabled (VUID-VkSemaphoreTypeCreateInfo-timelineSemaphore-03252).
        let timeline = unsafe { context.device.create_semaphore(&create, None) };
        Ok(Arc::new(Self {
            timeline: context.check(timeline.of("vkCreateSemaphore"))?,
            context: context.clone(),
            number: queue_number(),
            queue,
            given: AtomicU64::new(0),
            submitted: AtomicU64::new(0),
            done: AtomicU64::new(0),
            owes: AtomicBool::new(false),
        }))
    }

    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// The numbers change under the lock of `Lanes` only.
    pub(crate) fn set_given(&self, number: u64) {
        self.given.store(number, Ordering::Release);
    }

    /// Returns the number of the next batch, which will be there also if the queue is dropped.
    pub(crate) fn owe(&self) -> u64 {
        self.owes.store(true, Ordering::Release);
        self.given() + 1
    }

    pub(crate) fn owes(&self) -> bool {
        self.owes.load(Ordering::Acquire)
    }

    pub(crate) fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    pub(crate) fn set_submitted(&self, number: u64) {
        self.submitted.store(number, Ordering::Release);
    }

    /// Returns whether the batch of this number and all before it have completed. Never waits.
    pub(crate) fn is_complete(&self, number: u64) -> Answer<bool> {
        if self.done.load(Ordering::Acquire) >= number {
            return Ok(true);
        }
        let device = &self.context.device;
        // SAFETY: the semaphore is live and a timeline (VUID-vkGetSemaphoreCounterValue-semaphore-03255).
        let value = unsafe { device.get_semaphore_counter_value(self.timeline) };
        let value = value.of("vkGetSemaphoreCounterValue")?;
        if value > self.given() {
            // Nobody signals such a value: drivers return the greatest one after the device was lost.
            return Err(LOST);
        }
        if value < number {
            return Ok(false);
        }
        // Drivers end the work of a device that they reset, too, and some say so only to calls that wait.
        match self.wait_turn(value, 0) {
            Err(failed) if failed.code == vk::Result::TIMEOUT => return Ok(false),
            waited => waited?,
        }
        self.done.fetch_max(value, Ordering::AcqRel);
        Ok(true)
    }

    /// Waits for so many nanoseconds; an error with `TIMEOUT` afterwards.
    fn wait_turn(&self, number: u64, nanoseconds: u64) -> Answer<()> {
        let (semaphores, values) = ([self.timeline], [number]);
        let wait = vk::SemaphoreWaitInfo::default()
            .semaphores(&semaphores)
            .values(&values);
        // SAFETY: the semaphore is live and a timeline, with one value (VUID-VkSemaphoreWaitInfo-pSemaphores-03256).
        let waited = unsafe { self.context.device.wait_semaphores(&wait, nanoseconds) };
        waited.of("vkWaitSemaphores")
    }

    /// Makes this thread wait until the batch of this number has completed. It must have been submitted.
    pub(crate) fn wait(&self, number: u64) -> Answer<()> {
        loop {
            // Threads that wait must not keep the process from ending.
            let Some(_inside) = exit::enter() else {
                return Err(ENDING);
            };
            if self.is_complete(number)? {
                return Ok(());
            }
            match self.wait_turn(number, TURN) {
                Err(failed) if failed.code == vk::Result::TIMEOUT => {}
                Err(failed) => return Err(failed),
                // A device that is lost may answer so.
                Ok(()) if !self.is_complete(number)? => return Err(LOST),
                Ok(()) => return Ok(()),
            }
        }
    }
}

/// How long a thread that waits is in Vulkan at a time, in nanoseconds.
const TURN: u64 = 20_000_000;

const ENDING: Failed = Failed {
    call: "exit",
    code: vk::Result::ERROR_INITIALIZATION_FAILED,
};

const LOST: Failed = Failed {
    call: "vkGetSemaphoreCounterValue",
    code: vk::Result::ERROR_DEVICE_LOST,
};

impl Drop for Lane {
    fn drop(&mut self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        // SAFETY: this value made the semaphore and destroys it once. Each submitted batch that refers to it holds the lane until
        // it has completed (`Flying`, VUID-vkDestroySemaphore-semaphore-05149), and each thread that waits for it has a reference.
        unsafe { self.context.device.destroy_semaphore(self.timeline, None) };
    }
}
