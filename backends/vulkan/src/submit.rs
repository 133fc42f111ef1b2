//! [`Lanes`]: what is submitted to the device, and when.
//!
//! A batch is submitted at once if all that it waits for has been submitted, too. Otherwise the host holds it, and the batches of
//! its queue behind it, back: a VkQueue runs its batches in order, so that one that waits there would hold up all queues of the
//! device, and two that wait for each other would never end.

use std::collections::VecDeque;
use std::mem::take;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrow_device::Result;
use ash::vk;

use crate::batch::{Batch, Flying, Held, State, Track, Wait, record_full_barrier};
use crate::codes::{Answer, Failed, Of};
use crate::context::{Context, SharedQueue, lock};
use crate::lane::{Lane, Point};

/// The pause between two attempts to wait for the device.
const PAUSE: Duration = Duration::from_millis(10);

/// The queues of a device, those that were dropped included, and what they submit.
pub(crate) struct Lanes {
    pub(crate) queues: Vec<Arc<dyn SharedQueue>>,
    state: Mutex<State>,
    /// Signalled when a batch was submitted or has ended, and when the device has failed.
    moved: Condvar,
    /// After the VkQueues, which belong to what a program's device keeps.
    context: Arc<Context>,
}

/// What can be done next in a lane.
enum Next {
    Before,
    Submit,
    After,
}

/// Which work of the host a thread does, which may take a while.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Host {
    /// That before the batch that the thread has just queued, if there is one.
    Fresh,
    /// All that there is.
    All,
}

impl Lanes {
    pub(crate) fn new(context: &Arc<Context>, queues: Vec<Arc<dyn SharedQueue>>) -> Result<Self> {
        let create = vk::CommandPoolCreateInfo::default()
            .queue_family_index(context.family)
            .flags(
                vk::CommandPoolCreateFlags::TRANSIENT
                    | vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER,
            );
        // SAFETY: the device is live, and has the family (VUID-vkCreateCommandPool-queueFamilyIndex-01937).
        let pool = unsafe { context.device.create_command_pool(&create, None) };
        let state = State {
            pool: context.check(pool.of("vkCreateCommandPool"))?,
            idle: Vec::new(),
            tracks: Vec::new(),
            made: 0,
        };
        Ok(Self {
            context: context.clone(),
            queues,
            state: Mutex::new(state),
            moved: Condvar::new(),
        })
    }

    /// Makes the lane of a new queue. The VkQueues are used in turn.
    pub(crate) fn add(&self) -> Result<Arc<Lane>> {
        let queue = {
            let mut state = lock(&self.state);
            state.made += 1;
            (state.made - 1) % self.queues.len().max(1)
        };
        self.add_to(queue)
    }

    fn add_to(&self, queue: usize) -> Result<Arc<Lane>> {
        let lane = Lane::new(&self.context, queue)?;
        lock(&self.state).tracks.push(Track {
            lane: lane.clone(),
            waits: Vec::new(),
            held: VecDeque::new(),
            flying: VecDeque::new(),
            is_busy: false,
            is_dropped: false,
        });
        Ok(lane)
    }

    /// A queue was dropped: its lane is forgotten once its work has ended.
    pub(crate) fn drop_lane(&self, lane: &Lane) {
        let mut state = lock(&self.state);
        if let Some(track) = state.track(lane.number) {
            track.is_dropped = true;
        }
        let ended = state.reap();
        drop(state);
        drop(ended);
    }

    /// Makes the later work of a lane wait.
    pub(crate) fn wait(&self, lane: &Lane, wait: Wait) {
        let mut state = lock(&self.state);
        let Some(track) = state.track(lane.number) else {
            return;
        };
        if let Wait::Point(point) = &wait {
            let same = track.waits.iter_mut().find_map(|wait| match wait {
                Wait::Point(other) if Arc::ptr_eq(&other.lane, &point.lane) => Some(other),
                _ => None,
            });
            if let Some(other) = same {
                other.number = other.number.max(point.number);
                return;
            }
        }
        track.waits.push(wait);
    }

