//! What an import checks by reading the memory, driven by a task that polls.

use std::task::{Context, Poll, ready};

use crate::data::hidden::{NullCheck, NullCounting};
use crate::data::host::unwrap;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::Completion;
use crate::error::Result;
use crate::interchange::import::whole_parts;
use crate::interchange::options::{ImportOptions, Validation};
use crate::interchange::validate::validate_full;
use crate::transfer::Arriving;

/// Checks a batch after [`DeviceRecordBatch::import_unread`], with no wait in a poll.
#[derive(Debug)]
pub(crate) struct Checking {
    validation: Validation,
    /// What the task waits for before the next step.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    /// The memory is ready.
    Ready,
    NullCheck(NullCheck),
    /// The root's null count, which only its mask tells.
    Root,
    RootCount(NullCounting),
    Rows,
    /// What is still to be validated, the next one last, and what of it is coming.
    Values(Vec<(DeviceArray, String)>, Option<(Box<Arriving>, String)>),
}

impl Checking {
    pub(crate) fn new(options: &ImportOptions) -> Self {
        Self {
            validation: options.validation,
            wait: None,
            stage: Stage::Start,
        }
    }

    /// `Ok` once `batch`, always the same one, is good. Not polled again after that.
    pub(crate) fn poll(
        &mut self,
        batch: &DeviceRecordBatch,
        cx: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        let full = self.validation == Validation::Full;
        loop {
            ready!(Completion::poll_all(&mut self.wait, cx))?;
            let array = batch.as_struct();
            let next = match std::mem::replace(&mut self.stage, Stage::Rows) {
                Stage::Start => {
                    // Most batches have nothing to be read.
                    if full || array.null_count().is_none() {
                        self.wait = array.ready_event()?.map(Completion::of);
                    }
                    Stage::Ready
                }
                Stage::Ready if full => {
                    let check = NullCheck::start(array.tree())?;
                    self.wait = check.event().cloned().map(Completion::of);
                    Stage::NullCheck(check)
                }
                Stage::Ready => Stage::Root,
                Stage::NullCheck(mut check) => {
                    check.waited();
                    check.finish(array.tree())?;
                    Stage::Root
                }
                Stage::Root if array.null_count().is_none() => {
                    let counting = NullCounting::start(array, vec![array.view()])?;
                    self.wait = counting.event().cloned().map(Completion::of);
                    Stage::RootCount(counting)
                }
                Stage::Root => Stage::Rows,
                Stage::RootCount(mut counting) => {
                    counting.waited();
                    counting.finish(array)?;
                    Stage::Rows
                }
                Stage::Rows => {
                    batch.check_rows()?;
                    if !full {
                        return Poll::Ready(Ok(()));
                    }
                    let mut parts = whole_parts(array);
                    parts.reverse();
                    Stage::Values(parts, None)
                }
                Stage::Values(parts, Some((mut coming, path))) => match coming.poll(cx) {
                    Poll::Ready(host) => {
                        validate_full(&unwrap(&host?)?, &path)?;
                        Stage::Values(parts, None)
                    }
                    Poll::Pending => {
                        self.stage = Stage::Values(parts, Some((coming, path)));
                        return Poll::Pending;
                    }
                },
                Stage::Values(mut parts, None) => match parts.pop() {
                    Some((part, path)) => {
                        let queue = part.device().default_queue();
                        let coming = Box::new(Arriving::new(part, queue));
                        Stage::Values(parts, Some((coming, path)))
                    }
                    None => return Poll::Ready(Ok(())),
                },
            };
            self.stage = next;
        }
    }
}
