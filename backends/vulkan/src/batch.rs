//! [`Batch`] and what becomes of it: what each queue holds back, and what is under way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ash::vk;

use crate::codes::{Answer, Failed, Of};
use crate::lane::{Lane, Point};
use crate::memory::Buffer;

/// Work of the host in the order of a queue: a copy between ordinary memory and a staging buffer.
pub(crate) type HostWork = Box<dyn FnOnce() + Send>;

/// Records commands into a command buffer that has begun.
pub(crate) type Record<'a> = &'a mut dyn FnMut(&ash::Device, vk::CommandBuffer);

/// Records a barrier between all earlier commands of the VkQueue and all later ones.
///
/// # Safety
/// The command buffer records, and is of a family that [`serves`](crate::physical::serves).
pub(crate) unsafe fn record_full_barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    let all = vk::PipelineStageFlags::ALL_COMMANDS;
    let barrier = [vk::MemoryBarrier::default()
        .src_access_mask(vk::AccessFlags::MEMORY_WRITE)
        .dst_access_mask(vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE)];
    let none = vk::DependencyFlags::empty();
    // SAFETY: the caller guarantees the command buffer; these accesses are allowed with all stages.
    unsafe { device.cmd_pipeline_barrier(commands, all, all, none, &barrier, &[], &[]) };
}

/// One submission, and the work of the host before and after it.
#[derive(Default)]
pub(crate) struct Batch<'a> {
    /// Runs before the commands are submitted.
    pub(crate) before: Option<HostWork>,
    /// By default, a barrier between all work before and after.
    pub(crate) record: Option<Record<'a>>,
    /// A program's command buffers, which come after what is recorded.
    pub(crate) commands: &'a [vk::CommandBuffer],
    /// Runs once the commands have completed, and before the next batch of the queue is submitted.
    pub(crate) after: Option<HostWork>,
    /// What lives until the commands have completed.
    pub(crate) buffers: Vec<Arc<Buffer>>,
}

/// What a batch waits for.
#[derive(Clone)]
pub(crate) enum Wait {
    /// The work of a queue of this device.
    Point(Point),
    /// Whatever sets this, which then calls [`Lanes::advance`].
    Host(Arc<AtomicBool>),
}

impl Wait {
    /// Returns whether a batch that waits for this may be submitted.
    pub(crate) fn is_submitted(&self) -> bool {
        match self {
            Self::Point(point) => point.lane.submitted() >= point.number,
            Self::Host(done) => done.load(Ordering::Acquire),
        }
    }
}

/// A batch that is held back.
pub(crate) struct Held {
    pub(crate) number: u64,
    pub(crate) waits: Vec<Wait>,
    pub(crate) before: Option<HostWork>,
    pub(crate) commands: Vec<vk::CommandBuffer>,
    /// The first of the commands, if it is this crate's.
    pub(crate) own: Option<vk::CommandBuffer>,
    pub(crate) after: Option<HostWork>,
    pub(crate) buffers: Vec<Arc<Buffer>>,
    pub(crate) is_submitted: bool,
}

/// What lives until a batch has completed.
pub(crate) struct Flying {
    pub(crate) number: u64,
    pub(crate) own: Option<vk::CommandBuffer>,
    pub(crate) _buffers: Vec<Arc<Buffer>>,
    /// The lanes whose semaphores the batch waits for.
    pub(crate) _waits: Vec<Wait>,
}

pub(crate) struct Track {
    pub(crate) lane: Arc<Lane>,
    /// What the next batch waits for.
    pub(crate) waits: Vec<Wait>,
    pub(crate) held: VecDeque<Held>,
    pub(crate) flying: VecDeque<Flying>,
    /// A thread does the work of the host of the first batch.
    pub(crate) is_busy: bool,
    /// The queue was dropped.
    pub(crate) is_dropped: bool,
}

pub(crate) struct State {
    pub(crate) pool: vk::CommandPool,
    /// Command buffers that are not in use.
    pub(crate) idle: Vec<vk::CommandBuffer>,
    pub(crate) tracks: Vec<Track>,
    /// How many lanes were made.
    pub(crate) made: usize,
}

