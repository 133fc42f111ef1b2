//! Uploads host readers.

use std::collections::VecDeque;
use std::iter::from_fn;
#[cfg(feature = "async")]
use std::task::{Context, Poll};

use arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::data::node::View;
#[cfg(feature = "async")]
use crate::device::Completion;
use crate::device::{Device, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::stream::ahead::ahead;
use crate::stream::reader::{DeviceRecordBatchIterator, DeviceRecordBatchReader};
use crate::transfer::{Admit, upload_batch};

/// Once this many bytes are being uploaded, the oldest upload is waited for.
const BYTES: usize = 128 << 20;
/// Once there are this many uploads, the oldest is waited for.
const UPLOADS: usize = 64;

/// Uploads the batches of a [`RecordBatchReader`] to a device as they are read. An upload runs while the next batch is
/// produced.
///
/// If the host reader is faster than the device, the next read waits: once 128 MiB or 64 batches are being uploaded, for the
/// oldest upload. The reader ends after an error, its own or that of an upload.
///
/// The thread that asks for a batch also produces and packs it. A reader is not moved to another thread unasked: it may rely on
/// the caller's, and one that needs a lock that the caller holds, such as Python's, would wait for ever. To produce, pack and copy
/// at the same time, use [`read_ahead`](Self::read_ahead).
///
/// Each batch is one allocation and one transfer, so many small batches are slow. Join them first, for example with
/// arrow-rs's `BatchCoalescer` (see `examples/small_batches.rs`).
///
/// ```
/// use arrow_array::{RecordBatchIterator, record_batch};
/// use arrow_device::{Devices, UploadingReader};
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
/// for on_device in UploadingReader::new(reader, &Devices::cpu()) {
///     assert_eq!(on_device?.num_rows(), 3);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct UploadingReader<R> {
    reader: R,
    uploads: Uploads,
    /// The reader is not read any more.
    ended: bool,
}

impl<R: RecordBatchReader> UploadingReader<R> {
    /// Uploads on the default queue of `device`.
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

impl<R: RecordBatchReader + Send + 'static> UploadingReader<R> {
    /// Reads and uploads ahead of the consumer, on two threads: one calls the reader, the other packs and uploads what it returned,
    /// and the consumer only receives. A producer that takes time, the packing of its batches and their copies overlap then: a
    /// stream takes about as long as the slowest of them. Without it, the consumer's thread produces and packs, and only the
    /// copies overlap.
    ///
    /// ```
    /// use arrow_array::{RecordBatchIterator, record_batch};
    /// use arrow_device::{Devices, UploadingReader};
    ///
    /// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
    /// let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
    /// for on_device in UploadingReader::new(reader, &Devices::cpu()).read_ahead(2)? {
    ///     assert_eq!(on_device?.num_rows(), 3);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The reader is called at once. Up to `batches` batches, at least one, wait for their upload, and as many on the device for
    /// the consumer. Each thread holds one more, so that up to `2 * batches + 2` are read before the first is taken. Besides,
    /// the sources and the staging memory of uploads are kept until their copies are done.
    ///
    /// Batches and errors keep the reader's order. A panic of the reader is an [`Error::Panic`], which ends
    /// the stream like other errors. Dropping the stream waits for neither thread: each ends once its current call has returned,
    /// and drops what it holds. In a child of the process (`fork`), where the threads do not exist, the next item is an error.
    ///
    /// # Errors
    /// That of the system if it starts no thread.
    pub fn read_ahead(
        self,
        batches: usize,
    ) -> Result<impl DeviceRecordBatchReader + Send + 'static> {
        let (schema, device) = (self.schema(), self.uploads.device().id());
        let Self {
            reader,
            uploads,
            ended,
        } = self;
        // A reader that has ended is not asked again.
        let mut reader = (!ended).then_some(reader);
        let next = move || Some(reader.as_mut()?.next()?.map_err(Error::from));
        let read = ahead(from_fn(next), batches, || ())?;
        let read = from_fn(move || Some(read.recv().ok()?.map_err(ArrowError::from)));
        let reader = RecordBatchIterator::new(read, schema.clone());
        let uploading = UploadingReader {
            reader,
            uploads,
            ended,
        };
        let uploaded = ahead(uploading, batches, || ())?;
        let next = move || match uploaded.process.check(device, -1) {
            Ok(()) => uploaded.recv().ok(),
            Err(e) => Some(Err(e)),
        };
        let device_type = device.device_type;
        Ok(DeviceRecordBatchIterator::new(
            from_fn(next),
            schema,
            device_type,
        ))
    }
}

/// Returns the bytes of all buffers of a batch.
fn bytes(batch: &DeviceRecordBatch) -> usize {
    let mut all = 0;
    let mut count = |view: View<'_>, _| {
        all += view
            .node
            .buffers
            .iter()
            .filter_map(|buffer| buffer.bytes())
            .sum::<usize>();
    };
    batch.as_struct().view().each_part(None, false, &mut count);
    all
}

