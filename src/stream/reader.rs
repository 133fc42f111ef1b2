//! Readers of device batches.

#[cfg(feature = "async")]
use std::collections::HashMap;

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

    /// Returns the reader as a stream. A thread of its own reads it, so that a reader that blocks (the `get_next` of a foreign stream,
    /// for example) does not block a thread of the executor. It reads ahead until `batches` batches, at least one, wait to be taken,
    /// and then one more. It ends with the reader, after an error, which a panic of the reader is too, or at the next batch after
    /// the stream has been dropped. In a child of the process (`fork`), where the thread does not exist, the next item is an error.
    ///
    /// # Errors
    /// [`Error::Arrow`](crate::Error::Arrow) with an [`IoError`](arrow_schema::ArrowError::IoError) if the thread cannot be started.
    #[cfg(feature = "async")]
    fn into_stream(
        self,
        batches: usize,
    ) -> Result<impl DeviceRecordBatchStream + Unpin + Send + 'static>
    where
        Self: Sized + Send + 'static,
    {
        let (schema, device_type) = (self.schema(), self.device_type());
        let batches = super::ahead::ahead(self, batches)?;
        Ok(DeviceRecordBatches::of(batches, schema, device_type))
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

/// A stream of batches of one schema on one type of device: arrow-rs's [`RecordBatchStream`] for device memory. Batches may
/// be on several devices of that type. All streams of this crate end after an error.
///
/// [`RecordBatchStream`]: arrow_array::nonblocking::RecordBatchStream
#[cfg(feature = "async")]
pub trait DeviceRecordBatchStream: futures_core::Stream<Item = Result<DeviceRecordBatch>> {
    /// Returns the schema that all batches [fit](crate::DeviceRecordBatchReader#schemas).
    fn schema(&self) -> SchemaRef;

    /// Returns the type of device that all batches are on.
    fn device_type(&self) -> ArrowDeviceType;

    /// Returns key-value metadata of the whole stream, if there is any. An async device stream carries it
    /// (`ArrowAsyncProducer.additional_metadata`).
    fn metadata(&self) -> Option<&HashMap<String, String>> {
        None
    }

    /// Returns key-value metadata of the batch that was returned last, if there is any. An async device stream carries it with each
    /// batch (the argument of `on_next_task`).
    fn batch_metadata(&self) -> Option<&HashMap<String, String>> {
        None
    }

    /// Returns the stream as arrow-rs's [`RecordBatchStream`]. Memory that the host can read is not copied; other memory
    /// is downloaded, one batch ahead of the consumer. Polling never blocks. Metadata is dropped.
    ///
    /// [`RecordBatchStream`]: arrow_array::nonblocking::RecordBatchStream
    fn into_host_stream(self) -> HostRecordBatchReader<std::pin::Pin<Box<Self>>>
    where
        Self: Sized,
    {
        let schema = self.schema();
        HostRecordBatchReader::new(Box::pin(self), schema)
    }
}

/// Makes a [`DeviceRecordBatchReader`] of any iterator of batches, and a stream of any stream of batches. It ends after an error.
#[derive(Debug)]
pub struct DeviceRecordBatches<B> {
    /// `None` after its end or an error.
    pub(super) batches: Option<B>,
    pub(super) schema: SchemaRef,
    pub(super) device_type: ArrowDeviceType,
    #[cfg(feature = "async")]
    pub(super) metadata: Option<HashMap<String, String>>,
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> DeviceRecordBatches<I> {
    /// Wraps batches that all [fit](DeviceRecordBatchReader#schemas) `schema` and are on devices of `device_type`. This is not
    /// checked here, but where batches are exported or staged to the host.
    pub fn new(
        batches: impl IntoIterator<IntoIter = I>,
        schema: SchemaRef,
        device_type: ArrowDeviceType,
    ) -> Self {
        Self::of(batches.into_iter(), schema, device_type)
    }
}

impl<B> DeviceRecordBatches<B> {
    pub(super) fn of(batches: B, schema: SchemaRef, device_type: ArrowDeviceType) -> Self {
        Self {
            batches: Some(batches),
            schema,
            device_type,
            #[cfg(feature = "async")]
            metadata: None,
        }
    }

    /// Ends after an error.
    pub(super) fn ended<T>(&mut self, next: Option<Result<T>>) -> Option<Result<T>> {
        if !matches!(next, Some(Ok(_))) {
            self.batches = None;
        }
        next
    }
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> Iterator for DeviceRecordBatches<I> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.batches.as_mut()?.next();
        self.ended(next)
    }
}

impl<I: Iterator<Item = Result<DeviceRecordBatch>>> DeviceRecordBatchReader
    for DeviceRecordBatches<I>
{
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
