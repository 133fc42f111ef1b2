//! Device readers.

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, FieldRef, SchemaRef};

use crate::abi::ArrowDeviceType;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{Device, Queue};
use crate::error::{Error, Result};

/// A stream of batches of one schema on one type of device: [`arrow_array::RecordBatchReader`] for
/// device memory.
pub trait DeviceRecordBatchReader: Iterator<Item = Result<DeviceRecordBatch>> {
    /// The schema of all batches.
    fn schema(&self) -> SchemaRef;

    /// The type of device that all batches are on.
    fn device_type(&self) -> ArrowDeviceType;

    /// The stream as a plain [`RecordBatchReader`]: memory that the host can read is not copied,
    /// other memory is brought down.
    ///
    /// ```
    /// # use arrow_array::{RecordBatchIterator, record_batch};
    /// # use arrow_device::{DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices, export_reader};
    /// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
    /// let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
    /// let mut stream = export_reader(reader, &Devices::cpu())?;
    /// // SAFETY: the stream is one of ours.
    /// let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }?;
    /// for back in reader.into_host_reader() {
    ///     assert_eq!(back?, batch);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn into_host_reader(self) -> HostRecordBatchReader<Self>
    where
        Self: Sized,
    {
        HostRecordBatchReader {
            reader: self,
            failed: false,
        }
    }
}

/// A stream of arrays of one type, which need not be structs.
pub trait DeviceArrayReader: Iterator<Item = Result<DeviceArray>> {
    /// The type of all arrays, with name, nullability and metadata.
    fn field(&self) -> FieldRef;

    /// The type of device that all arrays are on.
    fn device_type(&self) -> ArrowDeviceType;
}

impl<R: DeviceRecordBatchReader + ?Sized> DeviceRecordBatchReader for Box<R> {
    fn schema(&self) -> SchemaRef {
        (**self).schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        (**self).device_type()
    }
}

impl<R: DeviceArrayReader + ?Sized> DeviceArrayReader for Box<R> {
    fn field(&self) -> FieldRef {
        (**self).field()
    }

    fn device_type(&self) -> ArrowDeviceType {
        (**self).device_type()
    }
}

/// Any iterator of batches as a [`DeviceRecordBatchReader`].
#[derive(Debug)]
pub struct DeviceRecordBatchIterator<I> {
    batches: I,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> DeviceRecordBatchIterator<I> {
    /// All `batches` are of `schema` and on devices of `device_type`; exports check it.
    pub fn new(
        batches: impl IntoIterator<IntoIter = I>,
        schema: SchemaRef,
        device_type: ArrowDeviceType,
    ) -> Self {
        Self {
            batches: batches.into_iter(),
            schema,
            device_type,
        }
    }
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> Iterator for DeviceRecordBatchIterator<I> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        self.batches.next()
    }
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> DeviceRecordBatchReader
    for DeviceRecordBatchIterator<I>
{
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

/// Any iterator of arrays as a [`DeviceArrayReader`].
#[derive(Debug)]
pub struct DeviceArrayIterator<I> {
    arrays: I,
    field: FieldRef,
    device_type: ArrowDeviceType,
}

impl<I: Iterator<Item = Result<DeviceArray>>> DeviceArrayIterator<I> {
    /// All `arrays` are of `field`'s type and on devices of `device_type`; exports check it.
    pub fn new(
        arrays: impl IntoIterator<IntoIter = I>,
        field: FieldRef,
        device_type: ArrowDeviceType,
    ) -> Self {
        Self {
            arrays: arrays.into_iter(),
            field,
            device_type,
        }
    }
}

impl<I: Iterator<Item = Result<DeviceArray>>> Iterator for DeviceArrayIterator<I> {
    type Item = Result<DeviceArray>;

    fn next(&mut self) -> Option<Self::Item> {
        self.arrays.next()
    }
}

impl<I: Iterator<Item = Result<DeviceArray>>> DeviceArrayReader for DeviceArrayIterator<I> {
    fn field(&self) -> FieldRef {
        self.field.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

/// A [`RecordBatchReader`] whose batches are brought to a device as they are asked for. An upload
/// runs on while the next batch is produced.
#[derive(Debug)]
pub struct UploadingReader<R> {
    reader: R,
    queue: Queue,
}

impl<R: RecordBatchReader> UploadingReader<R> {
    /// Uploads on `device`'s default queue.
    pub fn new(reader: R, device: &Device) -> Self {
        Self::new_on(reader, device.default_queue())
    }

    /// Uploads on `queue`.
    pub fn new_on(reader: R, queue: Queue) -> Self {
        Self { reader, queue }
    }
}

impl<R: RecordBatchReader> Iterator for UploadingReader<R> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match self.reader.next()? {
            Ok(batch) => batch,
            Err(e) => return Some(Err(e.into())),
        };
        Some(self.queue.device().upload_on(&batch, &self.queue))
    }
}

impl<R: RecordBatchReader> DeviceRecordBatchReader for UploadingReader<R> {
    fn schema(&self) -> SchemaRef {
        self.reader.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.queue.device().id().device_type
    }
}

/// A device stream read as host batches. After an error it ends.
#[derive(Debug)]
pub struct HostRecordBatchReader<R> {
    reader: R,
    failed: bool,
}

impl<R: DeviceRecordBatchReader> Iterator for HostRecordBatchReader<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let schema = self.reader.schema();
        let batch = self.reader.next()?.and_then(|batch| {
            if batch.schema().fields() != schema.fields() {
                return Err(Error::argument(
                    "a batch's schema differs from its stream's",
                ));
            }
            batch.to_host()
        });
        self.failed = batch.is_err();
        Some(batch.map_err(Error::into))
    }
}

impl<R: DeviceRecordBatchReader> RecordBatchReader for HostRecordBatchReader<R> {
    fn schema(&self) -> SchemaRef {
        self.reader.schema()
    }
}
