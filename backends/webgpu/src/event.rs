//! [`Timeline`]: which work has ended, and what the host has to do then.
//!
//! All work of a device runs in one order, so an event is a number: it has completed once `done` has reached it. wgpu raises `done`
//! by a callback, in whichever thread polls the device first, the program's included. The callback does nothing else.
//!
//! A download ends in a staging buffer, from which the host copies it to its destination: it *lands*. That is done by the thread that
//! waits for it, or by the device's own thread ([`Polling::Thread`]). Events complete after the downloads before them have landed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use arrow_device::device::EventPtr;
use arrow_device::device::parts::{Worker, exit};
use arrow_device::{Error, Result};
use wgpu::SubmissionIndex;

use crate::bell::Bell;
use crate::callback::{Callback, Ended, Tell};
use crate::landing::{Landing, overlap};
use crate::state::{Recorded, State};
use crate::sys::{Gpu, lock};

/// How long the device's thread leaves a download to a caller that waits for it: one thread less that has to be woken.
const GRACE: Duration = Duration::from_millis(1);
/// The pauses between polls of [`Polling::Program`].
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// Who polls a wgpu device, that is, runs the callbacks of work that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Polling {
    /// Whoever waits, and a thread of this crate while downloads run, by `PollType::Wait`. wgpu then holds a
    /// lock which those need who destroy a buffer or present a surface, until the work has ended.
    #[default]
    Thread,
    /// The program, as in a loop that renders: it calls [`WgpuDevice::poll`](crate::WgpuDevice::poll) or polls its `wgpu::Device` in
    /// each frame. This crate waits by polling at intervals of up to a millisecond, and asks so for events too, without
    /// `PollType::Wait`.
    Program,
}

/// The events of a device.
pub(crate) struct Timeline {
    gpu: Arc<Gpu>,
    polling: Polling,
    me: Weak<Self>,
    ended: Arc<Ended>,
    /// The last event that may complete: tests hold the others back.
    limit: AtomicU64,
    state: Mutex<State>,
    /// Rung when the device ends.
    bell: Arc<Bell>,
    /// Held by the thread that lands downloads.
    lander: Mutex<()>,
    worker: Worker,
}

