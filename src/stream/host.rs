//! Device streams read as host streams.

use std::collections::VecDeque;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, FieldRef, SchemaRef};

use crate::data::{DeviceArray, DeviceRecordBatch};
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
    downloads: Downloads<RecordBatch>,
}

impl<R> HostRecordBatchReader<R> {
    pub(super) fn new(reader: R, schema: SchemaRef) -> Self {
        Self {
            reader,
            schema,
            downloads: Downloads::default(),
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
        self.downloads.prefetch = batches;
        self
    }
}

impl<R: Iterator<Item = Result<DeviceRecordBatch>>> Iterator for HostRecordBatchReader<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let schema = &self.schema;
        let start = |batch: DeviceRecordBatch, queues: &mut CopyQueues, prefetch| {
            let batch = batch.fitted(schema)?;
            Download::<RecordBatch>::queued(&batch, queues.of(batch.device(), prefetch)?)
        };
        let next = self.downloads.next(&mut self.reader, start)?;
        Some(next.map_err(Error::into))
    }
}

impl<R: Iterator<Item = Result<DeviceRecordBatch>>> RecordBatchReader for HostRecordBatchReader<R> {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

/// Reads a device stream of arrays as host arrays, made by
/// [`into_host_reader`](crate::DeviceArrayReader::into_host_reader). It ends after an error, and reads ahead like
/// [`HostRecordBatchReader`].
#[derive(Debug)]
pub struct HostArrayReader<R> {
    reader: R,
    field: FieldRef,
    downloads: Downloads<ArrayRef>,
}

impl<R> HostArrayReader<R> {
    pub(super) fn new(reader: R, field: FieldRef) -> Self {
        Self {
            reader,
            field,
            downloads: Downloads::default(),
        }
    }

    /// Returns the type of all arrays, with name, nullability and metadata.
    pub fn field(&self) -> FieldRef {
        self.field.clone()
    }

    /// Sets how many arrays are downloaded ahead of the consumer: 1 by default. See
    /// [`HostRecordBatchReader::with_prefetch`].
    #[must_use]
    pub fn with_prefetch(mut self, arrays: usize) -> Self {
        self.downloads.prefetch = arrays;
        self
    }
}

impl<R: Iterator<Item = Result<DeviceArray>>> Iterator for HostArrayReader<R> {
    type Item = Result<ArrayRef>;

    fn next(&mut self) -> Option<Self::Item> {
        let field = &self.field;
        let start = |array: DeviceArray, queues: &mut CopyQueues, prefetch| {
            let array = array.fitted(field)?;
            let queues = queues.of(array.device(), prefetch)?;
            Download::<ArrayRef>::queued(array, queues)
        };
        self.downloads.next(&mut self.reader, start)
    }
}

/// Downloads that were started and not yet returned.
#[derive(Debug)]
struct Downloads<H> {
    /// How many there are ahead of the one that the consumer reads.
    prefetch: usize,
    /// Oldest first. An error is the last.
    started: VecDeque<Result<Download<H>>>,
    queues: CopyQueues,
    /// The stream is not read any more.
    ended: bool,
}

impl<H> Default for Downloads<H> {
    fn default() -> Self {
        Self {
            prefetch: 1,
            started: VecDeque::new(),
            queues: CopyQueues::default(),
            ended: false,
        }
    }
}

impl<H> Downloads<H> {
    /// `start`s downloads of what `stream` returns, with the number of downloads ahead. Then waits for the oldest.
    fn next<T>(
        &mut self,
        stream: &mut impl Iterator<Item = Result<T>>,
        start: impl Fn(T, &mut CopyQueues, usize) -> Result<Download<H>>,
    ) -> Option<Result<H>> {
        while self.wants_more() {
            let Some(item) = stream.next() else {
                self.ended = true;
                break;
            };
            let started = item.and_then(|item| start(item, &mut self.queues, self.prefetch));
            self.ended = started.is_err();
            self.started.push_back(started);
        }
        let next = self.started.pop_front()?.and_then(Download::wait);
        if next.is_err() {
            self.ended = true;
            self.started.clear();
        }
        Some(next)
    }

    /// Whether to read from the stream before returning the oldest. What needs no copy gains nothing from it.
    fn wants_more(&self) -> bool {
        let oldest = self.started.front();
        let worth_it = oldest.is_none_or(|o| matches!(o, Ok(oldest) if oldest.is_waiting()));
        !self.ended && self.started.len() <= self.prefetch && worth_it
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
