//! An export driven by a task that polls.

use std::task::{Context, Poll, ready};

use crate::abi::FFI_ArrowDeviceArray;
use crate::data::DeviceRecordBatch;
use crate::data::hidden::NullCounting;
use crate::data::parts::Parts;
use crate::device::Completion;
use crate::error::Result;
use crate::interchange::arena::Nulls;
use crate::interchange::export::{ExportOptions, NullCounts, SyncPolicy, export};

/// Exports a batch as [`DeviceRecordBatch::export_array`] does, with no wait in a poll: the task waits for
/// the memory ([`SyncPolicy::Wait`]) and for masks whose nulls must be counted.
#[derive(Debug)]
pub(crate) struct Exporting {
    batch: DeviceRecordBatch,
    options: ExportOptions,
    /// What the task waits for before the next step.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    Ready,
    Counting(NullCounting),
}

impl Exporting {
    pub(crate) fn new(batch: DeviceRecordBatch, options: ExportOptions) -> Self {
        Self {
            batch,
            options,
            wait: None,
            stage: Stage::Start,
        }
    }

    /// Whether nulls must be counted, and that may take a wait.
    fn counts(&self, parts: &Parts<'_>) -> bool {
        if self.batch.device().is_synchronous() {
            return false;
        }
        let unknown = |i| {
            let (node, view) = parts.get(i);
            parts.null_count(i, node, view).is_none()
        };
        self.options.null_counts == NullCounts::Exact && (0..parts.len()).any(unknown)
    }

    /// Whether the export counts or repacks masks where they are, so that they must be ready.
    fn host_reads_masks(&self) -> bool {
        let array = self.batch.as_struct();
        if array.device().is_synchronous() || !array.device().is_host_readable() {
            return false;
        }
        let parts = Parts::of(array, true);
        let repacked = |i| {
            let (_, view) = parts.get(i);
            view.offset != view.validity_offset
        };
        self.counts(&parts) || (0..parts.len()).any(repacked)
    }

    /// The C struct. Not polled again after that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<FFI_ArrowDeviceArray>> {
        loop {
            ready!(Completion::poll_all(&mut self.wait, cx))?;
            let array = self.batch.as_struct();
            match std::mem::replace(&mut self.stage, Stage::Ready) {
                Stage::Start => {
                    if self.options.sync == SyncPolicy::Wait || self.host_reads_masks() {
                        self.wait = array.ready_event()?.map(Completion::of);
                    }
                }
                Stage::Ready => {
                    let views = {
                        let parts = Parts::of(array, true);
                        self.counts(&parts).then(|| parts.views())
                    };
                    let Some(views) = views else {
                        return Poll::Ready(export(
                            array,
                            &self.options,
                            true,
                            self.options.nulls(),
                        ));
                    };
                    let counting = NullCounting::start(array, views)?;
                    self.wait = counting.event().cloned().map(Completion::of);
                    self.stage = Stage::Counting(counting);
                }
                Stage::Counting(mut counting) => {
                    counting.waited();
                    let nulls = Nulls::Counted(counting.finish(array)?);
                    return Poll::Ready(export(array, &self.options, true, nulls));
                }
            }
        }
    }
}