impl Timeline {
    pub(crate) fn new(gpu: Arc<Gpu>, polling: Polling) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            gpu,
            polling,
            me: me.clone(),
            ended: Arc::default(),
            limit: AtomicU64::new(u64::MAX),
            state: Mutex::default(),
            bell: Arc::default(),
            lander: Mutex::default(),
            worker: Worker::new("arrow-device wgpu"),
        })
    }

    /// Work was submitted.
    pub(crate) fn submitted(&self, submission: SubmissionIndex) {
        lock(&self.state).submission = Some(submission);
    }

    /// A copy to a staging buffer was submitted, from where it lands once it has ended.
    pub(crate) fn arrives(&self, landing: impl FnOnce(Option<Tell>) -> Landing) {
        let mut landing = landing(self.told());
        {
            let mut state = lock(&self.state);
            landing.number = state.last + 1;
            state.landings.push_back(landing);
        }
        self.drive();
    }

    /// Waits until no download will write to this host memory, which the host is about to read.
    pub(crate) fn finish_writes(&self, memory: &[Range<usize>]) -> Result<()> {
        let _waiting = self.waiting();
        let mut pause = PAUSE.0;
        loop {
            self.gpu.check()?;
            let (last, is_landing) = {
                let state = lock(&self.state);
                let mut landings = state.landings.iter().rev();
                let last = landings.find(|landing| overlap(&landing.writes(), memory));
                let last = last.map(|landing| (landing.number, landing.submission.clone()));
                let current = state.current.as_ref();
                (
                    last,
                    current.is_some_and(|(_, writes)| overlap(writes, memory)),
                )
            };
            match last {
                Some((number, submission)) => self.step(number, Some(submission), &mut pause)?,
                // Another thread writes it now: for that, and for nothing of the device.
                None if is_landing => drop(lock(&self.lander)),
                None => return self.gpu.check(),
            }
        }
    }

    /// Whom the callbacks of wgpu tell: the program's polls run them, and no thread of this crate looks after them.
    fn told(&self) -> Option<Tell> {
        let me = self.me.clone();
        let tell = move || {
            if let Some(me) = me.upgrade() {
                me.push();
            }
        };
        (self.polling == Polling::Program).then(|| Box::new(tell) as Tell)
    }

    /// Numbers the work so far.
    fn mark(&self) -> Result<Recorded> {
        self.gpu.check()?;
        let recorded = {
            let mut state = lock(&self.state);
            state.last += 1;
            Recorded {
                number: state.last,
                submission: state.submission.clone(),
            }
        };
        let callback = Callback {
            ended: self.ended.clone(),
            number: recorded.number,
            is_called: false,
            told: self.told(),
        };
        self.gpu.caught("on_submitted_work_done", || {
            self.gpu
                .queue
                .on_submitted_work_done(move || callback.call());
        })?;
        // wgpu has then accepted all submissions so far, so it calls back only once they have ended. What it has not accepted would count
        // as done.
        self.gpu.check_alive()?;
        Ok(recorded)
    }

    /// Records an event after the work so far, of the program too.
    pub(crate) fn record(&self) -> Result<EventPtr> {
        let recorded = self.mark()?;
        let mut cell = Box::new(recorded.number);
        let address = &raw mut *cell;
        lock(&self.state)
            .events
            .insert(address.addr(), (recorded, cell));
        EventPtr::new(address.cast()).ok_or_else(|| Error::InvalidArgument("a null event".into()))
    }

    fn find(&self, event: EventPtr) -> Result<Recorded> {
        let state = lock(&self.state);
        let found = state.events.get(&event.as_ptr().addr());
        let found = found.map(|(recorded, _)| recorded.clone());
        found.ok_or_else(|| {
            let id = self.gpu.id;
            Error::InvalidArgument(
                format!("the event is not one of {id}, whose arrays carry none; wait for it before the import, and pass null").into(),
            )
        })
    }

    /// Returns an error if this is not a live event of the device.
    pub(crate) fn check(&self, event: EventPtr) -> Result<()> {
        self.gpu.check_process()?;
        self.find(event).map(drop)
    }

    pub(crate) fn release(&self, event: EventPtr) {
        let cell = lock(&self.state).events.remove(&event.as_ptr().addr());
        drop(cell);
    }

    /// Returns how many events are live.
    pub(crate) fn used(&self) -> usize {
        lock(&self.state).events.len()
    }

    /// Returns whether all work before an event has ended, and its downloads have landed.
    fn has_reached(&self, number: u64) -> bool {
        self.has_ended(number) && lock(&self.state).has_landed(number)
    }

    fn has_ended(&self, number: u64) -> bool {
        self.ended.done.load(Ordering::Acquire) >= number && !self.is_held(number)
    }

    fn is_held(&self, number: u64) -> bool {
        number > self.limit.load(Ordering::Acquire)
    }

    /// Holds back the events after the last one, and the downloads before them, as if their work were running; or no more.
    pub(crate) fn hold(&self, is_held: bool) {
        let last = lock(&self.state).last;
        self.limit
            .store(if is_held { last } else { u64::MAX }, Ordering::Release);
        self.push();
    }

    /// Returns whether an event has completed; an error if it never will.
    fn is_complete(&self, number: u64) -> Result<bool> {
        let is_complete = self.has_reached(number);
        // After that: a download that failed is taken out of the list once the failure is set.
        self.check_device()?;
        if !is_complete {
            self.notice()?;
        }
        Ok(is_complete)
    }

    /// Returns an error if the device has failed.
    fn check_device(&self) -> Result<()> {
        self.gpu.check_process()?;
        self.gpu.failure.check()
    }

    /// Finds out whether what runs will never end.
    fn notice(&self) -> Result<()> {
        self.gpu.check_alive()?;
        match self.ended.is_lost.load(Ordering::Acquire) {
            true => {
                let text = "wgpu dropped a callback without a call: one of the program's panicked before it";
                Err(self
                    .gpu
                    .failed(self.gpu.error("on_submitted_work_done", text)))
            }
            false => Ok(()),
        }
    }

    pub(crate) fn query(&self, event: EventPtr) -> Result<bool> {
        self.check_device()?;
        let Recorded { number, .. } = self.find(event)?;
        if !self.has_reached(number) {
            self.gpu.poll()?;
        }
        self.is_complete(number)
    }

    pub(crate) fn wait(&self, event: EventPtr) -> Result<()> {
        self.check_device()?;
        let recorded = self.find(event)?;
        self.reach(&recorded)
    }

    /// Waits for all work so far, of the program too.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let recorded = self.mark()?;
        self.reach(&recorded)
    }

    /// As [`synchronize`](Self::synchronize). After an error no work runs any more, and nothing lands.
    pub(crate) fn settle(&self) -> Result<()> {
        self.gpu.check_process()?;
        let Err(e) = self.synchronize() else {
            return Ok(());
        };
        // A device that the program destroyed still runs what it had accepted. One whose driver has failed runs nothing.
        let ended = || match self.polling {
            Polling::Thread => self.gpu.wait(None).is_ok(),
            Polling::Program => {
                let mut polled = self.gpu.poll();
                while let Ok(false) = polled {
                    std::thread::sleep(PAUSE.1);
                    polled = self.gpu.poll();
                }
                polled.is_ok()
            }
        };
        // A callback of the program may have panicked.
        let _ = (0..3).any(|_| ended());
        let e = self.gpu.failed(e);
        let Some(_inside) = exit::enter() else {
            return Err(e);
        };
        let lander = lock(&self.lander);
        let landings = std::mem::take(&mut lock(&self.state).landings);
        drop(lander);
        drop(landings);
        Err(e)
    }

    /// Makes this thread wait for an event, and land the downloads before it.
    fn reach(&self, recorded: &Recorded) -> Result<()> {
        let _waiting = self.waiting();
        let mut submission = recorded.submission.clone();
        let mut pause = PAUSE.0;
        while !self.is_complete(recorded.number)? {
            self.step(recorded.number, submission.take(), &mut pause)?;
        }
        Ok(())
    }

    /// Waits for the first download before an event if there is one, or else for a submission, or for all that were made: then work of
    /// the program comes before the event. Lands what has arrived.
    fn step(
        &self,
        number: u64,
        submission: Option<SubmissionIndex>,
        pause: &mut Duration,
    ) -> Result<()> {
        match self.polling {
            _ if self.is_held(number) => std::thread::sleep(PAUSE.1),
            Polling::Thread => {
                // One by one: the next ones arrive while one lands.
                let landing = lock(&self.state).first_landing(number);
                self.gpu.wait(landing.or(submission))?;
            }
            Polling::Program => {
                self.gpu.poll()?;
                let has_arrived = {
                    let state = lock(&self.state);
                    state
                        .landings
                        .front()
                        .is_some_and(|first| !first.is_running())
                };
                if !has_arrived && !self.has_ended(number) {
                    std::thread::sleep(*pause);
                    *pause = (*pause * 2).min(PAUSE.1);
                }
            }
        }
        self.land();
        Ok(())
    }

    /// Says that a thread waits, until the value is dropped.
    fn waiting(&self) -> Waiting<'_> {
        lock(&self.state).waiting += 1;
        Waiting(self)
    }

    /// Lands the downloads that have arrived, in their order. Waits for another thread that does.
    fn land(&self) {
        // A thread that stays here does not keep the lock.
        let Some(_inside) = exit::enter() else { return };
        let _lander = lock(&self.lander);
        loop {
            let landing = {
                let mut state = lock(&self.state);
                let first = state.landings.front();
                if self.gpu.failure.is_set()
                    || first.is_none_or(|first| first.is_running() || self.is_held(first.number))
                {
                    return;
                }
                let landing = state.landings.pop_front();
                let current = |landing: &Landing| (landing.number, landing.writes());
                state.current = landing.as_ref().map(current);
                landing
            };
            if let Some(landing) = landing {
                // An error is the device's failure, which every event reports.
                let _ = landing.land(&self.gpu);
            }
            lock(&self.state).current = None;
        }
    }

    /// Lands what is ready, on the device's worker: not in a callback of wgpu.
    pub(crate) fn push(&self) {
        {
            let state = lock(&self.state);
            // A thread that waits lands by itself.
            if state.landings.is_empty() || state.waiting > 0 {
                return;
            }
        }
        let Some(me) = self.me.upgrade() else { return };
        self.worker.push(move || {
            me.land();
            leave(me);
        });
    }

    /// Waits a moment for the device's thread to end, if it has nothing left to do: at the end of the process, a driver may not
    /// be unloaded on a thread.
    pub(crate) fn end(&self) {
        for _ in 0..100 {
            if !lock(&self.state).landings.is_empty() || self.worker.pending() == 0 {
                return;
            }
            self.bell.ring();
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Starts the device's thread, unless it runs.
    fn drive(&self) {
        if self.polling != Polling::Thread
            || std::mem::replace(&mut lock(&self.state).is_driven, true)
        {
            return;
        }
        let (me, bell) = (self.me.clone(), self.bell.clone());
        self.worker.push(move || run(&me, &bell));
    }

    /// Returns what the device's thread does next.
    fn next(&self, is_alone: bool) -> Next {
        let mut state = lock(&self.state);
        if state.landings.is_empty() || self.gpu.failure.is_set() {
            state.is_driven = false;
            return Next::End;
        }
        match state.landings.front() {
            Some(landing) if is_alone && state.waiting == 0 => {
                Next::Reach(landing.number, Some(landing.submission.clone()))
            }
            _ => Next::Leave(state.front()),
        }
    }

    /// Returns whether nobody has cared for a download.
    fn is_alone(&self, front: Option<usize>) -> bool {
        let state = lock(&self.state);
        state.waiting == 0 && state.front() == front
    }
}

/// What the device's thread does.
enum Next {
    End,
    /// Waits for an event, and for a submission before it first.
    Reach(u64, Option<SubmissionIndex>),
    /// Leaves the first download to others for a while.
    Leave(Option<usize>),
}

/// The device's thread: until nothing lands. It keeps the device only while it works, so that it is not the
/// one that drops it, at the end of the process for example.
fn run(timeline: &Weak<Timeline>, bell: &Bell) {
    // Whether nobody waits for the downloads.
    let mut is_alone = false;
    let mut before = 0;
    loop {
        let Some(me) = timeline.upgrade() else { return };
        match me.next(is_alone) {
            Next::End => return leave(me),
            Next::Reach(number, submission) => {
                // If that was not enough, work of the program comes before the event.
                let submission = submission.filter(|_| number != before);
                before = number;
                // An error is the device's failure.
                let _ = me.step(number, submission, &mut PAUSE.0.clone());
                leave(me);
            }
            Next::Leave(front) => {
                leave(me);
                bell.wait(GRACE);
                let Some(me) = timeline.upgrade() else { return };
                is_alone = me.is_alone(front);
                leave(me);
            }
        }
    }
}

/// Drops a handle on the device's thread, which may be the last one: not while the process ends.
fn leave(me: Arc<Timeline>) {
    match exit::enter() {
        Some(_inside) => drop(me),
        None => std::mem::forget(me),
    }
}

/// A thread that waits.
struct Waiting<'a>(&'a Timeline);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).waiting -= 1;
        // What callbacks have left to this thread.
        if self.0.polling == Polling::Program {
            self.0.push();
        }
    }
}
