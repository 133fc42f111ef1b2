//! An export that a task polls.

use std::task::{Context, Poll, ready};

use crate::abi::FFI_ArrowDeviceArray;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{Completion, Handover};
use crate::error::Result;
use crate::interchange::export::{export_resolved, handover};
use crate::interchange::options::ExportOptions;
use crate::transfer::{Bitmaps, Export};

/// Exports a batch as [`DeviceRecordBatch::export_array`] does. A poll never blocks: the task waits
/// for the memory ([`SyncPolicy::Wait`]), and for validity bitmaps that must be read.
#[derive(Debug)]
pub(crate) struct Exporting {
    /// The batch as a struct.
    array: DeviceArray,
    options: ExportOptions,
    /// What the next step has to wait for.
    wait: Option<Completion>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Start,
    Ready,
    Bitmaps(Bitmaps),
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

    /// Returns the C struct. Must not be polled again after that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<FFI_ArrowDeviceArray>> {
        let export = Export {
            as_batch: true,
            counts: self.options.counts_nulls(),
        };
        loop {
            ready!(Completion::poll_all(&mut self.wait, cx))?;
            let array = &self.array;
            match std::mem::replace(&mut self.stage, Stage::Ready) {
                Stage::Start => {
                    array.device().backend().check_export()?;
                    // Bitmaps that the host reads in place must be ready.
                    let in_place = array.device().is_host_readable();
                    if handover(array, self.options.sync) == Handover::Wait
                        || (in_place && Bitmaps::needed(array, export))
                    {
                        self.wait = array.ready_event()?.map(Completion::of);
                    }
                }
                Stage::Ready if Bitmaps::needed(array, export) => {
                    let bitmaps = Bitmaps::start(array, export)?;
                    self.wait = bitmaps.reading.event().cloned().map(Completion::of);
                    self.stage = Stage::Bitmaps(bitmaps);
                }
                Stage::Ready => {
                    return Poll::Ready(export_resolved(array, &self.options, true));
                }
                Stage::Bitmaps(mut bitmaps) => {
                    bitmaps.reading.waited();
                    // What was moved may have to be waited for.
                    self.array = bitmaps.finish(array)?;
                    self.stage = Stage::Start;
                }
            }
        }
    }
}
