//! [`Order`]: which work has ended, and what the host has to do then.
//!
//! All work of a device runs in one order, so an event is a number: it has completed once `done` has reached it. wgpu raises `done`
//! by a callback, in whichever thread polls the device first, the program's included. The callback does nothing else.
//!
//! A download ends in a staging buffer, from which the host copies it to its destination: it *lands*. That is done by a thread that waits
//! for it or asks about it. Events complete after the downloads before them have landed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow_device::Result;
use wgpu::SubmissionIndex;

use crate::landing::Landing;
use crate::sys::{Gpu, lock};

/// The pauses between polls of [`Polling::Program`].
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// How many bytes, or one more download, a thread lands that only asks.
const FEW: usize = 1 << 20;

/// How a thread waits for work of a wgpu device. Work runs whether or not anybody waits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Polling {
    /// By `PollType::Wait`. wgpu then holds a lock which those need who destroy a buffer or present a surface, until the work has ended.
    #[default]
    Wait,
    /// By polls at intervals of up to a millisecond, and without `PollType::Wait` unless the device has failed: for programs that poll their
    /// `wgpu::Device` themselves, as in each frame of a loop that renders.
    Program,
}

/// A point in the work of a device.
#[derive(Debug)]
pub struct Event {
    number: u64,
    /// What this crate had submitted last. The program may have submitted more before the event.
    submission: Option<SubmissionIndex>,
    /// Whether wgpu calls back for it. It completes with the next one that wgpu calls back for, otherwise.
    is_recorded: bool,
}

/// The order of a device's work.
pub(crate) struct Order {
    polling: Polling,
    ended: Arc<Ended>,
    state: Mutex<State>,
    /// Held by the thread that lands downloads.
    lander: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// The number of the last recorded event.
    last: u64,
    submission: Option<SubmissionIndex>,
    landings: VecDeque<Landing>,
    /// The number of the landing that is taking place.
    current: Option<u64>,
}

/// What wgpu has said of the end of work.
#[derive(Default)]
struct Ended {
    /// All work before the event of this number has ended.
    done: AtomicU64,
    /// wgpu has dropped a callback without a call, as it does if a callback of the program panics before it in the same poll.
    is_lost: AtomicBool,
}

/// What wgpu calls back for an event.
struct Callback {
    ended: Arc<Ended>,
    number: u64,
    is_called: bool,
}

impl Callback {
    fn call(mut self) {
        self.ended.done.fetch_max(self.number, Ordering::AcqRel);
        self.is_called = true;
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        if !self.is_called {
            self.ended.is_lost.store(true, Ordering::Release);
        }
    }
}

impl Order {
    pub(crate) fn new(polling: Polling) -> Self {
        Self {
            polling,
            ended: Arc::default(),
            state: Mutex::default(),
            lander: Mutex::default(),
        }
    }

    /// Work was submitted.
    pub(crate) fn submitted(&self, submission: SubmissionIndex) {
        lock(&self.state).submission = Some(submission);
    }

    /// A copy to a staging buffer was submitted, from where it lands once it has ended.
    pub(crate) fn arrives(&self, mut landing: Landing) {
        let mut state = lock(&self.state);
        landing.number = state.last + 1;
        state.landings.push_back(landing);
    }

    /// Records an event after the work so far, of the program too.
    pub(crate) fn record(&self, gpu: &Gpu) -> Result<Event> {
        let event = {
            let mut state = lock(&self.state);
            state.last += 1;
            Event {
                number: state.last,
                submission: state.submission.clone(),
                is_recorded: true,
            }
        };
        let callback = Callback {
            ended: self.ended.clone(),
            number: event.number,
            is_called: false,
        };
        gpu.caught("on_submitted_work_done", || {
            gpu.queue.on_submitted_work_done(move || callback.call());
        })?;
        // wgpu has then accepted all submissions so far, so it calls back only once they have ended. What it has not accepted would count
        // as done.
        gpu.check_alive()?;
        Ok(event)
    }

    /// Returns what completes with the next event that is recorded. Nobody polls for it, so that it may be asked about under locks: polls
    /// run callbacks of the program.
    pub(crate) fn mark(&self) -> Event {
        let state = lock(&self.state);
        Event {
            number: state.last + 1,
            submission: state.submission.clone(),
            is_recorded: false,
        }
    }

    /// Returns whether all work before an event has ended, and its downloads have landed.
    fn has_reached(&self, number: u64) -> bool {
        let state = lock(&self.state);
        let first = state.landings.front().map(|first| first.number);
        let mut left = [first, state.current].into_iter().flatten();
        self.has_ended(number) && left.all(|landing| landing > number)
    }

    fn has_ended(&self, number: u64) -> bool {
        self.ended.done.load(Ordering::Acquire) >= number
    }

