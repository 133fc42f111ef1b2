//! [`Order`]: the work of one VkQueue in its order, counted by a timeline semaphore.
//!
//! **A submission waits only for values whose signal was given to a VkQueue before, and it has a command buffer.** So no driver has to
//! keep a wait whose signal is still to come, no VkQueue waits for one that waits for it, and nothing is ever held back by the host.
//! Two things make it so: [`Order::submit`] is the only call of `vkQueueSubmit`, and records a command buffer of its own each time; and
//! what it waits for are the [`Point`]s of events, which are made after their submission has succeeded. (Those of [`Order::next`] stand
//! for freed memory, and no submission waits for them.)

use std::collections::VecDeque;
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arrow_device::Result;
use arrow_device::device::EventPtr;
use ash::vk;

use crate::memory::Buffer;
use crate::sys::{Context, SharedQueue, lock};

/// How long a thread that waits is in Vulkan at a time, in nanoseconds.
const TURN: u64 = 20_000_000;
/// The pause before what has failed for lack of memory, for example, is tried again.
const PAUSE: Duration = Duration::from_millis(10);

/// The work of one VkQueue. Each submission has a number, from 1 on, to which it sets the timeline semaphore once it and all before it
/// have completed. It begins with a barrier, after all that the VkQueue was given before.
pub(crate) struct Order {
    /// Its handle stands for the VkQueue in the pool of memory: what one use of the VkQueue gives back, the next one may take at once.
    pub(crate) timeline: vk::Semaphore,
    commands: vk::CommandPool,
    state: Mutex<State>,
    /// The number of the last submission.
    given: AtomicU64,
    /// The last number that was seen complete.
    done: AtomicU64,
    /// The number that stands for the last use of memory that was freed: perhaps that of the next submission.
    owed: AtomicU64,
    /// Events that were released, each with the number of the submission that sets it.
    pub(crate) released: Mutex<VecDeque<(EventPtr, u64)>>,
    pub(crate) queue: Arc<dyn SharedQueue>,
    /// After the VkQueue, which belongs to what a program's device keeps.
    pub(crate) context: Arc<Context>,
}

#[derive(Default)]
struct State {
    /// What the next submission waits for: of each other order, one point.
    waits: Vec<Point>,
    /// Command buffers that are not in use.
    idle: Vec<vk::CommandBuffer>,
    flying: VecDeque<Flying>,
}

/// What lives until a submission has completed.
struct Flying {
    number: u64,
    commands: vk::CommandBuffer,
    _staging: Vec<Arc<Buffer>>,
    /// With the semaphores for which it waits.
    _waits: Vec<Point>,
}

/// A point in the work of an order: it is reached once the submission of the number has completed.
#[derive(Clone)]
pub(crate) struct Point {
    pub(crate) order: Arc<Order>,
    pub(crate) number: u64,
}

impl Point {
    /// Returns whether this is of the same VkDevice.
    pub(crate) fn is_of(&self, context: &Context) -> bool {
        self.order.context.device.handle() == context.device.handle()
    }

    /// Never waits.
    pub(crate) fn is_reached(&self) -> Result<bool> {
        self.order.context.failure.check()?;
        self.order.is_complete(self.number)
    }

    /// Makes this thread wait.
    pub(crate) fn wait(&self) -> Result<()> {
        self.order.wait(self.number)
    }
}

impl Order {
    pub(crate) fn new(context: &Arc<Context>, queue: Arc<dyn SharedQueue>) -> Result<Self> {
        let mut order = Self {
            timeline: vk::Semaphore::null(),
            commands: vk::CommandPool::null(),
            state: Mutex::default(),
            given: AtomicU64::new(0),
            done: AtomicU64::new(0),
            owed: AtomicU64::new(0),
            released: Mutex::default(),
            queue,
            context: context.clone(),
        };
        let mut timeline =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let create = vk::SemaphoreCreateInfo::default().push_next(&mut timeline);
        // SAFETY: the device is live, with timelineSemaphore enabled (VUID-VkSemaphoreTypeCreateInfo-timelineSemaphore-03252).
        let timeline = unsafe { context.device.create_semaphore(&create, None) };
        order.timeline = context.check("vkCreateSemaphore", timeline)?;
        let flags = vk::CommandPoolCreateFlags::TRANSIENT
            | vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER;
        let create = vk::CommandPoolCreateInfo::default()
            .queue_family_index(context.family)
            .flags(flags);
        // SAFETY: the device is live, and has the family (VUID-vkCreateCommandPool-queueFamilyIndex-01937).
        let commands = unsafe { context.device.create_command_pool(&create, None) };
        order.commands = context.check("vkCreateCommandPool", commands)?;
        Ok(order)
    }

