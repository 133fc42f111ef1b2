//! Readers of device batches and arrays.

use arrow_schema::{FieldRef, SchemaRef};

use crate::abi::ArrowDeviceType;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::error::Result;
use crate::stream::host::{HostArrayReader, HostRecordBatchReader};

/// A reader of batches of one schema on one type of device: [`arrow_array::RecordBatchReader`] for device memory. Batches
/// may be on several devices of that type. All readers of this crate end after an error.
///
/// # Schemas
/// A batch may have fields that are never null where the stream's may be. Where a batch is exported, uploaded or staged to the
/// host, it gets the stream's schema, without a copy, if it fits: the columns have the same names in the same order, and the same
/// types, except for the names of lists' items, of maps' entries and of the children of run-end encoded columns. Metadata does not
/// matter, except two different extension types. What may be null does not fit a field that is not nullable, unless its nulls have
/// been counted and there are none; nothing is read to find that out. Otherwise the stream ends with an [`Error::InvalidArgument`](crate::Error::InvalidArgument)
/// that names the field and what to do. The same holds for streams of arrays, and for asynchronous ones.
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

/// A reader of arrays of one type, which may be any type. They are on one type of device.
pub trait DeviceArrayReader: Iterator<Item = Result<DeviceArray>> {
    /// Returns the type of all arrays, with name, nullability and metadata.
    fn field(&self) -> FieldRef;

    /// Returns the type of device that all arrays are on.
    fn device_type(&self) -> ArrowDeviceType;

    /// Returns the stream as an iterator of host arrays. Memory that the host can read is not copied; other memory is
    /// downloaded, one array ahead of the consumer ([`HostArrayReader`]).
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use arrow_array::{ArrayRef, Int64Array};
    /// # use arrow_device::{DeviceArrayIterator, DeviceArrayReader, Devices};
    /// # use arrow_schema::{DataType, Field};
    /// # let device = Devices::cpu();
    /// let ids: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    /// let on_device = device.upload_array(&ids)?;
    /// let field = Arc::new(Field::new("id", DataType::Int64, false));
    /// let reader = DeviceArrayIterator::new([Ok(on_device)], field, device.id().device_type);
    /// for back in reader.into_host_reader() {
    ///     assert_eq!(&back?, &ids);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn into_host_reader(self) -> HostArrayReader<Self>
    where
        Self: Sized,
    {
        let field = self.field();
        HostArrayReader::new(self, field)
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

impl<R: DeviceArrayReader + ?Sized> DeviceArrayReader for Box<R> {
    fn field(&self) -> FieldRef {
        (**self).field()
    }

    fn device_type(&self) -> ArrowDeviceType {
        (**self).device_type()
    }
}

/// An iterator that ends after an error, and stays at its end.
#[derive(Debug)]
struct UntilError<I> {
    items: I,
    ended: bool,
}

impl<I> UntilError<I> {
    fn new(items: I) -> Self {
        let ended = false;
        Self { items, ended }
    }
}

impl<T, I: Iterator<Item = Result<T>>> Iterator for UntilError<I> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.items.next();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// Makes a [`DeviceRecordBatchReader`] of any iterator of batches. It ends after an error.
#[derive(Debug)]
pub struct DeviceRecordBatchIterator<I> {
    batches: UntilError<I>,
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
            batches: UntilError::new(batches.into_iter()),
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

/// Makes a [`DeviceArrayReader`] of any iterator of arrays. It ends after an error.
#[derive(Debug)]
pub struct DeviceArrayIterator<I> {
    arrays: UntilError<I>,
    field: FieldRef,
    device_type: ArrowDeviceType,
}

impl<I: Iterator<Item = Result<DeviceArray>>> DeviceArrayIterator<I> {
    /// Wraps arrays that all [fit](DeviceRecordBatchReader#schemas) `field` and are on devices of `device_type`. This is not
    /// checked here, but where arrays are exported or staged to the host.
    pub fn new(
        arrays: impl IntoIterator<IntoIter = I>,
        field: FieldRef,
        device_type: ArrowDeviceType,
    ) -> Self {
        Self {
            arrays: UntilError::new(arrays.into_iter()),
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