    /// Returns whether an event has completed; an error if it never will. Waits for nothing.
    pub(crate) fn is_done(&self, gpu: &Gpu, event: &Event) -> Result<bool> {
        if event.is_recorded && !self.has_reached(event.number) {
            self.advance(gpu, FEW)?;
            return self.is_complete(gpu, event.number);
        }
        Ok(self.has_reached(event.number))
    }

    /// Runs the callbacks of what has ended, and lands so many bytes of what has arrived. Waits for nothing.
    pub(crate) fn advance(&self, gpu: &Gpu, most: usize) -> Result<()> {
        gpu.poll()?;
        // Otherwise another thread does that.
        if let Ok(_lander) = self.lander.try_lock() {
            self.land(gpu, most);
        }
        Ok(())
    }

    fn is_complete(&self, gpu: &Gpu, number: u64) -> Result<bool> {
        let is_complete = self.has_reached(number);
        // After that: a download that failed is taken out of the list once the failure is set.
        gpu.health.check()?;
        if !is_complete {
            gpu.check_alive()?;
            if self.ended.is_lost.load(Ordering::Acquire) {
                let text = "wgpu dropped a callback without a call: one of the program's panicked before it";
                return Err(gpu.health.fail(gpu.error("on_submitted_work_done", text)));
            }
        }
        Ok(is_complete)
    }

    /// Makes this thread wait for an event, and land the downloads before it.
    pub(crate) fn reach(&self, gpu: &Gpu, event: &Event) -> Result<()> {
        let mut submission = event.submission.clone();
        let mut pause = PAUSE.0;
        while !self.is_complete(gpu, event.number)? {
            self.step(gpu, event.number, submission.take(), &mut pause)?;
        }
        Ok(())
    }

    /// Waits for all work so far, of the program too. After an error no work runs any more, and nothing lands.
    pub(crate) fn synchronize(&self, gpu: &Gpu) -> Result<()> {
        drop(gpu.health.enter_even_if_failed()?);
        let reached = gpu.health.check().and_then(|()| {
            let last = self.record(gpu)?;
            self.reach(gpu, &last)
        });
        let Err(e) = reached else { return Ok(()) };
        // A device that the program destroyed still runs what it had accepted. One whose driver has failed runs nothing. A callback of the
        // program may have panicked, and another one may.
        let _ = (0..3).any(|_| gpu.wait(None).is_ok());
        let _inside = gpu.health.enter_even_if_failed()?;
        let e = gpu.health.fail(e);
        let lander = lock(&self.lander);
        let landings = std::mem::take(&mut lock(&self.state).landings);
        drop(lander);
        drop(landings);
        // SAFETY: the device has run what it had accepted, or its driver has failed and runs nothing (see above).
        Err(unsafe { gpu.health.lose(e) })
    }

    /// Waits for the first download before an event if there is one, or else for a submission, or for all that were made: then work of
    /// the program comes before the event. Lands what has arrived.
    fn step(
        &self,
        gpu: &Gpu,
        number: u64,
        submission: Option<SubmissionIndex>,
        pause: &mut Duration,
    ) -> Result<()> {
        match self.polling {
            Polling::Wait => {
                // One by one: the next ones arrive while one lands.
                let first = {
                    let state = lock(&self.state);
                    let first = state.landings.front();
                    let first = first.filter(|first| first.number <= number);
                    first.map(|first| first.submission.clone())
                };
                if first.is_some() || !self.has_ended(number) {
                    gpu.wait(first.or(submission))?;
                }
            }
            Polling::Program => drop(gpu.poll()?),
        }
        // A thread that stays here does not keep the lock.
        let inside = gpu.health.enter_even_if_failed()?;
        let lander = lock(&self.lander);
        let landed = self.land(gpu, usize::MAX);
        drop((lander, inside));
        if self.polling == Polling::Program && landed == 0 && !self.has_ended(number) {
            std::thread::sleep(*pause);
            *pause = (*pause * 2).min(PAUSE.1);
        }
        Ok(())
    }

    /// Lands downloads that have arrived, in their order, until so many bytes have landed. Returns how many have. The caller has the lock of
    /// the lander.
    fn land(&self, gpu: &Gpu, most: usize) -> usize {
        let mut landed = 0;
        while landed < most {
            let landing = {
                let mut state = lock(&self.state);
                let first = state.landings.front();
                if gpu.health.check().is_err() || first.is_none_or(|first| first.is_running()) {
                    break;
                }
                let landing = state.landings.pop_front();
                state.current = landing.as_ref().map(|landing| landing.number);
                landing
            };
            if let Some(landing) = landing {
                landed += landing.bytes();
                // An error is the device's failure, which every event reports.
                let _ = landing.land(gpu);
            }
            lock(&self.state).current = None;
        }
        landed
    }
}
