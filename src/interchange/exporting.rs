//! An export driven by a task that polls.

use std::task::{Context, Poll, ready};

use crate::abi::FFI_ArrowDeviceArray;
use crate::data::hidden::NullCounting;
use crate::data::parts::Parts;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::Completion;
use crate::error::Result;
use crate::interchange::arena::Nulls;
use crate::interchange::export::{ExportOptions, NullCounts, SyncPolicy, export};
use crate::transfer::{Realigning, is_misaligned};

/// Exports a batch as [`DeviceRecordBatch::export_array`] does, with no wait in a poll: the task waits for
/// the memory ([`SyncPolicy::Wait`]) and for bitmaps whose nulls must be counted, or that must be moved.
#[derive(Debug)]
pub(crate) struct Exporting {
    /// The batch, as a struct.
    array: DeviceArray,
    options: ExportOptions,
    /// What the task waits for before the next step.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    Ready,
    Realigning(Realigning),
    Counting(NullCounting),
}

impl Exporting {
    pub(crate) fn new(batch: DeviceRecordBatch, options: ExportOptions) -> Self {
        Self {
            array: batch.as_struct().clone(),
            options,
            wait: None,
            stage: Stage::Start,
        }
    }

    /// Whether nulls must be counted, and that may take a wait.
    fn counts(&self, parts: &Parts<'_>) -> bool {
        if self.array.device().is_synchronous() {
            return false;
        }
        let unknown = |i| {
            let (node, view) = parts.get(i);
            parts.null_count(i, node, view).is_none()
        };
        self.options.null_counts == NullCounts::Exact && (0..parts.len()).any(unknown)
    }

    /// Whether the export reads bitmaps where they are, so that they must be ready.
    fn host_reads_bitmaps(&self) -> bool {
        let array = &self.array;
        if array.device().is_synchronous() || !array.device().is_host_readable() {
            return false;
        }
        self.counts(&Parts::of(array, true)) || is_misaligned(array, true)
    }

    /// The C struct. Not polled again after that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<FFI_ArrowDeviceArray>> {
        loop {
            ready!(Completion::poll_all(&mut self.wait, cx))?;
            let array = &self.array;
            match std::mem::replace(&mut self.stage, Stage::Ready) {
                Stage::Start => {
                    if self.options.sync == SyncPolicy::Wait || self.host_reads_bitmaps() {
                        self.wait = array.ready_event()?.map(Completion::of);
                    }
                }
                Stage::Ready if is_misaligned(array, true) => {
                    let count = self.options.null_counts == NullCounts::Exact;
                    let realigning = Realigning::start(array, true, count)?;
                    self.wait = realigning.event().cloned().map(Completion::of);
                    self.stage = Stage::Realigning(realigning);
                }
                Stage::Realigning(mut realigning) => {
                    realigning.waited();
                    self.array = realigning.finish(array)?;
                    self.stage = Stage::Start;
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
