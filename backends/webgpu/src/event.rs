//! [`Timeline`]: which work has ended, and what the host has to do then.
//!
//! All work of a device runs in one order, so an event is a number: it has completed once `done` has reached it. wgpu raises `done`
//! by a callback, in whichever thread polls the device first, the program's included. The callback does nothing else.
//!
//! A download ends in a staging buffer, from which the host copies it to its destination: it *lands*. That is done by the thread that
//! waits for it, or by the device's own thread ([`Polling::Thread`]), which also calls wakers. Events complete after the downloads before
//! them have landed.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use arrow_device::device::EventPtr;
use arrow_device::device::parts::Worker;
use arrow_device::{Error, Result};
use wgpu::{MapMode, SubmissionIndex};

use crate::staging::Shelf;
use crate::sys::{Gpu, lock};

/// How long the device's thread leaves a download to a caller that waits for it: one thread less that has to be woken.
const GRACE: Duration = Duration::from_millis(1);
/// The pauses between polls of [`Polling::Program`].
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// Who polls a wgpu device, that is, runs the callbacks of work that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Polling {
    /// Whoever waits, and a thread of this crate while downloads run or wakers are registered, by `PollType::Wait`. wgpu then holds a
    /// lock which those need who destroy a buffer or present a surface, until the work has ended.
    #[default]
    Thread,
    /// The program, as in a loop that renders: it calls [`WgpuDevice::poll`](crate::WgpuDevice::poll) or polls its `wgpu::Device` in
    /// each frame. This crate has no thread that polls, and waits by polling at intervals of up to a millisecond, without
    /// `PollType::Wait`.
    Program,
}

/// A download whose copy to a staging buffer was submitted.
pub(crate) struct Landing {
    buffer: wgpu::Buffer,
    home: Arc<Shelf>,
    parts: Vec<Part>,
    /// The number of the next event when it was submitted: the first one that includes it.
    number: u64,
    submission: SubmissionIndex,
    state: Arc<AtomicU8>,
}

/// The states of a [`Landing`].
const RUNNING: u8 = 0;
const ARRIVED: u8 = 1;
const FAILED: u8 = 2;

/// Bytes of a staging buffer, and where they go.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) from: usize,
    pub(crate) to: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: the type only holds an address. `land` writes there, where the contract of `RawQueue::copy` allows it.
unsafe impl Send for Part {}

/// An event that was recorded.
#[derive(Clone)]
struct Recorded {
    number: u64,
    /// What this crate had submitted last. The program may have submitted more before the event.
    submission: Option<SubmissionIndex>,
}

/// The events of a device.
pub(crate) struct Timeline {
    gpu: Arc<Gpu>,
    polling: Polling,
    me: Weak<Self>,
    /// All work before the event of this number has ended.
    done: Arc<AtomicU64>,
    /// The last event that may complete: tests hold the others back.
    limit: AtomicU64,
    state: Mutex<State>,
    /// Signalled when a waker is registered.
    wakes: Condvar,
    /// Held by the thread that lands downloads.
    lander: Mutex<()>,
    worker: Worker,
}

#[derive(Default)]
struct State {
    /// The number of the last event.
    last: u64,
    submission: Option<SubmissionIndex>,
    /// The live events, by address.
    events: HashMap<usize, (Recorded, Box<u64>)>,
    landings: VecDeque<Landing>,
    /// The number of the landing that is taking place.
    current: Option<u64>,
    wakers: Vec<(Recorded, Waker)>,
    /// How many threads wait for events. They land the downloads before those.
    waiting: usize,
    /// The device's thread has a job.
    is_driven: bool,
}

impl State {
    /// Returns the submission of the first download, if that comes before an event.
    fn first_landing(&self, event: u64) -> Option<SubmissionIndex> {
        let first = self.landings.front().filter(|first| first.number <= event);
        first.map(|first| first.submission.clone())
    }

    /// Returns whether all downloads before an event have landed.
    fn has_landed(&self, event: u64) -> bool {
        let first = self.landings.front().map(|first| first.number);
        let mut left = [first, self.current].into_iter().flatten();
        left.all(|landing| landing > event)
    }

    /// Returns what tells the first download from others.
    fn front(&self) -> Option<*const AtomicU8> {
        self.landings.front().map(|first| Arc::as_ptr(&first.state))
    }

    fn is_idle(&self) -> bool {
        self.landings.is_empty() && self.wakers.is_empty()
    }
}