    /// Queues a batch. Returns its number in the lane. If this returns an error, neither its commands nor its work of the host run,
    /// except that work of the host before the commands may have run.
    ///
    /// # Safety
    /// What the commands do is valid once the batches before it, and what they wait for, have completed; whatever they use that
    /// `batch` does not own lives until they have completed. The work of the host is valid at its time.
    pub(crate) unsafe fn push(self: &Arc<Self>, lane: &Arc<Lane>, batch: Batch<'_>) -> Result<u64> {
        let _inside = self.context.enter_usable()?;
        let mut state = lock(&self.state);
        let ended = state.reap();
        // A submission always has commands: NVIDIA's driver has hung on those without.
        let mut barrier = |device: &ash::Device, commands| {
            // SAFETY: `State::record` passes a command buffer that records, of a family that `serves`.
            unsafe { record_full_barrier(device, commands) };
        };
        let record = match batch.record {
            Some(record) => record,
            None => &mut barrier,
        };
        let own = self
            .context
            .check(state.record(&self.context.device, record))?;
        let mut commands = vec![own];
        commands.extend(batch.commands);
        let has_after = batch.after.is_some();
        let number = lane.given() + 1;
        let Some(track) = state.track(lane.number) else {
            // Lanes are forgotten after their queues were dropped only.
            state.idle.push(own);
            return Err(self
                .context
                .not_supported("submit", "the queue was dropped".into()));
        };
        lane.set_given(number);
        let waits = take(&mut track.waits);
        track.held.push_back(Held {
            number,
            waits,
            before: batch.before,
            commands,
            own: Some(own),
            after: batch.after,
            buffers: batch.buffers,
            is_submitted: false,
        });
        let outcome = self.pump(state, Some((lane.number, number)), Host::Fresh);
        drop(ended);
        outcome?;
        if has_after {
            let (point, this) = (lane.clone(), self.clone());
            let poll = move || {
                let context = &point.context;
                let Ok(_inside) = context.enter_usable() else {
                    return true;
                };
                // Most errors say nothing about the work, for which nobody else may ask.
                let is_complete = context.check(point.is_complete(number));
                is_complete.unwrap_or_else(|_| context.failure.is_set())
            };
            self.context.worker.watch(poll, move || this.copy_later());
        }
        Ok(number)
    }

    /// Submits what can be submitted now. What work of the host there is, another thread does.
    pub(crate) fn advance(self: &Arc<Self>) {
        self.advance_by(Host::Fresh);
    }

    /// Makes the thread that copies do all work of the host that can be done.
    fn copy_later(self: &Arc<Self>) {
        let this = self.clone();
        let copier = &self.context.copier;
        copier.push(move || this.advance_by(Host::All));
    }

