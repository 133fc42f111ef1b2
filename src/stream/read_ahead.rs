//! [`ReadAhead`]: a host reader that is read on one thread, and uploaded on another.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::Builder;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::abi::{ArrowDeviceType, guard};
use crate::data::DeviceRecordBatch;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::stream::bounded::Bounded;
use crate::stream::reader::DeviceRecordBatchReader;
use crate::stream::upload::{BYTES, UploadingReader, Uploads, bytes};

/// Reads and uploads batches ahead of the consumer, made by [`UploadingReader::read_ahead`].
///
/// One thread calls the reader, another packs and uploads what it returned, and the consumer only receives. Batches and errors
/// keep the reader's order. A panic of the reader is an [`Error::Panic`]. The stream ends after an error.
///
/// Both threads end with the reader, or when this is dropped. Dropping waits for neither: the reader is dropped by its thread,
/// once its current call has returned. A panic of that drop is kept for [`Device::take_drop_error`].
///
/// The reader is called at once, before the first batch is asked for, and until as many batches are ahead as were allowed. For
/// `batches` and for 128 MiB, whichever is reached first, batches that were read wait for their upload, and batches on the device
/// wait for the consumer; one batch always may. Each thread holds one more. As with [`UploadingReader`], the next upload waits
/// once 128 MiB or 64 batches are being copied.
pub struct ReadAhead {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    /// From the reader's thread to the uploading one.
    read: Arc<Bounded<Result<RecordBatch>>>,
    /// From there to the consumer.
    uploaded: Arc<Bounded<Result<DeviceRecordBatch>>>,
    ended: bool,
}

impl<R: RecordBatchReader + Send + 'static> UploadingReader<R> {
    /// Reads and uploads up to `batches` batches ahead, at least one, on two threads of their own. A producer that takes
    /// time, the packing of its batches and their copies overlap then: a stream takes about as long as the slowest of them.
    /// Without it, the consumer's thread produces and packs, and only the copies overlap.
    ///
    /// ```
    /// use arrow_array::{RecordBatchIterator, record_batch};
    /// use arrow_device::{Devices, UploadingReader};
    ///
    /// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
    /// let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
    /// for on_device in UploadingReader::new(reader, &Devices::cpu()).read_ahead(2) {
    ///     assert_eq!(on_device?.num_rows(), 3);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// If the system starts no thread, the first item is that error.
    pub fn read_ahead(self, batches: usize) -> ReadAhead {
        let schema = self.schema();
        let (reader, uploads, ended) = self.into_parts();
        let read = Arc::new(Bounded::new(batches, BYTES));
        let uploaded = Arc::new(Bounded::new(batches, BYTES));
        let ahead = ReadAhead {
            schema,
            device_type: uploads.device().id().device_type,
            read: read.clone(),
            uploaded: uploaded.clone(),
            ended,
        };
        if ended {
            return ahead;
        }
        let device = uploads.device().clone();
        let started = start("arrow-device reading", {
            let read = read.clone();
            move || read_all(reader, &device, &read)
        });
        let started = started.and_then(|()| {
            let (read, uploaded) = (read.clone(), uploaded.clone());
            start("arrow-device uploading", move || {
                upload_all(uploads, &read, &uploaded);
            })
        });
        if let Err(e) = started {
            read.close();
            let text = format!("no thread to read ahead: {e}");
            uploaded.push(Err(ArrowError::IoError(text, e).into()), 0);
            uploaded.end();
        }
        ahead
    }
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    Builder::new().name(name.into()).spawn(run).map(drop)
}

/// Reads until the end, an error, or until nothing is taken any more.
fn read_all(
    mut reader: impl RecordBatchReader,
    device: &Device,
    read: &Bounded<Result<RecordBatch>>,
) {
    loop {
        let next = || reader.next().transpose().map_err(Error::from);
        let Some(next) = guard::callback("next", next).transpose() else {
            break;
        };
        let bytes = next.as_ref().map_or(0, RecordBatch::get_array_memory_size);
        let is_last = next.is_err();
        if !read.push(next, bytes) || is_last {
            break;
        }
    }
    read.end();
    device.parking("drop of a reader", || drop(reader));
}

/// Uploads until the end, an error, or until nothing is taken any more.
fn upload_all(
    mut uploads: Uploads,
    read: &Bounded<Result<RecordBatch>>,
    uploaded: &Bounded<Result<DeviceRecordBatch>>,
) {
    while let Some(next) = read.pop() {
        let upload = || {
            let batch = next?;
            uploads.make_room();
            uploads.upload(&batch)
        };
        let next = guard::callback("upload", upload);
        let bytes = next.as_ref().map_or(0, bytes);
        let is_last = next.is_err();
        if !uploaded.push(next, bytes) || is_last {
            break;
        }
    }
    uploaded.end();
    read.close();
}

impl Iterator for ReadAhead {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.uploaded.pop();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

impl DeviceRecordBatchReader for ReadAhead {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.read.close();
        self.uploaded.close();
    }
}

impl fmt::Debug for ReadAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadAhead")
            .field("schema", &self.schema)
            .field("device_type", &self.device_type)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
