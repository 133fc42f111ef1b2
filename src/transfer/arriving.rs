//! [`Arriving`]: a download as a state machine, for threads that poll, wait or await.

use std::task::{Context, Poll, ready};

use crate::data::DeviceArray;
use crate::data::gather::{Answers, Gathering, Request};
use crate::device::{Completion, SyncEvent};
use crate::error::{Error, Result};
use crate::transfer::planner::{Extent, plan_with};
use crate::transfer::to_slab::{DownloadQueues, ToSlab};

/// Copies an array, or what can be reached from it, to the host as [`DeviceArray::to_host`] does, in steps that never block:
/// reads of sizes that are stored in device memory, then the copies. Between two steps there is an event to wait for. What the
/// running copies use is kept if this is dropped.
#[derive(Debug)]
pub(crate) struct Arriving {
    array: DeviceArray,
    extent: Extent,
    queues: DownloadQueues,
    /// What the next step has to wait for.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    /// Reads of sizes and offsets that are done, and one that may still be running.
    Reading(Vec<Read<Answers>>, Option<Read<Gathering>>),
    /// The last stage. `None` if the host reads the array where it is.
    Copies(Option<ToSlab>),
    Over,
}

/// What was asked for, and the answers.
type Read<T> = (Vec<Request>, T);

impl Arriving {
    /// Makes a download that starts with its first poll.
    pub(crate) fn new(
        array: DeviceArray,
        extent: Extent,
        queues: impl Into<DownloadQueues>,
    ) -> Self {
        Self {
            array,
            extent,
            queues: queues.into(),
            wait: None,
            stage: Stage::Start,
        }
    }

    /// Queues the copies, after a wait for sizes that are stored in device memory. Does nothing yet if the host reads the array
    /// where it is.
    pub(super) fn queue_copies(&mut self) -> Result<()> {
        while !self.is_in_place() && !matches!(self.stage, Stage::Copies(_)) {
            self.wait_now()?;
            self.step()?;
        }
        Ok(())
    }

    fn wait_now(&mut self) -> Result<()> {
        if let Some(wait) = self.wait.take() {
            wait.event().wait()?;
        }
        Ok(())
    }

    /// Whether the host reads the memory in place, so that nothing is gained by an early start.
    pub(crate) fn is_in_place(&self) -> bool {
        self.array.device().is_host_readable()
    }

    /// Returns the array in memory that the host can read and that is ready. Later calls return an error.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<DeviceArray>> {
        loop {
            if let Err(e) = ready!(Completion::poll_all(&mut self.wait, cx)) {
                // The copies may still run: dropping the stage keeps what they use, and nothing reads it.
                self.stage = Stage::Over;
                return Poll::Ready(Err(e));
            }
            if matches!(self.stage, Stage::Copies(_)) {
                return Poll::Ready(self.take());
            }
            self.step()?;
        }
    }

    /// Takes the steps before the first wait, unless the host reads the array where it is.
    pub(super) fn start(&mut self) -> Result<()> {
        while !self.is_in_place() && self.wait.is_none() && !matches!(self.stage, Stage::Copies(_))
        {
            self.step()?;
        }
        Ok(())
    }

    /// Takes the steps that need no wait. Returns whether [`wait`](Self::wait) has nothing to wait for.
    pub(super) fn advance(&mut self) -> Result<bool> {
        loop {
            if let Some(wait) = &self.wait {
                if !wait.event().is_complete()? {
                    return Ok(false);
                }
                self.wait = None;
            }
            if matches!(self.stage, Stage::Copies(_)) {
                return Ok(true);
            }
            self.step()?;
        }
    }

    /// Returns the array, as [`poll`](Self::poll) does. Blocks this thread: one host wait for each step whose event
    /// [`advance`](Self::advance) has not seen completed.
    pub(super) fn wait(mut self) -> Result<DeviceArray> {
        if self.is_in_place() && matches!(self.stage, Stage::Start) {
            self.array.wait()?;
            return Ok(self.array);
        }
        loop {
            self.wait_now()?;
            if matches!(self.stage, Stage::Copies(_)) {
                return self.take();
            }
            self.step()?;
        }
    }

    /// Returns the array, whose copies were waited for.
    fn take(&mut self) -> Result<DeviceArray> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Copies(Some(mut copies)) => {
                copies.waited();
                copies.finish()
            }
            _ => Ok(self.array.clone()),
        }
    }

    /// Takes the next step, once what it has to wait for has completed. Does not block. An error ends the download.
    fn step(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Start if self.is_in_place() => {
                let event = self.array.ready_event_on(self.queues.copies())?;
                self.copies(None);
                self.wait_for(event);
                Ok(())
            }
            Stage::Start => self.plan(Vec::new()),
            Stage::Reading(mut answers, reading) => {
                if let Some((requests, mut reading)) = reading {
                    reading.waited();
                    answers.push((requests, reading.finish()?));
                }
                self.plan(answers)
            }
            Stage::Copies(_) | Stage::Over => Err(Error::argument(
                "the download is over: it has returned its data or an error",
            )),
        }
    }

    fn wait_for(&mut self, event: Option<SyncEvent>) {
        self.wait = event.map(Completion::of);
    }

    fn copies(&mut self, copies: Option<ToSlab>) {
        let event = copies.as_ref().and_then(|copies| copies.event().cloned());
        self.stage = Stage::Copies(copies);
        self.wait_for(event);
    }

    /// Plans with the numbers that are known; starts the copies, or else a read of the next numbers.
    fn plan(&mut self, answers: Vec<Read<Answers>>) -> Result<()> {
        let (array, queues) = (&self.array, &self.queues);
        let (mut reading, mut unready) = (None, false);
        let plan = plan_with(&[array], self.extent, None, |requests| {
            if let Some((_, answers)) = answers.iter().find(|(asked, _)| asked == requests) {
                return Ok(Some(answers));
            }
            if requests.iter().any(|request| request.on_host) && !array.is_ready()? {
                // The host reads these in place.
                unready = true;
                return Ok(None);
            }
            // SAFETY: the requests of `plan_with` lie in the array's memory (see there), to which nobody writes: imports and
            // constructors demand it.
            let started = unsafe { Gathering::of(array, requests, Some(queues.sizes()?)) }?;
            reading = Some((requests.to_vec(), started));
            Ok(None)
        })?;
        match (plan, reading) {
            (Some(plan), _) => {
                let copies = ToSlab::start(plan, array, queues.copies())?;
                self.copies(Some(copies));
            }
            (None, Some(reading)) => {
                let event = reading.1.event().cloned();
                self.stage = Stage::Reading(answers, Some(reading));
                self.wait_for(event);
            }
            (None, None) => {
                let event = match unready {
                    true => array.ready_event_on(queues.copies())?,
                    false => None,
                };
                self.stage = Stage::Reading(answers, None);
                self.wait_for(event);
            }
        }
        Ok(())
    }
}
