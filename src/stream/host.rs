//! Device streams read as host streams.

use std::collections::VecDeque;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::data::DeviceRecordBatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::transfer::{Download, DownloadQueues};

/// Reads a device stream as host batches. Of a [`DeviceRecordBatchReader`](crate::DeviceRecordBatchReader) it is a
/// [`RecordBatchReader`], made by [`into_host_reader`](crate::DeviceRecordBatchReader::into_host_reader); of an asynchronous stream it
/// is a `RecordBatchStream`, made by `into_host_stream`, whose polls never block. It ends after an error.
///
/// One batch is requested ahead: while a batch is being downloaded, the stream makes the next one, whose copies are
/// queued behind. If making a batch takes as long as copying one, the copies therefore cost no time. Batches and errors keep
/// the stream's order. At most two batches use host memory, besides those that the consumer keeps. The copies run on a queue
/// of their own for each device, and reads of sizes that are stored in device memory on another one.
///
/// A consumer that must see a batch before the next one is made, or that may stop early, switches this off with
/// [`with_prefetch(0)`](Self::with_prefetch). Nothing is requested ahead of a batch in memory that the host can read.
#[derive(Debug)]
pub struct HostRecordBatchReader<R> {
    /// `None` after its end or an error.
    pub(super) reader: Option<R>,
    pub(super) schema: SchemaRef,
    /// How many downloads there are ahead of the one that the consumer reads.
    prefetch: usize,
    /// Batches that were requested and not returned, oldest first. An error is the last.
    pub(super) coming: VecDeque<Result<Download<RecordBatch>>>,
    /// Queues for copies, of each device.
    queues: Vec<DownloadQueues>,
}

impl<R> HostRecordBatchReader<R> {
    pub(super) fn new(reader: R, schema: SchemaRef) -> Self {
        Self {
            reader: Some(reader),
            schema,
            prefetch: 1,
            coming: VecDeque::new(),
            queues: Vec::new(),
        }
    }

    /// Sets how many batches are downloaded ahead of the consumer: 1 by default.
    ///
    /// With 0, each batch is requested, copied and waited for when the consumer reads it. 2 suits a stream whose batches are
    /// still being uploaded ([`upload_reader`](crate::upload_reader)), and more suit a stream whose batches take very
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

    /// The reader, if it is to be read before the oldest batch is returned.
    pub(super) fn wanted(&mut self) -> Option<&mut R> {
        let worth_it = match self.coming.front() {
            None => true,
            // Nothing is gained by a request for the next batch if the host reads this one in place.
            Some(Ok(oldest)) => !oldest.is_in_place(),
            Some(Err(_)) => false,
        };
        let wanted = worth_it && self.coming.len() <= self.prefetch;
        self.reader.as_mut().filter(|_| wanted)
    }

    /// The device's queues for copies: some of its own if there is work that copies may overlap with.
    fn queues_of(&mut self, device: &Device) -> Result<DownloadQueues> {
        if self.prefetch == 0 || device.is_host_readable() {
            return Ok(DownloadQueues::from(device.default_queue()));
        }
        let of_device = |queues: &&DownloadQueues| queues.copies.device() == device;
        if let Some(queues) = self.queues.iter().find(of_device) {
            return Ok(queues.clone());
        }
        let queues = DownloadQueues::new(device)?;
        self.queues.push(queues.clone());
        Ok(queues)
    }

    /// Takes what the reader has returned, and starts the download.
    pub(super) fn take(
        &mut self,
        next: Option<Result<DeviceRecordBatch>>,
        start: fn(&DeviceRecordBatch, DownloadQueues) -> Result<Download<RecordBatch>>,
    ) {
        let coming = next.map(|batch| {
            let batch = batch?.with_schema(self.schema.clone())?;
            let queues = self.queues_of(batch.device())?;
            start(&batch, queues)
        });
        if !matches!(coming, Some(Ok(_))) {
            self.reader = None;
        }
        self.coming.extend(coming);
    }

    /// Returns a batch that has arrived, or an error, after which there is no more.
    pub(super) fn give(
        &mut self,
        coming: Result<Download<RecordBatch>>,
    ) -> Result<RecordBatch, ArrowError> {
        coming.and_then(Download::wait).map_err(|e| {
            self.reader = None;
            self.coming.clear();
            Error::into(e)
        })
    }
}

impl<R: Iterator<Item = Result<DeviceRecordBatch>>> Iterator for HostRecordBatchReader<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(reader) = self.wanted() {
            let next = reader.next();
            self.take(next, Download::queued);
        }
        let oldest = self.coming.pop_front()?;
        Some(self.give(oldest))
    }
}

impl<R: Iterator<Item = Result<DeviceRecordBatch>>> RecordBatchReader for HostRecordBatchReader<R> {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}
