//! Streams of device batches.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use futures_core::Stream;

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::error::Result;
use crate::stream::HostRecordBatchReader;

/// A stream of batches of one schema on one type of device: arrow-rs's [`RecordBatchStream`] for device memory. Batches may
/// be on several devices of that type. All streams of this crate end after an error.
///
/// [`RecordBatchStream`]: arrow_array::nonblocking::RecordBatchStream
pub trait DeviceRecordBatchStream: Stream<Item = Result<DeviceRecordBatch>> {
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
    fn into_host_stream(self) -> HostRecordBatchReader<Pin<Box<Self>>>
    where
        Self: Sized,
    {
        let schema = self.schema();
        HostRecordBatchReader::new(Box::pin(self), schema)
    }
}

impl<S: DeviceRecordBatchStream + ?Sized> DeviceRecordBatchStream for Pin<Box<S>> {
    fn schema(&self) -> SchemaRef {
        (**self).schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        (**self).device_type()
    }

    fn metadata(&self) -> Option<&HashMap<String, String>> {
        (**self).metadata()
    }

    fn batch_metadata(&self) -> Option<&HashMap<String, String>> {
        (**self).batch_metadata()
    }
}

/// Makes a [`DeviceRecordBatchStream`] of any stream of batches. It ends after an error.
#[derive(Debug)]
pub struct DeviceRecordBatchStreamAdapter<S> {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    metadata: Option<HashMap<String, String>>,
    /// Boxed, so that this can be moved. `None` after its end or an error.
    stream: Option<Pin<Box<S>>>,
}

impl<S: Stream> DeviceRecordBatchStreamAdapter<S> {
    /// Wraps a stream whose batches all [fit](crate::DeviceRecordBatchReader#schemas) `schema` and are on devices of
    /// `device_type`. This is not checked here, but where batches are exported ([`produce`](super::produce)) or staged to the host.
    pub fn new(schema: SchemaRef, device_type: ArrowDeviceType, stream: S) -> Self {
        Self {
            schema,
            device_type,
            metadata: None,
            stream: Some(Box::pin(stream)),
        }
    }

    /// Sets the [metadata](DeviceRecordBatchStream::metadata) of the whole stream.
    #[must_use]
    pub fn with_metadata(mut self, metadata: HashMap<String, String>) -> Self {
        self.metadata = Some(metadata);
        self
    }
}

impl<S: Stream<Item = Result<DeviceRecordBatch>>> Stream for DeviceRecordBatchStreamAdapter<S> {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        let next = ready!(stream.as_mut().poll_next(cx));
        if !matches!(next, Some(Ok(_))) {
            self.stream = None;
        }
        Poll::Ready(next)
    }
}

impl<S: Stream<Item = Result<DeviceRecordBatch>>> DeviceRecordBatchStream
    for DeviceRecordBatchStreamAdapter<S>
{
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.metadata.as_ref()
    }
}
