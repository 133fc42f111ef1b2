//! Device readers as host readers.

use std::collections::VecDeque;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::data::DeviceRecordBatch;
use crate::data::host::to_batch;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::stream::reader::DeviceRecordBatchReader;
use crate::transfer::{Extent, ToHost};

/// A device stream read as host batches. After an error, or its end, it ends.
///
/// While a batch comes down the stream is asked for the next one, whose copies are queued behind: a
/// stream that takes as long to make a batch as the device takes to copy it loses no time to copies.
/// Batches and errors come in the stream's order, an error after all batches before it. The stream has
/// been asked for at most one batch more than were taken, and so two batches at most take up host memory
/// beside those that the consumer keeps. The copies run on a queue of their own, for each device of the stream's batches.
///
/// A consumer that must see a batch before its successor is made, or that stops early and wants none
/// made in vain, reads [without](Self::with_prefetch) that. Nothing is asked for ahead while batches
/// lie in memory that the host can read.
#[derive(Debug)]
pub struct HostRecordBatchReader<R> {
    reader: R,
    prefetch: usize,
    /// Batches that the stream gave and the consumer has not, oldest first; an error is the last.
    coming: VecDeque<Result<Coming>>,
    queues: CopyQueues,
    /// The stream is not asked any more.
    ended: bool,
}

/// A batch on its way to the host.
#[derive(Debug)]
struct Coming {
    schema: SchemaRef,
    array: ToHost,
}

impl<R: DeviceRecordBatchReader> HostRecordBatchReader<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            prefetch: 1,
            coming: VecDeque::new(),
            queues: CopyQueues::default(),
            ended: false,
        }
    }

    /// For how many batches more than were taken the stream may be asked: 1 if never said. With 0 each
    /// is asked for, copied and waited for when the consumer wants it. 2 let a stream overlap whose
    /// batches are still on their way up ([`UploadingReader`](crate::UploadingReader)) while it makes the
    /// next; more even out batches that take different times. Each takes up host memory, and all are
    /// asked for before the first is given out.
    ///
    /// ```
    /// # use arrow_device::{DeviceRecordBatchReader, Result};
    /// # use arrow_array::RecordBatchReader;
    /// fn no_batch_in_vain(stream: impl DeviceRecordBatchReader) -> impl RecordBatchReader {
    ///     stream.into_host_reader().with_prefetch(0)
    /// }
    /// ```
    #[must_use]
    pub fn with_prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }

    /// Whether the stream is to be asked before a batch is given out.
    fn wants_more(&self) -> bool {
        let next = self.coming.front();
        let worth_it = next.is_none_or(|next| matches!(next, Ok(n) if n.array.event().is_some()));
        !self.ended && self.coming.len() <= self.prefetch && worth_it
    }

    /// Starts a batch on its way.
    fn start(&mut self, batch: &DeviceRecordBatch) -> Result<Coming> {
        if batch.schema().fields() != self.reader.schema().fields() {
            return Err(Error::argument(
                "a batch's schema differs from its stream's",
            ));
        }
        let queue = self.queues.of(batch.device(), self.prefetch)?;
        Ok(Coming {
            schema: batch.schema().clone(),
            array: batch.as_struct().start_to_host(Extent::Rows, &queue)?,
        })
    }
}

/// Queues for copies to the host, one for each device, made when the first of its batches is copied.
#[derive(Debug, Default)]
pub(super) struct CopyQueues(Vec<Queue>);

impl CopyQueues {
    /// Its own queue where there is something that copies may overlap with.
    pub(super) fn of(&mut self, device: &Device, prefetch: usize) -> Result<Queue> {
        if prefetch == 0 || device.is_host_readable() {
            return Ok(device.default_queue());
        }
        if let Some(queue) = self.0.iter().find(|queue| queue.device() == device) {
            return Ok(queue.clone());
        }
        let queue = device.new_queue()?;
        self.0.push(queue.clone());
        Ok(queue)
    }
}

impl Coming {
    fn finish(self) -> Result<RecordBatch> {
        to_batch(&self.schema, &self.array.finish()?)
    }
}

impl<R: DeviceRecordBatchReader> Iterator for HostRecordBatchReader<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.wants_more() {
            let coming = match self.reader.next() {
                Some(batch) => batch.and_then(|batch| self.start(&batch)),
                None => {
                    self.ended = true;
                    break;
                }
            };
            self.ended = coming.is_err();
            self.coming.push_back(coming);
        }
        let batch = self.coming.pop_front()?.and_then(Coming::finish);
        if batch.is_err() {
            self.ended = true;
            self.coming.clear();
        }
        Some(batch.map_err(Error::into))
    }
}

impl<R: DeviceRecordBatchReader> RecordBatchReader for HostRecordBatchReader<R> {
    fn schema(&self) -> SchemaRef {
        self.reader.schema()
    }
}
