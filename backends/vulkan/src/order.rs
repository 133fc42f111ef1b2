//! [`VulkanQueue`]: the work of one VkQueue in its order, counted by a timeline semaphore.
//!
//! **A submission waits only for values whose signal was given to a VkQueue before, and it has a command buffer.** So no driver has to
//! keep a wait whose signal is still to come, no VkQueue waits for one that waits for it, and nothing is ever held back by the host.
//! Two things make it so: [`VulkanQueue::give`] is the only call of `vkQueueSubmit`, and records a command buffer of its own each time;
//! and what it waits for are the [`Point`]s of recorded events, which are made after their submission has succeeded. (Those of
//! [`VulkanQueue::next`] stand for freed memory and ended queues, and no submission waits for them.)

use std::collections::VecDeque;
use std::fmt;
use std::mem::take;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arrow_device::Result;
use ash::vk;

use crate::memory::Buffer;
use crate::sys::{Context, SharedQueue, lock};

/// How long a thread that waits is in Vulkan at a time, in nanoseconds.
pub(crate) const TURN: u64 = 20_000_000;
/// The pause before what has failed for lack of memory, for example, is tried again.
const PAUSE: Duration = Duration::from_millis(10);

/// The VkQueue behind queues of a Vulkan device, which several may share, and the order of its work.
pub struct VulkanQueue {
    /// Each submission has a number, from 1 on, to which it sets this semaphore once it and all before it have completed. It begins with
    /// a barrier, after all that the VkQueue was given before.
    pub(crate) timeline: vk::Semaphore,
    commands: vk::CommandPool,
    state: Mutex<State>,
    /// The number of the last submission.
    given: AtomicU64,
    /// The last number that was seen complete.
    done: AtomicU64,
    /// VkEvents that were released, each with the number of the submission that sets it.
    released: Mutex<VecDeque<(vk::Event, u64)>>,
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

/// A point in the work of a VkQueue: it is reached once the submission of the number has completed.
#[derive(Clone, Debug)]
pub struct Point {
    pub(crate) queue: Arc<VulkanQueue>,
    number: u64,
}

impl Point {
    /// Returns whether it is reached, within so many nanoseconds. Makes the submission of the number, if it has not come.
    pub(crate) fn is_reached(&self, nanoseconds: u64) -> Result<bool> {
        let queue = &self.queue;
        if self.number > queue.given.load(Ordering::Acquire) {
            queue.barrier()?;
        }
        queue.is_complete(self.number, nanoseconds)
    }
}

/// An event of the engine's.
#[derive(Debug)]
pub enum Event {
    /// Nobody but the engine asks about it.
    Mark(Point),
    /// Commands set the VkEvent at the point. Its submission has been given to the VkQueue.
    Recorded(Point, vk::Event),
    /// The VkEvent of another library.
    Foreign(vk::Event),
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Self::Recorded(point, event) = self {
            lock(&point.queue.released).push_back((*event, point.number));
        }
    }
}

