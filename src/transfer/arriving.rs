//! An array on its way to the host, driven by a task that polls.

use std::task::{Context, Poll, ready};

use crate::data::DeviceArray;
use crate::data::hidden::{Answers, Gathering, Request};
use crate::device::{Completion, Queue};
use crate::error::{Error, Result};
use crate::transfer::ToHost;
use crate::transfer::download::Download;
use crate::transfer::planner::{Extent, plan_with};

/// Brings an array, or what can be reached from it, to the host as [`DeviceArray::to_host`] does, with no
/// wait in a poll: lengths that
/// hide on the device, and the copies, are waited for by the task.
#[derive(Debug)]
pub(crate) struct Arriving {
    array: DeviceArray,
    extent: Extent,
    queue: Queue,
    /// What the task waits for before the next step.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    /// Reads of lengths that are done, and one that may be under way.
    Lengths(Vec<Read<Answers>>, Option<Read<Gathering>>),
    Copies(ToHost),
    Over,
}

/// What was asked for, and what came of it.
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

    /// Whether the host reads the memory where it is, so that nothing is gained by an early start.
    pub(crate) fn is_in_place(&self) -> bool {
        self.array.device().is_host_readable()
    }

    /// The array in memory that the host can read, and which is ready. Not polled again after that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<DeviceArray>> {
        loop {
            ready!(Completion::poll_all(&mut self.wait, cx))?;
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Start if self.is_in_place() => {
                    self.wait = self.array.ready_event()?.map(Completion::of);
                    self.stage = self.copies(None);
                }
                Stage::Start => self.plan(Vec::new())?,
                Stage::Lengths(mut answers, reading) => {
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
                    return Poll::Ready(Err(Error::argument("an array that has arrived")));
                }
            }
        }
    }

    fn copies(&self, download: Option<Download>) -> Stage {
        let array = self.array.clone();
        Stage::Copies(ToHost { array, download })
    }

    /// Plans with the lengths that are known; the copies start, or a read of the next lengths does.
    fn plan(&mut self, answers: Vec<Read<Answers>>) -> Result<()> {
        let (array, queue) = (&self.array, &self.queue);
        let (mut reading, mut unready) = (None, false);
        let plan = plan_with(array, self.extent, false, |tree, requests| {
            if let Some((_, answers)) = answers.iter().find(|(asked, _)| asked == requests) {
                return Ok(Some(answers));
            }
            if requests.iter().any(|request| request.on_host) && !array.is_ready()? {
                // The host reads these itself.
                unready = true;
                return Ok(None);
            }
            // SAFETY: `plan_with` asks for what lies in the tree's memory, to which nobody writes.
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
                (event, Stage::Lengths(answers, Some(reading)))
            }
            (None, None) => {
                let event = if unready { array.ready_event()? } else { None };
                (event, Stage::Lengths(answers, None))
            }
        };
        self.wait = event.map(Completion::of);
        self.stage = stage;
        Ok(())
    }
}
