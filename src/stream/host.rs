//! Device readers read as host readers.

use std::collections::VecDeque;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::data::DeviceRecordBatch;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::stream::reader::DeviceRecordBatchReader;
use crate::transfer::Download;

/// Reads a device stream as host batches, made by
/// [`into_host_reader`](DeviceRecordBatchReader::into_host_reader). It ends after an error.
///
/// While a batch is downloaded, the stream is asked for the next one, whose copies are queued behind. A stream that takes as
/// long to make a batch as the device takes to copy it therefore loses no time to copies. Batches and errors come in the
/// stream's order. The stream is asked for at most one batch more than were read, so at most two batches use host memory
/// besides those that the consumer keeps. The copies run on a queue of their own for each device.
///
/// A consumer that must see a batch before the next one is made, or that may stop early, switches this off with
/// [`with_prefetch(0)`](Self::with_prefetch). Batches in memory that the host can read are never requested ahead.
#[derive(Debug)]
pub struct HostRecordBatchReader<R> {
    reader: R,
    prefetch: usize,
    /// Batches that were taken from the stream and not yet returned, oldest first. An error is the last.
    coming: VecDeque<Result<Download<RecordBatch>>>,
    queues: CopyQueues,
    /// The stream is not read any more.
    ended: bool,
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

    /// Sets how many batches are downloaded ahead of the consumer: 1 by default.
    ///
    /// With 0, each batch is requested, copied and waited for when the consumer reads it. 2 is for a stream whose batches
    /// are themselves still being uploaded ([`UploadingReader`](crate::UploadingReader)). More even out batches that take
    /// different times. Each uses host memory, and all are requested before the first is returned.
    ///
    /// ```
    /// # use arrow_device::{DeviceRecordBatchReader, Result};
    /// # use arrow_array::RecordBatchReader;
    /// fn one_by_one(stream: impl DeviceRecordBatchReader) -> impl RecordBatchReader {
    ///     stream.into_host_reader().with_prefetch(0)
    /// }
    /// ```
    #[must_use]
    pub fn with_prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }

    /// Whether to read from the stream before returning a batch.
    fn wants_more(&self) -> bool {
        let next = self.coming.front();
        let worth_it = next.is_none_or(|next| matches!(next, Ok(n) if n.is_waiting()));
        !self.ended && self.coming.len() <= self.prefetch && worth_it
    }

    /// Starts a download.
    fn start(&mut self, batch: &DeviceRecordBatch) -> Result<Download<RecordBatch>> {
        if batch.schema_ref().fields() != self.reader.schema().fields() {
            return Err(Error::argument(
                "a batch's schema differs from its stream's",
            ));
        }
        let queue = self.queues.of(batch.device(), self.prefetch)?;
        Download::queued(batch, queue)
    }
}

/// Queues for copies to the host, one for each device, made when the first of its batches is copied.
#[derive(Debug, Default)]
pub(super) struct CopyQueues(Vec<Queue>);

impl CopyQueues {
    /// The device's queue for copies: one of its own if there is work that copies may overlap with.
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
        let batch = self.coming.pop_front()?.and_then(Download::wait);
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
