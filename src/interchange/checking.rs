//! The checks of an import that read the memory, as a task polls them.

use std::task::{Context, Poll, ready};

use crate::data::DeviceRecordBatch;
use crate::data::batch::check_no_nulls;
use crate::data::host::unwrap;
use crate::data::nulls::NullCounting;
use crate::device::Completion;
use crate::error::Result;
use crate::interchange::import::start_counting;
use crate::interchange::options::{ImportOptions, Validation};
use crate::interchange::validate::{check, doubtful};
use crate::transfer::{Arriving, Extent};

/// Checks a batch after [`DeviceRecordBatch::import_unread`]. A poll never blocks.
#[derive(Debug)]
pub(crate) struct Checking {
    validation: Validation,
    /// What the next step has to wait for.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    /// The memory is ready.
    Ready,
    Nulls(NullCounting),
    Rows,
    /// All values that safe calls can reach and that may be invalid, on their way.
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

    /// Returns `Ok` once `batch`, the same one in every poll, has passed. Must not be polled again
    /// after that.
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
                    // Nothing is read of most batches.
                    if full || array.null_count().is_none() {
                        self.wait = array.ready_event()?.map(Completion::of);
                    }
                    Stage::Ready
                }
                Stage::Ready => match start_counting(array, self.validation)? {
                    None => Stage::Rows,
                    Some(counting) => {
                        self.wait = counting.reading.event().cloned().map(Completion::of);
                        Stage::Nulls(counting)
                    }
                },
                Stage::Nulls(mut counting) => {
                    counting.reading.waited();
                    counting.finish(array)?;
                    Stage::Rows
                }
                Stage::Rows => {
                    check_no_nulls(array)?;
                    if !full {
                        return Poll::Ready(Ok(()));
                    }
                    let Some(doubtful) = doubtful(array)? else {
                        return Poll::Ready(Ok(()));
                    };
                    let (from, queue) = (doubtful.into_owned(), array.device().default_queue());
                    Stage::Values(Box::new(Arriving::new(from, Extent::Reachable, queue)))
                }
                Stage::Values(mut values) => match values.poll(cx) {
                    Poll::Ready(host) => {
                        return Poll::Ready(host.and_then(|host| check(&unwrap(&host)?)));
                    }
                    Poll::Pending => {
                        self.stage = Stage::Values(values);
                        return Poll::Pending;
                    }
                },
            };
            self.stage = next;
        }
    }
}
