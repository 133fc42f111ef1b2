//! [`ReadAhead`]: a host reader that is read on one thread, and uploaded on another.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::Builder;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::abi::{ArrowDeviceType, guard};
use crate::data::DeviceRecordBatch;
use crate::device::{Device, Process};
use crate::error::{Error, Result};
use crate::stream::bounded::Bounded;
use crate::stream::reader::DeviceRecordBatchReader;
use crate::stream::upload::{BYTES, UploadingReader, Uploads};
use crate::transfer::upload_bytes;

/// Why a stream of the parent process cannot be used.
const FORKED: &str = "the process was forked after the stream was made, and a stream that reads ahead cannot be used after fork, \
     because its threads exist in the parent only";

/// Reads and uploads batches ahead of the consumer, made by [`UploadingReader::read_ahead`].
///
/// One thread calls the reader, another packs and uploads what it returned, and the consumer only receives. Batches and errors
/// keep the reader's order. A panic of the reader is an [`Error::Panic`]. The stream ends after an error.
///
/// Both threads end with the reader, or when this is dropped. Dropping waits for neither: the reader is dropped by its thread,
/// once its current call has returned, and after the consumer may have seen the end. If the system starts no thread, or the
/// reader has ended before, [`read_ahead`](UploadingReader::read_ahead) drops it itself. Batches that nobody takes any more are
/// dropped by the thread that has them, those that wait by the one that drops this. Panics of the threads' drops and of those
/// of batches are kept for [`Device::take_drop_error`].
///
/// The reader is called at once, before the first batch is asked for. At most `batches` batches, or 128 MiB of them if that is
/// less, but at least one, wait for their upload, and as many on the device for the consumer. Each thread holds one more, so
/// that up to `2 * batches + 2` batches are read before the first is taken. Bytes count as an upload moves them: memory of
/// which a batch is a slice may be larger. Besides, the sources and the staging memory of uploads are kept until their copies
/// are done: as with [`UploadingReader`], the next upload waits once 128 MiB or 64 batches are being copied.
///
/// In a child of the process that made it (`fork`), there are no threads: the first item is an error there, and
/// the only one.
pub struct ReadAhead {
    schema: SchemaRef,
    device: Device,
    /// From the reader's thread to the uploading one.
    read: Arc<Bounded<Read>>,
    /// From there to the consumer.
    uploaded: Arc<Bounded<Result<DeviceRecordBatch>>>,
    ended: bool,
    /// That of the threads.
    process: Process,
}

/// A batch, and how many bytes its upload fills.
type Read = Result<(RecordBatch, usize)>;

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
    /// If the system starts no thread, that error is the only item.
    pub fn read_ahead(self, batches: usize) -> ReadAhead {
        let schema = self.schema();
        let (reader, uploads, ended) = self.into_parts();
        let read = Arc::new(Bounded::new(batches, BYTES));
        let uploaded = Arc::new(Bounded::new(batches, BYTES));
        let device = uploads.device().clone();
        let ahead = ReadAhead {
            schema,
            device: device.clone(),
            read: read.clone(),
            uploaded: uploaded.clone(),
            ended,
            process: Process::this(),
        };
        if ended {
            return ahead;
        }
        let started = start("arrow-device reading", {
            let read = read.clone();
            move || read_all(reader, &device, &read)
        });
        let started = started.and_then(|()| {
            let (read, uploaded) = (read.clone(), uploaded.clone());
            let schema = ahead.schema.clone();
            start("arrow-device uploading", move || {
                upload_all(uploads, &schema, &read, &uploaded);
            })
        });
        if let Err(e) = started {
            discard(&ahead.device, read.close());
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

/// Drops batches, whose owners may be foreign. Panics are kept for [`Device::take_drop_error`].
fn discard(device: &Device, items: impl Iterator) {
    for item in items {
        device.parking("drop of a batch", || drop(item));
    }
}

/// Reads until the end, an error, or until nothing is taken any more.
fn read_all(mut reader: impl RecordBatchReader, device: &Device, read: &Bounded<Read>) {
    let mut next = || -> Result<_> {
        let Some(batch) = reader.next().transpose()? else {
            return Ok(None);
        };
        // If the batch cannot be uploaded, the upload says so.
        let bytes = upload_bytes(&batch).unwrap_or(0);
        Ok(Some((batch, bytes)))
    };
    // A batch that is not taken any more is dropped here.
    device.parking("drop of a batch", || {
        while let Some(next) = guard::callback("next", &mut next).transpose() {
            let bytes = next.as_ref().map_or(0, |(_, bytes)| *bytes);
            let is_last = next.is_err();
            if !read.push(next, bytes) || is_last {
                break;
            }
        }
    });
    read.end();
    device.parking("drop of a reader", || drop(reader));
}

/// Uploads until the end, an error, or until nothing is taken any more.
fn upload_all(
    mut uploads: Uploads,
    schema: &SchemaRef,
    read: &Bounded<Read>,
    uploaded: &Bounded<Result<DeviceRecordBatch>>,
) {
    let device = uploads.device().clone();
    // A batch that is not taken any more is dropped here.
    device.parking("drop of a batch", || {
        while let Some(next) = read.pop() {
            let bytes = next.as_ref().map_or(0, |(_, bytes)| *bytes);
            let upload = || {
                let (batch, _) = next?;
                uploads.make_room();
                uploads.upload(&batch, &mut |_| Ok(()))?.fitted(schema)
            };
            let next = guard::callback("upload", upload);
            let is_last = next.is_err();
            if !uploaded.push(next, bytes) || is_last {
                break;
            }
        }
    });
    uploaded.end();
    discard(&device, read.close());
}

impl Iterator for ReadAhead {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        if !self.process.is_this() {
            self.ended = true;
            return Some(Err(Error::NotSupported {
                device: self.device.id(),
                operation: "next",
                reason: FORKED.into(),
            }));
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
        self.device.id().device_type
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        // In a child the threads do not exist, and one of them may have held a lock.
        if self.process.is_this() {
            // Both threads are told before foreign code runs.
            let (read, uploaded) = (self.read.close(), self.uploaded.close());
            discard(&self.device, read);
            discard(&self.device, uploaded);
        }
    }
}

impl fmt::Debug for ReadAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadAhead")
            .field("schema", &self.schema)
            .field("device", &self.device)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