impl VulkanQueue {
    pub(crate) fn new(context: &Arc<Context>, queue: Arc<dyn SharedQueue>) -> Result<Self> {
        let mut order = Self {
            timeline: vk::Semaphore::null(),
            commands: vk::CommandPool::null(),
            state: Mutex::default(),
            given: AtomicU64::new(0),
            done: AtomicU64::new(0),
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

    /// Makes the next submission, and so all later work of the VkQueue, wait for an event. Returns `false`, and does nothing, if it
    /// cannot.
    pub(crate) fn wait_for(&self, event: &Event) -> bool {
        let Event::Recorded(point, _) = event else {
            return false;
        };
        let theirs = &point.queue;
        if theirs.context.device.handle() != self.context.device.handle() {
            return false;
        }
        // Submissions of one order come after each other anyway.
        if theirs.timeline != self.timeline {
            let mut state = lock(&self.state);
            let of = |other: &&mut Point| other.queue.timeline == theirs.timeline;
            match state.waits.iter_mut().find(of) {
                Some(other) => other.number = other.number.max(point.number),
                None => state.waits.push(point.clone()),
            }
        }
        true
    }

    /// Submits what `record` records, and then a program's command buffers, after all that the VkQueue was given before. `staging`
    /// lives until they have completed. Returns the number. After an error nothing of it runs.
    ///
    /// # Safety
    /// What the commands do is valid once all that the VkQueue was given before, and what the order waits for, has completed; whatever
    /// they use lives until they have completed. `record` begins with a barrier after all earlier commands.
    pub(crate) unsafe fn give(
        &self,
        record: impl FnOnce(&ash::Device, vk::CommandBuffer),
        program: &[vk::CommandBuffer],
        staging: Vec<Arc<Buffer>>,
    ) -> Result<u64> {
        let Context { device, health, .. } = &*self.context;
        health.check()?;
        // Dropped without the lock.
        let mut ended = Vec::new();
        let mut state = lock(&self.state);
        self.reap(&mut state, &mut ended);
        let own = self.record(&mut state, record)?;
        let commands = [&[own], program].concat();
        let number = self.given.load(Ordering::Acquire) + 1;
        let of = |point: &Point| (point.queue.timeline, point.number);
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
            if !matches!(self.is_complete(first.number, 0), Ok(true)) {
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
    /// As [`give`](Self::give).
    pub(crate) unsafe fn give_behind_barrier(&self, program: &[vk::CommandBuffer]) -> Result<u64> {
        // SAFETY: `give` passes a command buffer that records, of a family that `serves`; the caller guarantees the rest.
        unsafe {
            let barrier = |device: &ash::Device, own| full_barrier(device, own);
            self.give(barrier, program, Vec::new())
        }
    }

    /// Submits nothing but a barrier, after all that the VkQueue was given so far, a program's commands included.
    pub(crate) fn barrier(&self) -> Result<u64> {
        // SAFETY: the barrier uses nothing.
        unsafe { self.give_behind_barrier(&[]) }
    }

    /// Returns the point of the next submission, which comes after all that the VkQueue was given so far, what a program has submitted
    /// since the last one included.
    pub(crate) fn next(self: &Arc<Self>) -> Point {
        // No submission is under way meanwhile.
        let _state = lock(&self.state);
        let number = self.given.load(Ordering::Acquire) + 1;
        let queue = self.clone();
        Point { queue, number }
    }

    /// Records an event: submits commands that set it after all work of the order so far.
    pub(crate) fn record_event(self: &Arc<Self>) -> Result<Event> {
        let event = self.take_event()?;
        let set = |device: &ash::Device, own| {
            let all = vk::PipelineStageFlags::ALL_COMMANDS;
            // SAFETY: `give` passes a command buffer that records, of a family that `serves` (VUID-vkCmdSetEvent-commandBuffer-cmdpool);
            // the event is live and of this device. All stages exist (VUID-vkCmdSetEvent-stageMask-parameter), and none is the host's
            // (-stageMask-01149).
            unsafe {
                // To set an event makes nothing available, such as what a program's commands have written.
                full_barrier(device, own);
                device.cmd_set_event(own, event, all);
            }
        };
        // SAFETY: the order keeps the event until its commands have completed (`VulkanQueue::drop`); they begin with a barrier.
        match unsafe { self.give(set, &[], Vec::new()) } {
            Ok(number) => {
                let queue = self.clone();
                Ok(Event::Recorded(Point { queue, number }, event))
            }
            Err(e) => {
                // No commands set it.
                lock(&self.released).push_front((event, 0));
                Err(e)
            }
        }
    }

    /// Returns a VkEvent that is not set: the first that was released, if its commands have set it, or else a new one.
    fn take_event(&self) -> Result<vk::Event> {
        let Context { device, .. } = &*self.context;
        let mut released = lock(&self.released);
        if let Some(&(event, number)) = released.front()
            && matches!(self.is_complete(number, 0), Ok(true))
        {
            // SAFETY: the event is one of the order's, live and not for the device only (VUID-vkResetEvent-event-03823); the commands
            // that set it have completed, and who waited for it has released it (VUID-vkResetEvent-event-03821). Only this thread has it.
            let reset = unsafe { device.reset_event(event) };
            self.context.check("vkResetEvent", reset)?;
            released.pop_front();
            return Ok(event);
        }
        drop(released);
        // SAFETY: the device is live. Without the flag for the device only, the host may ask for the event.
        let event = unsafe { device.create_event(&vk::EventCreateInfo::default(), None) };
        self.context.check("vkCreateEvent", event)
    }

    /// Returns whether the submission of this number and all before it have completed, within so many nanoseconds. It was made.
    pub(crate) fn is_complete(&self, number: u64, nanoseconds: u64) -> Result<bool> {
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

    /// Makes this thread wait for all that the VkQueue was given so far, a program's commands included, without its lock. In turns:
    /// threads that wait must not keep the process from ending.
    pub(crate) fn finish(&self) -> Result<()> {
        let health = &self.context.health;
        let inside = health.enter()?;
        let number = self.barrier()?;
        drop(inside);
        loop {
            let _inside = health.enter()?;
            if self.is_complete(number, TURN)? {
                self.forget_ended();
                return Ok(());
            }
        }
    }

    /// Ends the work of a VkQueue whose device is lost.
    pub(crate) fn end(&self) -> Result<()> {
        let _inside = self.context.health.enter_even_if_failed()?;
        let mut idle = Ok(());
        self.queue.with(&mut |queue| {
            // SAFETY: nobody else uses the VkQueue meanwhile (contract of `SharedQueue`), which is live. A device that is lost
            // ends its work, or says that it is lost, in finite time.
            idle = unsafe { self.context.device.queue_wait_idle(queue) };
        });
        if idle != Err(vk::Result::ERROR_DEVICE_LOST) {
            self.context.check("vkQueueWaitIdle", idle)?;
        }
        Ok(())
    }

    /// Makes this thread wait for the submissions of the order, as long as it takes, and forgets them: what two orders wait for would keep
    /// both. It submits nothing any more.
    pub(crate) fn settle(&self) {
        let health = &self.context.health;
        loop {
            let Ok(_inside) = health.enter_even_if_failed() else {
                return;
            };
            let ended = match health.check() {
                Ok(()) => self.is_complete(self.given.load(Ordering::Acquire), TURN),
                Err(_) => self.end().map(|()| true),
            };
            match ended {
                Ok(true) => break,
                Ok(false) => {}
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
        // Dropped without the lock.
        let _ended = take(&mut *lock(&self.state));
    }
}

impl fmt::Debug for VulkanQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VulkanQueue({:?})", self.timeline)
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

impl Drop for VulkanQueue {
    fn drop(&mut self) {
        let Ok(_inside) = self.context.health.enter_even_if_failed() else {
            return;
        };
        // The engine has waited for all work, unless this never became a device's.
        self.settle();
        let device = &self.context.device;
        let released = self.released.get_mut();
        for (event, _) in released.unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: the order has made the event, which nobody uses any more: those that somebody has keep the order. The commands
            // that set it have completed (VUID-vkDestroyEvent-event-01145).
            unsafe { device.destroy_event(event, None) };
        }
        // SAFETY: this value made both, if it got that far, and destroys them once; null handles are allowed. All submissions have
        // completed, so that no command buffer is pending (VUID-vkDestroyCommandPool-commandPool-00041); submissions of other orders
        // that wait for the semaphore keep this (`Flying`, VUID-vkDestroySemaphore-semaphore-05149), as does who waits.
        unsafe {
            device.destroy_command_pool(self.commands, None);
            device.destroy_semaphore(self.timeline, None);
        }
    }
}
