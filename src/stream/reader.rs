//! Readers of device batches.

use arrow_schema::SchemaRef;

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::error::Result;
use crate::stream::host::HostRecordBatchReader;

/// A reader of batches of one schema on one type of device: [`arrow_array::RecordBatchReader`] for device memory. Batches
/// may be on several devices of that type. All readers of this crate end after an error.
///
/// # Schemas
/// A batch may have fields that are never null where the stream's may be. Where a batch is exported, uploaded or staged to the
/// host, it gets the stream's schema, without a copy, if it fits: the columns have the same names in the same order, and the same
/// types, except for the names of lists' items, of maps' entries and of the children of run-end encoded columns. Metadata does not
/// matter, except two different extension types. What may be null does not fit a field that is not nullable, unless its nulls have
/// been counted and there are none; nothing is read to find that out. Otherwise the stream ends with an [`Error::InvalidArgument`](crate::Error::InvalidArgument)
/// that names the field and what to do. The same holds for asynchronous streams.
pub trait DeviceRecordBatchReader: Iterator<Item = Result<DeviceRecordBatch>> {
    /// Returns the schema that all batches fit.
    fn schema(&self) -> SchemaRef;

    /// Returns the type of device that all batches are on.
    fn device_type(&self) -> ArrowDeviceType;

    /// Returns the stream as a plain [`RecordBatchReader`](arrow_array::RecordBatchReader). Memory that the host can read is
    /// not copied; other memory is downloaded, one batch ahead of the consumer ([`HostRecordBatchReader`]).
    ///
    /// ```
    /// # use arrow_array::{RecordBatchIterator, record_batch};
    /// # use arrow_device::{DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices, export_reader};
    /// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
    /// let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
    /// let mut stream = export_reader(reader, &Devices::cpu())?;
    /// // SAFETY: the stream is this crate's.
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
        let schema = self.schema();
        HostRecordBatchReader::new(self, schema)
    }
}

impl<R: DeviceRecordBatchReader + ?Sized> DeviceRecordBatchReader for Box<R> {
    fn schema(&self) -> SchemaRef {
        (**self).schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        (**self).device_type()
    }
}

/// Makes a [`DeviceRecordBatchReader`] of any iterator of batches. It ends after an error.
#[derive(Debug)]
pub struct DeviceRecordBatchIterator<I> {
    batches: I,
    ended: bool,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> DeviceRecordBatchIterator<I> {
    /// Wraps batches that all [fit](DeviceRecordBatchReader#schemas) `schema` and are on devices of `device_type`. This is not
    /// checked here, but where batches are exported or staged to the host.
    pub fn new(
        batches: impl IntoIterator<IntoIter = I>,
        schema: SchemaRef,
        device_type: ArrowDeviceType,
    ) -> Self {
        Self {
            batches: batches.into_iter(),
            ended: false,
            schema,
            device_type,
        }
    }
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> Iterator for DeviceRecordBatchIterator<I> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.batches.next();
        self.ended = !matches!(next, Some(Ok(_)));
        next
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