    fn advance_by(self: &Arc<Self>, host: Host) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        // An error of a batch that was held back is a failure of the device.
        let _ = self.pump(lock(&self.state), None, host);
        self.moved.notify_all();
        // The lane of a queue that was dropped may have waited for this.
        self.forget_ended();
    }

    /// Does what can be done now, in all lanes. Returns the error of the fresh batch, by lane and number, if it could not be
    /// submitted.
    fn pump<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        fresh: Option<(u64, u64)>,
        host: Host,
    ) -> Result<()> {
        let mut outcome = Ok(());
        let mut dropped = Vec::new();
        while let Some((at, next)) = self.next(&state, fresh, host) {
            let track = &mut state.tracks[at];
            let Some(first) = track.held.front_mut() else {
                break;
            };
            let job = match next {
                Next::Before => first.before.take(),
                Next::After => first.after.take(),
                Next::Submit => {
                    let is_fresh = fresh == Some((track.lane.number, first.number));
                    if let Err(failed) = self.submit(track) {
                        let error = self.context.error(failed);
                        let is_last = track.held.len() == 1;
                        if is_fresh && is_last {
                            // As if it had never been there.
                            if let Some(held) = track.held.pop_back() {
                                track.lane.set_given(held.number - 1);
                                track.waits.splice(0..0, held.waits);
                                dropped.push((held.before, held.after, held.buffers));
                                state.idle.extend(held.own);
                            }
                        } else {
                            self.context.failure.set(error.clone());
                        }
                        if is_fresh {
                            outcome = Err(error);
                        }
                    }
                    self.moved.notify_all();
                    continue;
                }
            };
            // The work of the host may take a while.
            track.is_busy = true;
            let number = track.lane.number;
            drop(state);
            if let Some(job) = job {
                job();
            }
            state = lock(&self.state);
            if let Some(track) = state.track(number) {
                track.is_busy = false;
                track.end();
            }
            self.moved.notify_all();
        }
        if self.context.failure.is_set() {
            // Nothing is submitted any more. Threads that wait for what was held back find the failure.
            self.moved.notify_all();
        }
        let is_left = state.tracks.iter().any(Track::wants_copy);
        drop(state);
        drop(dropped);
        if is_left && host == Host::Fresh && !self.context.failure.is_set() {
            self.copy_later();
        }
        outcome
    }

    fn next(&self, state: &State, fresh: Option<(u64, u64)>, host: Host) -> Option<(usize, Next)> {
        if self.context.failure.is_set() {
            return None;
        }
        let next = |track: &Track| {
            let first = track.held.front().filter(|_| !track.is_busy)?;
            let is_ours = host == Host::All || fresh == Some((track.lane.number, first.number));
            match first.is_submitted {
                false if track.wants_copy() => is_ours.then_some(Next::Before),
                false if !first.is_ready() => None,
                false => Some(Next::Submit),
                // Its end is watched for.
                true if host == Host::Fresh => None,
                true => match track.lane.is_complete(first.number) {
                    Ok(true) => Some(Next::After),
                    Ok(false) => None,
                    Err(failed) => {
                        // Unless the device is lost, the answer is had later.
                        drop(self.context.error(failed));
                        None
                    }
                },
            }
        };
        let mut tracks = state.tracks.iter().enumerate();
        tracks.find_map(|(at, track)| Some((at, next(track)?)))
    }

    /// Submits the first batch of a lane.
    fn submit(&self, track: &mut Track) -> Answer<()> {
        let Some(first) = track.held.front_mut() else {
            return Ok(());
        };
        let lane = &track.lane;
        let (mut semaphores, mut values) = (Vec::new(), Vec::new());
        for wait in &first.waits {
            match wait {
                // Batches of one VkQueue are ordered by their barriers.
                Wait::Point(point) if point.lane.queue == lane.queue => {}
                Wait::Point(point) => {
                    semaphores.push(point.lane.timeline);
                    values.push(point.number);
                }
                Wait::Host(_) => {}
            }
        }
        let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; semaphores.len()];
        let (signals, signalled) = ([lane.timeline], [first.number]);
        let mut timelines = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&values)
            .signal_semaphore_values(&signalled);
        let submit = [vk::SubmitInfo::default()
            .wait_semaphores(&semaphores)
            .wait_dst_stage_mask(&stages)
            .command_buffers(&first.commands)
            .signal_semaphores(&signals)
            .push_next(&mut timelines)];
        let mut submitted = Err(NO_QUEUE);
        if let Some(queue) = self.queues.get(lane.queue) {
            queue.with(&mut |queue| {
                // SAFETY: nobody else uses the VkQueue meanwhile (contract of `SharedQueue`), which is of the device and the family
                // of the command buffers. These have been recorded and are in no other submission; each semaphore is a live
                // timeline, kept by the lane or the waits; the signalled value is greater than all before
                // (VUID-VkSubmitInfo-pSignalSemaphores-03242), as numbers of a lane are submitted in order.
                let done = unsafe {
                    let device = &self.context.device;
                    device.queue_submit(queue, &submit, vk::Fence::null())
                };
                submitted = done.of("vkQueueSubmit");
            });
        }
        submitted?;
        lane.set_submitted(first.number);
        first.is_submitted = true;
        track.flying.push_back(Flying {
            number: first.number,
            own: first.own.take(),
            _buffers: take(&mut first.buffers),
            _waits: take(&mut first.waits),
        });
        track.end();
        Ok(())
    }

    /// Makes this thread wait until the batch of this number, if it is still there, was submitted.
    pub(crate) fn wait_submitted(&self, lane: &Lane, number: u64) -> Result<()> {
        // A batch that could not be submitted has taken its number back.
        let is_held = || lane.submitted() < number.min(lane.given());
        let waiting = |_: &mut State| is_held() && !self.context.failure.is_set();
        if is_held() {
            let state = self.moved.wait_while(lock(&self.state), waiting);
            drop(state.unwrap_or_else(PoisonError::into_inner));
        }
        match is_held() {
            true => self.context.check_alive(),
            false => Ok(()),
        }
    }

    /// Makes this thread wait while something holds of any lane, and the device has not failed.
    fn wait_while(&self, holds: impl Fn(&Track) -> bool) {
        let waiting =
            |state: &mut State| state.tracks.iter().any(&holds) && !self.context.failure.is_set();
        let state = self.moved.wait_while(lock(&self.state), waiting);
        drop(state.unwrap_or_else(PoisonError::into_inner));
    }

    /// Makes this thread wait until a point is reached; an error if the device has failed.
    pub(crate) fn wait_for(&self, point: &Point) -> Result<()> {
        self.wait_submitted(&point.lane, point.number)?;
        let waited = point.lane.wait(point.number);
        self.context.check(waited)?;
        self.context.check_alive()
    }
}

impl Lanes {
    /// Returns the lanes, of queues that were not dropped or of all.
    fn lanes(&self, all: bool) -> Vec<Arc<Lane>> {
        let state = lock(&self.state);
        let tracks = state.tracks.iter().filter(|track| all || !track.is_dropped);
        tracks.map(|track| track.lane.clone()).collect()
    }