impl Timeline {
    pub(crate) fn new(gpu: Arc<Gpu>, polling: Polling) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            gpu,
            polling,
            me: me.clone(),
            done: Arc::default(),
            limit: AtomicU64::new(u64::MAX),
            state: Mutex::default(),
            wakes: Condvar::new(),
            lander: Mutex::default(),
            worker: Worker::new("arrow-device wgpu"),
        })
    }

    /// Work was submitted.
    pub(crate) fn submitted(&self, submission: SubmissionIndex) {
        lock(&self.state).submission = Some(submission);
    }

    /// A copy to a staging buffer was submitted: maps it, and copies from there once it has ended. Within [`Gpu::call`].
    pub(crate) fn arrives(
        &self,
        buffer: wgpu::Buffer,
        home: Arc<Shelf>,
        parts: Vec<Part>,
        submission: SubmissionIndex,
    ) {
        let state = Arc::new(AtomicU8::new(RUNNING));
        let set = state.clone();
        buffer.map_async(MapMode::Read, .., move |mapped| {
            let now = if mapped.is_ok() { ARRIVED } else { FAILED };
            set.store(now, Ordering::Release);
        });
        {
            let mut all = lock(&self.state);
            let number = all.last + 1;
            all.landings.push_back(Landing {
                buffer,
                home,
                parts,
                number,
                submission,
                state,
            });
        }
        self.drive();
    }

    /// Waits until no download will write to this host memory, which the host is about to read.
    pub(crate) fn finish_writes(&self, memory: &[Range<usize>]) -> Result<()> {
        let is_written = |part: &Part| {
            let (first, end) = (part.to.addr(), part.to.addr() + part.bytes);
            memory
                .iter()
                .any(|range| range.start < end && first < range.end)
        };
        let number = {
            let state = lock(&self.state);
            let mut landings = state.landings.iter().rev();
            let found = landings.find(|landing| landing.parts.iter().any(is_written));
            // Of one that is taking place nobody knows.
            found.map(|landing| landing.number).or(state.current)
        };
        let Some(number) = number else {
            return Ok(());
        };
        let _waiting = self.waiting();
        let mut pause = PAUSE.0;
        while !lock(&self.state).has_landed(number) {
            self.gpu.check()?;
            self.step(number, None, &mut pause)?;
        }
        self.gpu.check()
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
        let (done, number) = (self.done.clone(), recorded.number);
        let program = match self.polling {
            Polling::Thread => None,
            Polling::Program => Some(self.me.clone()),
        };
        let callback = move || {
            done.fetch_max(number, Ordering::AcqRel);
            if let Some(timeline) = program.as_ref().and_then(Weak::upgrade) {
                timeline.push();
            }
        };
        self.gpu.caught("on_submitted_work_done", || {
            self.gpu.queue.on_submitted_work_done(callback);
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
        self.done.load(Ordering::Acquire) >= number && !self.is_held(number)
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
        self.gpu.check()?;
        let is_complete = self.has_reached(number);
        if !is_complete {
            self.gpu.check_alive()?;
        }
        Ok(is_complete)
    }

    pub(crate) fn query(&self, event: EventPtr) -> Result<bool> {
        self.gpu.check()?;
        let Recorded { number, .. } = self.find(event)?;
        if !self.has_reached(number) {
            self.gpu.poll()?;
        }
        self.is_complete(number)
    }

    pub(crate) fn wait(&self, event: EventPtr) -> Result<()> {
        self.gpu.check()?;
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
                        .is_some_and(|first| first.state.load(Ordering::Acquire) != RUNNING)
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
        let _lander = lock(&self.lander);
        loop {
            let landing = {
                let mut state = lock(&self.state);
                let first = state.landings.front();
                if self.gpu.failure.is_set()
                    || first.is_none_or(|first| {
                        first.state.load(Ordering::Acquire) == RUNNING || self.is_held(first.number)
                    })
                {
                    return;
                }
                let landing = state.landings.pop_front();
                state.current = landing.as_ref().map(|landing| landing.number);
                landing
            };
            if let Some(landing) = landing {
                // An error is the device's failure, which every event reports.
                let _ = self.copy(landing);
            }
            lock(&self.state).current = None;
        }
    }

    fn copy(&self, landing: Landing) -> Result<()> {
        let Landing {
            buffer,
            home,
            parts,
            state,
            ..
        } = landing;
        let failed = |e: Error| self.gpu.failed(e);
        if state.load(Ordering::Acquire) == FAILED {
            self.gpu.check_alive()?;
            return Err(failed(
                self.gpu
                    .error("map_async", "a staging buffer could not be mapped"),
            ));
        }
        let copied = self.gpu.call("get_mapped_range", |_, _| {
            let view = buffer.get_mapped_range(..).map_err(|e| e.to_string())?;
            for Part { from, to, bytes } in parts {
                let from = &view[from..from + bytes];
                // SAFETY: the contract of `RawQueue::copy` keeps the destination until an event that includes this copy has
                // completed, or the device was settled, which waits for this thread.
                unsafe { from.as_ptr().copy_to_nonoverlapping(to, bytes) };
            }
            drop(view);
            buffer.unmap();
            Ok::<_, String>(())
        });
        copied
            .and_then(|copied| copied.map_err(|e| self.gpu.error("get_mapped_range", e)))
            .map_err(failed)?;
        home.give(buffer);
        Ok(())
    }

    /// Calls a waker once an event has completed, or never will. Returns `false` if it has completed already.
    pub(crate) fn notify(&self, event: EventPtr, waker: &Waker) -> Result<bool> {
        self.gpu.check()?;
        let recorded = self.find(event)?;
        if !self.has_reached(recorded.number) {
            self.gpu.poll()?;
        }
        if self.is_complete(recorded.number)? {
            return Ok(false);
        }
        lock(&self.state).wakers.push((recorded, waker.clone()));
        self.wakes.notify_one();
        self.drive();
        // Its callback may have run before the waker was there.
        if self.polling == Polling::Program {
            self.push();
        }
        Ok(true)
    }

    /// Calls the wakers of events that have completed, or never will.
    fn wake(&self) {
        let ready: Vec<_> = {
            let mut state = lock(&self.state);
            let wakers = std::mem::take(&mut state.wakers);
            drop(state);
            let is_failed = self.gpu.failure.is_set();
            let (ready, rest): (Vec<_>, Vec<_>) = wakers
                .into_iter()
                .partition(|(recorded, _)| is_failed || self.has_reached(recorded.number));
            state = lock(&self.state);
            state.wakers.extend(rest);
            ready
        };
        for (_, waker) in ready {
            // A panic of one must not keep the others waiting.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Lands and wakes what is ready, on the device's worker: not in a callback of wgpu.
    pub(crate) fn push(&self) {
        {
            let state = lock(&self.state);
            // A thread that waits lands by itself.
            if state.is_idle() || state.waiting > 0 && state.wakers.is_empty() {
                return;
            }
        }
        let Some(me) = self.me.upgrade() else { return };
        self.worker.push(move || {
            me.land();
            me.wake();
        });
    }

    /// Waits until the device's thread has nothing to do: not for long, if all work has ended.
    pub(crate) fn finish(&self) {
        self.worker.finish();
    }

    /// Starts the device's thread, unless it runs.
    fn drive(&self) {
        if self.polling != Polling::Thread
            || std::mem::replace(&mut lock(&self.state).is_driven, true)
        {
            return;
        }
        if let Some(me) = self.me.upgrade() {
            self.worker.push(move || me.run());
        }
    }

    /// The device's thread: until nothing lands and no waker is registered.
    fn run(&self) {
        // Whether nobody waits for the downloads.
        let mut is_alone = false;
        let mut before = 0;
        while let Some((number, submission)) = self.next(&mut is_alone) {
            // If that was not enough, work of the program comes before the event.
            let submission = submission.filter(|_| number != before);
            before = number;
            // An error is the device's failure.
            let _ = self.step(number, submission, &mut PAUSE.0.clone());
            self.wake();
        }
    }

    /// Returns the number of an event that the device's thread waits for, and the submission before it; `None` at its end.
    fn next(&self, is_alone: &mut bool) -> Option<(u64, Option<SubmissionIndex>)> {
        let mut state = lock(&self.state);
        loop {
            if state.is_idle() || self.gpu.failure.is_set() {
                state.is_driven = false;
                return None;
            }
            if !state.wakers.is_empty() || *is_alone && state.waiting == 0 {
                break;
            }
            let front = state.front();
            let waited = self.wakes.wait_timeout(state, GRACE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            *is_alone = state.waiting == 0 && state.front() == front;
        }
        let wakers = state.wakers.iter().map(|(recorded, _)| recorded);
        match wakers.min_by_key(|recorded| recorded.number) {
            Some(waker) => Some((waker.number, waker.submission.clone())),
            None => state
                .landings
                .front()
                .map(|first| (first.number, Some(first.submission.clone()))),
        }
    }
}

/// A thread that waits.
struct Waiting<'a>(&'a Timeline);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).waiting -= 1;
    }
}