impl State {
    pub(crate) fn track(&mut self, number: u64) -> Option<&mut Track> {
        self.tracks
            .iter_mut()
            .find(|track| track.lane.number == number)
    }

    /// Takes out what has completed, which the caller drops without the lock.
    pub(crate) fn reap(&mut self) -> (Vec<Flying>, Vec<Track>) {
        let (mut ended, mut forgotten) = (Vec::new(), Vec::new());
        for track in &mut self.tracks {
            while let Some(first) = track.flying.front() {
                if !matches!(track.lane.is_complete(first.number), Ok(true)) {
                    break;
                }
                if let Some(mut flying) = track.flying.pop_front() {
                    self.idle.extend(flying.own.take());
                    ended.push(flying);
                }
            }
        }
        let is_over = |track: &Track| {
            // A lane whose event is still asked for is still there for `Lanes::settle`.
            let asks = track.waits.iter().any(|wait| !wait.is_submitted());
            track.is_dropped && !asks && track.held.is_empty() && track.flying.is_empty()
        };
        let mut at = 0;
        while let Some(track) = self.tracks.get(at) {
            match is_over(track) {
                true => forgotten.push(self.tracks.swap_remove(at)),
                false => at += 1,
            }
        }
        (ended, forgotten)
    }

    /// Records commands into a command buffer of the pool.
    pub(crate) fn record(
        &mut self,
        device: &ash::Device,
        record: Record<'_>,
    ) -> Answer<vk::CommandBuffer> {
        let commands = match self.idle.pop() {
            Some(commands) => commands,
            None => {
                let allocate = vk::CommandBufferAllocateInfo::default()
                    .command_pool(self.pool)
                    .level(vk::CommandBufferLevel::PRIMARY)
                    .command_buffer_count(1);
                // SAFETY: the pool is live and used under the lock of this state only (host access to it is exclusive).
                let made = unsafe { device.allocate_command_buffers(&allocate) };
                *made
                    .of("vkAllocateCommandBuffers")?
                    .first()
                    .ok_or(NO_COMMANDS)?
            }
        };
        let begin = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: the command buffer is not pending: it is new, was never submitted, or its batch has completed. Its pool allows to
        // reset it, which this does (VUID-vkBeginCommandBuffer-commandBuffer-00049, -00050); access is exclusive, as above.
        let mut done =
            unsafe { device.begin_command_buffer(commands, &begin) }.of("vkBeginCommandBuffer");
        if done.is_ok() {
            record(device, commands);
            // SAFETY: it is in the recording state, without a render pass or query (VUID-vkEndCommandBuffer-commandBuffer-00059).
            done = unsafe { device.end_command_buffer(commands) }.of("vkEndCommandBuffer");
        }
        match done {
            Ok(()) => Ok(commands),
            Err(failed) => {
                self.idle.push(commands);
                Err(failed)
            }
        }
    }
}

impl Held {
    /// Returns whether all that the batch waits for was submitted.
    pub(crate) fn is_ready(&self) -> bool {
        self.waits.iter().all(Wait::is_submitted)
    }
}

impl Track {
    /// Returns whether there is work of the host before the first batch, which no thread does yet.
    pub(crate) fn wants_copy(&self) -> bool {
        let first = self.held.front().filter(|_| !self.is_busy);
        first.is_some_and(|held| !held.is_submitted && held.before.is_some() && held.is_ready())
    }

    /// Takes out the first batch if nothing is left to do for it.
    pub(crate) fn end(&mut self) {
        let is_over = |held: &Held| held.is_submitted && held.after.is_none();
        if !self.is_busy && self.held.front().is_some_and(is_over) {
            self.held.pop_front();
        }
    }
}

const NO_COMMANDS: Failed = Failed {
    call: "vkAllocateCommandBuffers",
    code: vk::Result::ERROR_UNKNOWN,
};
