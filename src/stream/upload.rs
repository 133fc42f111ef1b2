//! Uploads host readers and streams.

use std::collections::VecDeque;
use std::task::{Poll, ready};

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::SchemaRef;

use crate::data::DeviceRecordBatch;
use crate::device::{Device, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::stream::ahead::ahead;
use crate::stream::reader::{DeviceRecordBatchReader, DeviceRecordBatches};

/// Once this many bytes are being uploaded, the oldest upload is waited for.
const BYTES: usize = 128 << 20;
/// Once there are this many uploads, the oldest is waited for.
const UPLOADS: usize = 64;

/// Uploads the batches of a [`RecordBatchReader`] as they are read, on the default queue of `device`. An upload runs while the next
/// batch is produced.
///
/// If the host reader is faster than the device, the next read waits: once 128 MiB or 64 batches are being uploaded, for the oldest
/// upload. The reader ends after an error, its own or that of an upload.
///
/// The thread that asks for a batch also produces and packs it. A reader is not moved to another thread unasked: it may rely on
/// the caller's, and one that needs a lock that the caller holds, such as Python's, would wait for ever. To produce, pack and copy
/// at the same time, use [`upload_reader_ahead`].
///
/// Each batch is one allocation and one transfer, so many small batches are slow. Join them first, for example with
/// arrow-rs's `BatchCoalescer` (see `examples/small_batches.rs`).
///
/// ```
/// use arrow_array::{RecordBatchIterator, record_batch};
/// use arrow_device::{Devices, upload_reader};
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
/// for on_device in upload_reader(reader, &Devices::cpu()) {
///     assert_eq!(on_device?.num_rows(), 3);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn upload_reader<R: RecordBatchReader>(
    reader: R,
    device: &Device,
) -> impl DeviceRecordBatchReader + use<R> {
    let mut uploads = Uploads::new(reader.schema(), device.default_queue());
    let (schema, device_type) = (reader.schema(), device.id().device_type);
    let batches = reader.map(move |batch| uploads.next(batch.map_err(Error::from)));
    DeviceRecordBatches::new(batches, schema, device_type)
}

/// Reads and uploads ahead of the consumer, on two threads: one calls the reader, the other packs and uploads what it returned,
/// and the consumer only receives. A producer that takes time, the packing of its batches and their copies overlap then: a
/// stream takes about as long as the slowest of them. With [`upload_reader`], the consumer's thread produces and packs, and only the
/// copies overlap.
///
/// ```
/// use arrow_array::{RecordBatchIterator, record_batch};
/// use arrow_device::{Devices, upload_reader_ahead};
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
/// for on_device in upload_reader_ahead(reader, &Devices::cpu(), 2)? {
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
pub fn upload_reader_ahead<R: RecordBatchReader + Send + 'static>(
    reader: R,
    device: &Device,
    batches: usize,
) -> Result<impl DeviceRecordBatchReader + Send + 'static + use<R>> {
    let mut uploads = Uploads::new(reader.schema(), device.default_queue());
    let (schema, device_type) = (reader.schema(), device.id().device_type);
    let read = ahead(reader.map(|batch| batch.map_err(Error::from)), batches)?;
    let uploaded = ahead(read.map(move |batch| uploads.next(batch)), batches)?;
    Ok(DeviceRecordBatches::new(uploaded, schema, device_type))
}

/// Uploads under way.
#[derive(Debug)]
pub(super) struct Uploads {
    queue: Queue,
    schema: SchemaRef,
    /// The event and the bytes of each upload, oldest first.
    under_way: VecDeque<(SyncEvent, usize)>,
    /// Bytes of all uploads.
    bytes: usize,
}

impl Uploads {
    pub(super) fn new(schema: SchemaRef, queue: Queue) -> Self {
        Self {
            queue,
            schema,
            under_way: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Uploads what a reader has returned, once there are few enough uploads.
    fn next(&mut self, batch: Result<RecordBatch>) -> Result<DeviceRecordBatch> {
        let batch = batch?;
        let _ = self.make_room(|oldest| Poll::Ready(oldest.wait()));
        self.upload(&batch)
    }

    /// Forgets uploads that are done, and makes `wait` wait for the oldest while there are too many. A failed upload counts as done:
    /// readers of its batch wait for the same event and get the error.
    pub(super) fn make_room(
        &mut self,
        mut wait: impl FnMut(&SyncEvent) -> Poll<Result<()>>,
    ) -> Poll<()> {
        loop {
            let too_many = self.bytes >= BYTES || self.under_way.len() >= UPLOADS;
            let Some((oldest, bytes)) = self.under_way.front() else {
                return Poll::Ready(());
            };
            if matches!(oldest.is_complete(), Ok(false)) {
                if !too_many {
                    return Poll::Ready(());
                }
                let _ = ready!(wait(oldest));
            }
            // The sources and the staging memory serve the next upload: the thread that would drop them otherwise may be behind by
            // any number of uploads.
            oldest.drop_kept();
            self.bytes -= *bytes;
            self.under_way.pop_front();
        }
    }

    /// Uploads a batch. Its memory is counted until the copies are done.
    pub(super) fn upload(&mut self, batch: &RecordBatch) -> Result<DeviceRecordBatch> {
        let batch = self.queue.device().upload_on(batch, &self.queue)?;
        let owners = batch.as_struct().owners();
        if let Some(event) = owners.first().and_then(|owner| owner.own_event()) {
            let bytes = batch.get_array_memory_size();
            self.under_way.push_back((event.clone(), bytes));
            self.bytes += bytes;
        }
        batch.with_schema(self.schema.clone())
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
            let sim = SimDevice::new(SimConfig {
                mode,
                ..SimConfig::default()
            })
            .unwrap();
            let device = Device::new(sim.clone()).unwrap();
            let (go, held) = mpsc::channel::<()>();
            device.when(Vec::new(), move || {
                let _ = held.recv();
            });
            let sources = || Arc::strong_count(batch.column(0));
            let batches = (0..N).map(|_| Ok(batch.clone()));
            let reader = RecordBatchIterator::new(batches, batch.schema());
            for up in upload_reader(reader, &device) {
                drop(up.unwrap());
            }
            let created = device.stats().host_allocations;
            assert!(created <= UPLOADS as u64, "{created} staging buffers");
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