    /// Makes this thread wait for the work of all queues, a program's on their VkQueues included.
    pub(crate) fn finish(self: &Arc<Self>) -> Result<()> {
        for lane in self.lanes(false) {
            // SAFETY: the batch does nothing. Its semaphore is signalled after all that the VkQueue has got.
            let pushed = unsafe { self.push(&lane, Batch::default()) };
            // Another thread may have dropped the queue.
            if pushed.is_err() && lock(&self.state).track(lane.number).is_some() {
                pushed?;
            }
        }
        let all = self.lanes(true).into_iter();
        let all: Vec<_> = all.map(|lane| (lane.given(), lane)).collect();
        for (number, lane) in &all {
            self.wait_submitted(lane, *number)?;
            let (number, lane) = ((*number).min(lane.submitted()), lane.clone());
            self.wait_for(&Point { lane, number })?;
        }
        // The work of the host behind these batches: here, or by the thread that does it already.
        self.advance_by(Host::All);
        self.wait_while(|track| {
            let first = track.held.front().map(|held| held.number);
            all.iter().any(|(number, lane)| {
                lane.number == track.lane.number && first.is_some_and(|first| first <= *number)
            })
        });
        self.context.check_alive()?;
        self.forget_ended();
        Ok(())
    }

    /// As [`finish`](Self::finish), as long as it takes. Afterwards no work that was queued before runs any more; after an error the
    /// device has failed.
    pub(crate) fn settle(self: &Arc<Self>) -> Result<()> {
        let until_ended = |wait: &dyn Fn() -> Answer<()>| {
            loop {
                match wait() {
                    Ok(()) => return,
                    Err(failed) if failed.is_lost() => {
                        self.context.failure.set(self.context.error(failed));
                        return;
                    }
                    Err(_) if self.context.enter().is_err() => return,
                    // Such as a lack of memory, which says nothing about the work.
                    Err(_) => std::thread::sleep(PAUSE),
                }
            }
        };
        for lane in self.lanes(true) {
            // What is held back after a failure is never submitted.
            let _ = self.wait_submitted(&lane, lane.given());
            until_ended(&|| lane.wait(lane.submitted()));
        }
        self.advance_by(Host::All);
        // Work of the host that has begun ends.
        self.wait_while(|track| {
            // An event that no batch waits for yet is polled all the same.
            let polls = track.waits.iter().any(|wait| !wait.is_submitted());
            polls || track.held.iter().any(|held| held.is_submitted)
        });
        let mut state = lock(&self.state);
        while state.tracks.iter().any(|track| track.is_busy) {
            let moved = self.moved.wait(state);
            state = moved.unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        for at in 0..self.queues.len() {
            while self.finish_queue(at).is_err() {
                if self.context.failure.is_set() {
                    until_ended(&|| self.wait_idle(at));
                    break;
                }
                if self.context.enter().is_err() {
                    break;
                }
                std::thread::sleep(PAUSE);
            }
        }
        self.forget_ended();
        self.context.check_alive()
    }

    /// Makes this thread wait for all that a VkQueue has got so far, a program's commands included, without its lock.
    fn finish_queue(self: &Arc<Self>, at: usize) -> Result<()> {
        let lane = self.add_to(at)?;
        // SAFETY: the batch does nothing. Its semaphore is signalled after all that the VkQueue has got.
        let pushed = unsafe { self.push(&lane, Batch::default()) };
        let ended = pushed.and_then(|number| {
            let lane = lane.clone();
            self.wait_for(&Point { lane, number })
        });
        self.drop_lane(&lane);
        ended
    }

    /// As [`finish_queue`](Self::finish_queue) after a failure, when nothing is submitted any more.
    fn wait_idle(&self, at: usize) -> Answer<()> {
        let mut waited = Ok(());
        if let (Some(_inside), Some(queue)) = (self.context.enter_to_drop(), self.queues.get(at)) {
            queue.with(&mut |queue| {
                // SAFETY: nobody else uses the VkQueue meanwhile (contract of `SharedQueue`), which is live.
                let idle = unsafe { self.context.device.queue_wait_idle(queue) };
                waited = idle.of("vkQueueWaitIdle");
            });
        }
        waited
    }

    /// Returns whether all work has ended. Never waits.
    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        let mut tracks = state.tracks.iter();
        tracks.all(|track| {
            let lane = &track.lane;
            track.held.is_empty() && matches!(lane.is_complete(lane.given()), Ok(true))
        })
    }

    /// Gives back what batches that have completed used.
    pub(crate) fn forget_ended(&self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        let ended = lock(&self.state).reap();
        drop(ended);
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this value made the pool and destroys it once. No command buffer of it is pending
        // (VUID-vkDestroyCommandPool-commandPool-00041): `Shared::drop` has waited for all batches.
        unsafe { self.context.device.destroy_command_pool(state.pool, None) };
    }
}

const NO_QUEUE: Failed = Failed {
    call: "SharedQueue::with",
    code: vk::Result::ERROR_UNKNOWN,
};
