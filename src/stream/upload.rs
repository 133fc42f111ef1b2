//! Host readers as device readers.

use std::collections::VecDeque;

use arrow_array::RecordBatchReader;
use arrow_schema::SchemaRef;

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::device::{Device, Queue, SyncEvent};
use crate::error::Result;
use crate::stream::reader::DeviceRecordBatchReader;

/// Bytes of uploads under way from which on the oldest is waited for.
const BYTES: usize = 128 << 20;
/// The same for uploads.
const UPLOADS: usize = 64;

/// A [`RecordBatchReader`] whose batches are brought to a device as they are asked for. An upload
/// runs on while the next batch is produced.
///
/// A reader that is faster than the device is held up: beyond some 128 MiB under way, or 64 batches,
/// the oldest upload is waited for. After an error, of the reader or of an upload, it ends.
#[derive(Debug)]
pub struct UploadingReader<R> {
    reader: R,
    uploads: Uploads,
    /// The reader is not asked any more.
    ended: bool,
}

impl<R: RecordBatchReader> UploadingReader<R> {
    /// Uploads on `device`'s default queue.
    pub fn new(reader: R, device: &Device) -> Self {
        Self::new_on(reader, device.default_queue())
    }

    /// Uploads on `queue`.
    pub fn new_on(reader: R, queue: Queue) -> Self {
        let uploads = Uploads::new(queue);
        Self {
            reader,
            uploads,
            ended: false,
        }
    }
}

/// Uploads under way.
#[derive(Debug)]
pub(super) struct Uploads {
    queue: Queue,
    /// When they are done, oldest first, and how many bytes each has.
    under_way: VecDeque<(SyncEvent, usize)>,
    /// Of all of them.
    bytes: usize,
}

impl Uploads {
    pub(super) fn new(queue: Queue) -> Self {
        Self {
            queue,
            under_way: VecDeque::new(),
            bytes: 0,
        }
    }

    pub(super) fn device(&self) -> &Device {
        self.queue.device()
    }

    /// Forgets uploads that are done; the oldest, which is forgotten too, if there are too many still. An
    /// upload that failed counts as done: who reads its batch waits for the same event.
    pub(super) fn oldest_beyond_limit(&mut self) -> Option<SyncEvent> {
        while let Some((event, _)) = self.under_way.front() {
            let waits = matches!(event.is_complete(), Ok(false));
            if waits && self.bytes < BYTES && self.under_way.len() < UPLOADS {
                break;
            }
            let (event, bytes) = self.under_way.pop_front()?;
            self.bytes -= bytes;
            if waits {
                return Some(event);
            }
        }
        None
    }

    /// Waits while there are too many.
    fn make_room(&mut self) {
        while let Some(oldest) = self.oldest_beyond_limit() {
            let _ = oldest.wait();
        }
    }

    pub(super) fn upload(&mut self, batch: &arrow_array::RecordBatch) -> Result<DeviceRecordBatch> {
        let batch = self.queue.device().upload_on(batch, &self.queue)?;
        let tree = batch.as_struct().tree();
        if let [owner] = tree.owners.as_slice() {
            if let Some(event) = owner.own_event() {
                let bytes = tree.slots.iter().filter_map(|slot| slot.bytes()).sum();
                self.under_way.push_back((event.clone(), bytes));
                self.bytes += bytes;
            }
        }
        Ok(batch)
    }
}

impl<R: RecordBatchReader> Iterator for UploadingReader<R> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.reader.next().map(|batch| {
            let batch = batch?;
            self.uploads.make_room();
            self.uploads.upload(&batch)
        });
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

impl<R: RecordBatchReader> DeviceRecordBatchReader for UploadingReader<R> {
    fn schema(&self) -> SchemaRef {
        self.reader.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.uploads.device().id().device_type
    }
}