/// Uploads under way.
#[derive(Debug)]
pub(super) struct Uploads {
    queue: Queue,
    /// The event and the bytes of each upload, oldest first.
    under_way: VecDeque<(SyncEvent, usize)>,
    /// Bytes of all uploads.
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

    #[cfg(feature = "async")]
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(super) fn device(&self) -> &Device {
        self.queue.device()
    }

    /// Forgets uploads that are done, and drops their sources and staging memory, which serves the next upload: the thread
    /// that would drop them otherwise may be behind by any number of uploads. If too many are left, forgets the oldest and
    /// returns its event. A failed upload counts as done: readers of its batch wait for the same event and get the error.
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
            event.drop_kept();
        }
        None
    }

    /// As [`make_room`](Self::make_room), but is pending. `wait` is the wait for the oldest upload.
    #[cfg(feature = "async")]
    pub(super) fn poll_room(
        &mut self,
        wait: &mut Option<Completion>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        loop {
            let oldest = wait.as_ref().map(|wait| wait.event().clone());
            // A failed upload counts as done: readers of its batch wait for the same event and get the error.
            if Completion::poll_all(wait, cx).is_pending() {
                return Poll::Pending;
            }
            if let Some(oldest) = oldest {
                oldest.drop_kept();
            }
            match self.oldest_beyond_limit() {
                Some(event) => *wait = Some(Completion::of(event)),
                None => return Poll::Ready(()),
            }
        }
    }

    /// Waits until there are few enough uploads.
    pub(super) fn make_room(&mut self) {
        while let Some(oldest) = self.oldest_beyond_limit() {
            if oldest.wait().is_ok() {
                oldest.drop_kept();
            }
        }
    }

    pub(super) fn upload(
        &mut self,
        batch: &RecordBatch,
        admit: &mut Admit<'_>,
    ) -> Result<DeviceRecordBatch> {
        let batch = upload_batch(batch, self.device(), &self.queue, admit)?;
        self.keep(&batch);
        Ok(batch)
    }

    /// Uploads a batch that the host can read and that is ready. One on the device already is being copied there.
    #[cfg(feature = "async")]
    pub(super) fn bring(
        &mut self,
        mut batch: DeviceRecordBatch,
        admit: &mut Admit<'_>,
    ) -> Result<DeviceRecordBatch> {
        if batch.device() != self.device() {
            let array = batch.as_struct().host_to_device(&self.queue, admit)?;
            batch = DeviceRecordBatch::from_struct(batch.schema(), array);
        }
        self.keep(&batch);
        Ok(batch)
    }

    /// Counts a batch whose copies were queued.
    fn keep(&mut self, batch: &DeviceRecordBatch) {
        let owners = batch.as_struct().owners();
        if let Some(event) = owners.first().and_then(|owner| owner.own_event()) {
            let bytes = bytes(batch);
            self.under_way.push_back((event.clone(), bytes));
            self.bytes += bytes;
        }
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
            let batch = self.uploads.upload(&batch, &mut |_| Ok(()))?;
            batch.fitted(&self.reader.schema())
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

#[cfg(all(test, feature = "sim", target_os = "linux", not(miri)))]
mod tests {
    use std::sync::{Arc, mpsc};

    use arrow_array::{RecordBatchIterator, record_batch};

    use super::*;
    use crate::device::sim::{SimConfig, SimDevice, SimMode};

    /// While the release thread does not come to anything, a stream uses the staging memory of uploads that are done.
    #[test]
    fn staging_memory_comes_back_without_the_release_thread() {
        const N: usize = 1000;
        let batch = record_batch!(("a", Int32, [1, 2, 3])).unwrap();
        for mode in [SimMode::Async, SimMode::Deferred] {
            let sim = SimDevice::new(SimConfig::default().with_mode(mode)).unwrap();
            let device = Device::new(sim.clone()).unwrap();
            let (go, held) = mpsc::channel::<()>();
            device.when(Vec::new(), move || {
                let _ = held.recv();
            });
            let sources = || Arc::strong_count(batch.column(0));
            let batches = (0..N).map(|_| Ok(batch.clone()));
            let reader = RecordBatchIterator::new(batches, batch.schema());
            for up in UploadingReader::new(reader, &device) {
                drop(up.unwrap());
            }
            let created = device.stats().host_allocations;
            assert!(created <= UPLOADS as u64, "{created} staging slabs");
            // Nor are their sources kept.
            let kept = sources() - 1;
            assert!(kept <= UPLOADS, "{kept} sources");
            drop(go);
            device.synchronize().unwrap();
            while sim.report().live_events > 0 {
                std::thread::yield_now();
            }
            // A source is dropped just before its event.
            assert_eq!(sources(), 1);
            device.trim();
            sim.assert_clean();
        }
    }
}