    /// Makes the next submission, and so all later work of the VkQueue, wait.
    pub(crate) fn wait_for(&self, point: Point) {
        // Submissions of one order come after each other anyway.
        if point.order.timeline == self.timeline {
            return;
        }
        let mut state = lock(&self.state);
        let of = |other: &&mut Point| other.order.timeline == point.order.timeline;
        match state.waits.iter_mut().find(of) {
            Some(other) => other.number = other.number.max(point.number),
            None => state.waits.push(point),
        }
    }

    /// Submits what `record` records, and then a program's command buffers, after all that the VkQueue was given before. `staging`
    /// lives until they have completed. Returns the number. After an error nothing of it runs.
    ///
    /// # Safety
    /// What the commands do is valid once all that the VkQueue was given before, and what the order waits for, has completed; whatever
    /// they use lives until they have completed. `record` begins with a barrier after all earlier commands.
    pub(crate) unsafe fn submit(
        &self,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer),
        program: &[vk::CommandBuffer],
        staging: Vec<Arc<Buffer>>,
    ) -> Result<u64> {
        let Context { device, .. } = &*self.context;
        let _inside = self.context.enter()?;
        // Dropped without the lock.
        let mut ended = Vec::new();
        let mut state = lock(&self.state);
        self.reap(&mut state, &mut ended);
        let own = self.record(&mut state, record)?;
        let commands = [&[own], program].concat();
        let number = self.given.load(Ordering::Acquire) + 1;
        let of = |point: &Point| (point.order.timeline, point.number);
        let (semaphores, values): (Vec<_>, Vec<_>) = state.waits.iter().map(of).unzip();
        let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; semaphores.len()];
        let (signals, signalled) = ([self.timeline], [number]);
        let mut timelines = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&values)
            .signal_semaphore_values(&signalled);
        let submit = [vk::SubmitInfo::default()
            .wait_semaphores(&semaphores)
            .wait_dst_stage_mask(&stages)
            .command_buffers(&commands)
            .signal_semaphores(&signals)
            .push_next(&mut timelines)];
        let mut submitted = Err(vk::Result::ERROR_UNKNOWN);
        self.queue.with(&mut |queue| {
            // SAFETY: nobody else uses the VkQueue meanwhile (contract of `SharedQueue`), which is of the device and the family of the
            // command buffers. These have been recorded and are in no other submission; each semaphore is a live timeline, which
            // `Flying` keeps; the signalled value is greater than all before (VUID-VkSubmitInfo-pSignalSemaphores-03242), as numbers are
            // given under the lock of this order.
            submitted = unsafe { device.queue_submit(queue, &submit, vk::Fence::null()) };
        });
        if submitted.is_err() {
            state.idle.push(own);
        }
        self.context.check("vkQueueSubmit", submitted)?;
        self.given.store(number, Ordering::Release);
        let waits = take(&mut state.waits);
        state.flying.push_back(Flying {
            number,
            commands: own,
            _staging: staging,
            _waits: waits,
        });
        Ok(number)
    }

    /// Records commands into a command buffer of the pool, which is used under the lock of the state only.
    fn record(
        &self,
        state: &mut State,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer),
    ) -> Result<vk::CommandBuffer> {
        let Context { device, .. } = &*self.context;
        if state.idle.is_empty() {
            let allocate = vk::CommandBufferAllocateInfo::default()
                .command_pool(self.commands)
                .level(vk::CommandBufferLevel::PRIMARY)
                .command_buffer_count(1);
            // SAFETY: the pool is live, and access to it exclusive. The result is one command buffer.
            let made = unsafe { device.allocate_command_buffers(&allocate) };
            let made = self.context.check("vkAllocateCommandBuffers", made)?;
            state.idle.extend(made);
        }
        let commands = state.idle.last().copied().unwrap_or_default();
        let begin = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: the command buffer is not pending: it is new, was never submitted, or its submission has completed. Its pool allows
        // to reset it, which this does (VUID-vkBeginCommandBuffer-commandBuffer-00049, -00050); access is exclusive, as above.
        let begun = unsafe { device.begin_command_buffer(commands, &begin) };
        self.context.check("vkBeginCommandBuffer", begun)?;
        record(device, commands);
        // SAFETY: it is in the recording state, without a render pass or query (VUID-vkEndCommandBuffer-commandBuffer-00059).
        let recorded = unsafe { device.end_command_buffer(commands) };
        self.context.check("vkEndCommandBuffer", recorded)?;
        state.idle.pop();
        Ok(commands)
    }

    /// Takes out what has completed.
    fn reap(&self, state: &mut State, ended: &mut Vec<Flying>) {
        while let Some(first) = state.flying.front() {
            if !matches!(self.is_complete(first.number), Ok(true)) {
                break;
            }
            if let Some(first) = state.flying.pop_front() {
                state.idle.push(first.commands);
                ended.push(first);
            }
        }
    }

    /// Gives back what submissions that have completed used.
    pub(crate) fn forget_ended(&self) {
        let mut ended = Vec::new();
        self.reap(&mut lock(&self.state), &mut ended);
    }

    /// Submits a program's command buffers behind a barrier.
    ///
    /// # Safety
    /// As [`submit`](Self::submit).
    pub(crate) unsafe fn submit_behind_barrier(
        &self,
        program: &[vk::CommandBuffer],
    ) -> Result<u64> {
        // SAFETY: `submit` passes a command buffer that records, of a family that `serves`; the caller guarantees the rest.
        unsafe {
            let barrier = |device: &ash::Device, own| full_barrier(device, own);
            self.submit(barrier, program, Vec::new())
        }
    }

    /// Submits nothing but a barrier, after all that the VkQueue was given so far, a program's commands included.
    pub(crate) fn mark(&self) -> Result<u64> {
        // SAFETY: the barrier uses nothing.
        unsafe { self.submit_behind_barrier(&[]) }
    }

    /// Returns the point after the last use of memory that is freed now: that of the next submission, since a program may have
    /// submitted commands that use it since the last one.
    pub(crate) fn next(self: &Arc<Self>) -> Point {
        // No submission is under way meanwhile.
        let _state = lock(&self.state);
        let number = self.given.load(Ordering::Acquire) + 1;
        self.owed.store(number, Ordering::Release);
        let order = self.clone();
        Point { order, number }
    }

    /// Makes the submission for which memory waits that was freed, unless another one came.
    pub(crate) fn pay(&self) {
        if self.owed.load(Ordering::Acquire) > self.given.load(Ordering::Acquire) {
            // After an error the memory waits longer.
            let _ = self.mark();
        }
    }

    /// Returns whether the submission of this number and all before it have completed. Never waits.
    pub(crate) fn is_complete(&self, number: u64) -> Result<bool> {
        self.is_reached_within(0, number)
    }

    /// Makes this thread wait until the submission of this number has completed.
    pub(crate) fn wait(&self, number: u64) -> Result<()> {
        loop {
            // In turns: threads that wait must not keep the process from ending.
            let _inside = self.context.enter()?;
            if self.is_reached_within(TURN, number)? {
                return Ok(());
            }
        }
    }

    /// Waits for so many nanoseconds at most.
    fn is_reached_within(&self, nanoseconds: u64, number: u64) -> Result<bool> {
        if self.done.load(Ordering::Acquire) >= number {
            return Ok(true);
        }
        let Context { device, .. } = &*self.context;
        let (semaphores, values) = ([self.timeline], [number]);
        let wait = vk::SemaphoreWaitInfo::default()
            .semaphores(&semaphores)
            .values(&values);
        // SAFETY: the semaphore is live and a timeline, with one value (VUID-VkSemaphoreWaitInfo-pSemaphores-03256,
        // VUID-vkGetSemaphoreCounterValue-semaphore-03255).
        let value = unsafe {
            // Drivers end the work of a device that they reset, too, and some say so only to calls that wait.
            match device.wait_semaphores(&wait, nanoseconds) {
                Err(vk::Result::TIMEOUT) => return Ok(false),
                waited => self.context.check("vkWaitSemaphores", waited)?,
            }
            device.get_semaphore_counter_value(self.timeline)
        };
        let value = self.context.check("vkGetSemaphoreCounterValue", value)?;
        // Others return the greatest value after the device was lost, or say that each wait has ended.
        let is_lost = value < number || value > self.given.load(Ordering::Acquire) + 1;
        let lost = if is_lost {
            Err(vk::Result::ERROR_DEVICE_LOST)
        } else {
            Ok(())
        };
        self.context.check("vkGetSemaphoreCounterValue", lost)?;
        self.done.fetch_max(value, Ordering::AcqRel);
        Ok(true)
    }

    /// Makes this thread wait for all that the VkQueue was given so far, a program's commands included, without its lock.
    pub(crate) fn finish(&self) -> Result<()> {
        self.mark().and_then(|number| self.wait(number))?;
        self.forget_ended();
        Ok(())
    }

    /// As [`finish`](Self::finish), as long as it takes. Afterwards nothing of it runs any more; after an error the device cannot be
    /// used.
    pub(crate) fn settle(&self) -> Result<()> {
        let finished = self.insist(|| self.finish());
        if finished.is_err() && self.context.enter_to_drop().is_some() {
            self.queue.with(&mut |queue| {
                // SAFETY: nobody else uses the VkQueue meanwhile (contract of `SharedQueue`), which is live. A device that is lost
                // ends its work, or says that it is lost, in finite time.
                let _ = unsafe { self.context.device.queue_wait_idle(queue) };
            });
            // What two orders wait for would keep both. Dropped without the lock.
            let _ended = take(&mut *lock(&self.state));
        }
        finished
    }

    /// Repeats what fails, unless the device cannot be used any more: other errors, such as a lack of memory, say nothing about the work.
    pub(crate) fn insist(&self, what: impl Fn() -> Result<()>) -> Result<()> {
        loop {
            let done = what();
            if done.is_ok() || self.context.enter().is_err() {
                return done;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns whether all has completed that memory was used for. Never waits.
    pub(crate) fn is_idle(&self) -> bool {
        let given = self.given.load(Ordering::Acquire);
        let last = given.max(self.owed.load(Ordering::Acquire));
        matches!(self.is_complete(last), Ok(true))
    }
}

/// Records a barrier between all earlier commands of the VkQueue and all later ones.
///
/// # Safety
/// The command buffer records, and is of a family that `serves`.
pub(crate) unsafe fn full_barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    let all = vk::PipelineStageFlags::ALL_COMMANDS;
    let barrier = [vk::MemoryBarrier::default()
        .src_access_mask(vk::AccessFlags::MEMORY_WRITE)
        .dst_access_mask(vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE)];
    let none = vk::DependencyFlags::empty();
    // SAFETY: the caller guarantees the command buffer; these accesses are allowed with all stages.
    unsafe { device.cmd_pipeline_barrier(commands, all, all, none, &barrier, &[], &[]) };
}

impl Drop for Order {
    fn drop(&mut self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        let device = &self.context.device;
        let released = self
            .released
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for (event, _) in released.drain(..) {
            // SAFETY: `event::record` has made box and event, which nobody uses any more; the commands that set it have completed
            // (VUID-vkDestroyEvent-event-01145).
            unsafe { device.destroy_event(*Box::from_raw(event.as_ptr().cast()), None) };
        }
        // SAFETY: this value made both, if it got that far, and destroys them once; null handles are allowed. `Shared::drop` has waited
        // for all submissions, so that no command buffer is pending (VUID-vkDestroyCommandPool-commandPool-00041); submissions of
        // other orders that wait for the semaphore keep this (`Flying`, VUID-vkDestroySemaphore-semaphore-05149), as does who waits.
        unsafe {
            device.destroy_command_pool(self.commands, None);
            device.destroy_semaphore(self.timeline, None);
        }
    }
}
