//! Device streams read as host streams.

use std::collections::VecDeque;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::data::DeviceRecordBatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::transfer::{Download, DownloadQueues};

/// Reads a device stream as host batches, made by
/// [`into_host_reader`](crate::DeviceRecordBatchReader::into_host_reader). It ends after an error.
///
/// The reader requests one batch ahead: while a batch is being downloaded, the stream makes the next one, whose copies are
/// queued behind. If making a batch takes as long as copying one, the copies therefore cost no time. Batches and errors keep
/// the stream's order. At most two batches use host memory, besides those that the consumer keeps. The copies run on a queue
/// of their own for each device, and reads of sizes that are stored in device memory on another one.
///
/// A consumer that must see a batch before the next one is made, or that may stop early, switches this off with
/// [`with_prefetch(0)`](Self::with_prefetch). Batches in memory that the host can read are never requested ahead.
#[derive(Debug)]
pub struct HostRecordBatchReader<R> {
    reader: R,
    schema: SchemaRef,
    /// How many downloads there are ahead of the one that the consumer reads.
    prefetch: usize,
    /// Downloads that were not returned, oldest first. An error is the last.
    started: VecDeque<Result<Download<RecordBatch>>>,
    queues: CopyQueues,
    /// The stream is not read any more.
    ended: bool,
}

impl<R> HostRecordBatchReader<R> {
    pub(super) fn new(reader: R, schema: SchemaRef) -> Self {
        Self {
            reader,
            schema,
            prefetch: 1,
            started: VecDeque::new(),
            queues: CopyQueues::default(),
            ended: false,
        }
    }

    /// Sets how many batches are downloaded ahead of the consumer: 1 by default.
    ///
    /// With 0, each batch is requested, copied and waited for when the consumer reads it. 2 suits a stream whose batches are
    /// still being uploaded ([`UploadingReader`](crate::UploadingReader)), and more suit a stream whose batches take very
    /// different times. Each batch ahead uses host memory, and all are requested before the first is returned.
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

    fn start(&mut self, batch: DeviceRecordBatch) -> Result<Download<RecordBatch>> {
        let batch = batch.fitted(&self.schema)?;
        Download::queued(&batch, self.queues.of(batch.device(), self.prefetch)?)
    }

    /// Whether to read from the stream before returning the oldest. What needs no copy gains nothing from it.
    fn wants_more(&self) -> bool {
        let oldest = self.started.front();
        let worth_it = oldest.is_none_or(|o| matches!(o, Ok(oldest) if oldest.is_waiting()));
        !self.ended && self.started.len() <= self.prefetch && worth_it
    }
}

impl<R: Iterator<Item = Result<DeviceRecordBatch>>> Iterator for HostRecordBatchReader<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.wants_more() {
            let Some(batch) = self.reader.next() else {
                self.ended = true;
                break;
            };
            let started = batch.and_then(|batch| self.start(batch));
            self.ended = started.is_err();
            self.started.push_back(started);
        }
        let next = self.started.pop_front()?.and_then(Download::wait);
        if next.is_err() {
            self.ended = true;
            self.started.clear();
        }
        Some(next.map_err(Error::into))
    }
}

impl<R: Iterator<Item = Result<DeviceRecordBatch>>> RecordBatchReader for HostRecordBatchReader<R> {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

/// Queues for copies to the host, for each device, made when the first copy is.
#[derive(Debug, Default)]
pub(super) struct CopyQueues(Vec<DownloadQueues>);

impl CopyQueues {
    /// The device's queues for copies: some of its own if there is work that copies may overlap with.
    pub(super) fn of(&mut self, device: &Device, prefetch: usize) -> Result<DownloadQueues> {
        if prefetch == 0 || device.is_host_readable() {
            return Ok(DownloadQueues::from(device.default_queue()));
        }
        if let Some(queues) = self
            .0
            .iter()
            .find(|queues| queues.copies().device() == device)
        {
            return Ok(queues.clone());
        }
        let queues = DownloadQueues::new(device)?;
        self.0.push(queues.clone());
        Ok(queues)
    }
}
