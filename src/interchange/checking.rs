//! What an import checks by reading the memory, driven by a task that polls.

use std::task::{Context, Poll, ready};

use crate::data::DeviceRecordBatch;
use crate::data::hidden::{NullCheck, NullCounting};
use crate::data::host::unwrap;
use crate::device::Completion;
use crate::error::Result;
use crate::interchange::options::{ImportOptions, Validation};
use crate::interchange::validate::validate_full;
use crate::transfer::{Arriving, Extent};

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
    /// All values that safe calls can reach, on their way.
    Values(Box<Arriving>),
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
                    let queue = array.device().default_queue();
                    let coming = Arriving::new(array.clone(), Extent::Reachable, queue);
                    Stage::Values(Box::new(coming))
                }
                Stage::Values(mut coming) => match coming.poll(cx) {
                    Poll::Ready(host) => {
                        return Poll::Ready(validate_full(&unwrap(&host?)?));
                    }
                    Poll::Pending => {
                        self.stage = Stage::Values(coming);
                        return Poll::Pending;
                    }
                },
            };
            self.stage = next;
        }
    }
}
