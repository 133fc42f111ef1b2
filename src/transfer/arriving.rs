//! A download that a task polls.

use std::task::{Context, Poll, ready};

use crate::data::DeviceArray;
use crate::data::gather::{Answers, Gathering, Request};
use crate::device::{Completion, Queue};
use crate::error::{Error, Result};
use crate::transfer::ToHost;
use crate::transfer::download::Download;
use crate::transfer::planner::{Extent, plan_with};

/// Copies an array, or what can be reached from it, to the host as [`DeviceArray::to_host`] does. A poll never
/// blocks: the task waits for sizes that are stored in device memory, and for the copies.
#[derive(Debug)]
pub(crate) struct Arriving {
    array: DeviceArray,
    extent: Extent,
    queue: Queue,
    /// What the next step has to wait for.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    /// Reads of sizes and offsets that are done, and one that may still be running.
    Reading(Vec<Read<Answers>>, Option<Read<Gathering>>),
    Copies(ToHost),
    Over,
}

/// What was asked for, and the answers.
type Read<T> = (Vec<Request>, T);

impl Arriving {
    pub(crate) fn new(array: DeviceArray, extent: Extent, queue: Queue) -> Self {
        Self {
            array,
            extent,
            queue,
            wait: None,
            stage: Stage::Start,
        }
    }

    /// Whether the host reads the memory in place, so that nothing is gained by an early start.
    pub(crate) fn is_in_place(&self) -> bool {
        self.array.device().is_host_readable()
    }

    /// Returns the array in memory that the host can read and that is ready. Must not be polled again after that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<DeviceArray>> {
        loop {
            ready!(Completion::poll_all(&mut self.wait, cx))?;
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Start if self.is_in_place() => {
                    self.wait = self.array.ready_event()?.map(Completion::of);
                    self.stage = self.copies(None);
                }
                Stage::Start => self.plan(Vec::new())?,
                Stage::Reading(mut answers, reading) => {
                    if let Some((requests, mut reading)) = reading {
                        reading.waited();
                        answers.push((requests, reading.finish()?));
                    }
                    self.plan(answers)?;
                }
                Stage::Copies(mut to_host) => {
                    if let Some(download) = &mut to_host.download {
                        download.waited();
                    }
                    return Poll::Ready(to_host.finish());
                }
                Stage::Over => {
                    return Poll::Ready(Err(Error::argument("the download is over")));
                }
            }
        }
    }

    fn copies(&self, download: Option<Download>) -> Stage {
        let array = self.array.clone();
        Stage::Copies(ToHost { array, download })
    }

    /// Plans with the numbers that are known; starts the copies, or else a read of the next numbers.
    fn plan(&mut self, answers: Vec<Read<Answers>>) -> Result<()> {
        let (array, queue) = (&self.array, &self.queue);
        let (mut reading, mut unready) = (None, false);
        let plan = plan_with(array, self.extent, false, |tree, requests| {
            if let Some((_, answers)) = answers.iter().find(|(asked, _)| asked == requests) {
                return Ok(Some(answers));
            }
            if requests.iter().any(|request| request.on_host) && !array.is_ready()? {
                // The host reads these in place.
                unready = true;
                return Ok(None);
            }
            // SAFETY: the requests of `plan_with` lie in the tree's memory (see there), to which nobody writes: imports and
            // constructors demand it.
            let started = unsafe { Gathering::start(tree, requests, Some(queue)) }?;
            reading = Some((requests.to_vec(), started));
            Ok(None)
        })?;
        let (event, stage) = match (plan, reading) {
            (Some(plan), _) => {
                let download = Download::of(plan, array, queue)?;
                let event = download.event().cloned();
                (event, self.copies(Some(download)))
            }
            (None, Some(reading)) => {
                let event = reading.1.event().cloned();
                (event, Stage::Reading(answers, Some(reading)))
            }
            (None, None) => {
                let event = if unready { array.ready_event()? } else { None };
                (event, Stage::Reading(answers, None))
            }
        };
        self.wait = event.map(Completion::of);
        self.stage = stage;
        Ok(())
    }
}
