//! Streams of device batches.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use futures_core::Stream;

use super::batch::AsyncBatch;
use crate::abi::ArrowDeviceType;
use crate::error::Result;
use crate::stream::HostRecordBatchReader;

/// A stream of batches of one schema on one type of device: arrow-rs's [`RecordBatchStream`] for device memory. Batches may
/// be on several devices of that type. All streams of this crate end after an error.
///
/// [`RecordBatchStream`]: arrow_array::nonblocking::RecordBatchStream
pub trait DeviceRecordBatchStream: Stream<Item = Result<Self::Batch>> {
    /// [`DeviceRecordBatch`](crate::DeviceRecordBatch), or [`AsyncBatch`] if batches have metadata.
    type Batch: Into<AsyncBatch>;

    /// Returns the schema that all batches [fit](crate::DeviceRecordBatchReader#schemas).
    fn schema(&self) -> SchemaRef;

    /// Returns the type of device that all batches are on.
    fn device_type(&self) -> ArrowDeviceType;

    /// Returns the stream as arrow-rs's [`RecordBatchStream`]. Memory that the host can read is not copied; other memory
    /// is downloaded, one batch ahead of the consumer. Polling never blocks. Metadata of batches is dropped.
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
    type Batch = S::Batch;

    fn schema(&self) -> SchemaRef {
        (**self).schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        (**self).device_type()
    }
}

/// Makes a [`DeviceRecordBatchStream`] of any stream of batches. It ends after an error.
#[derive(Debug)]
pub struct DeviceRecordBatchStreamAdapter<S> {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
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
            stream: Some(Box::pin(stream)),
        }
    }
}

impl<B, S: Stream<Item = Result<B>>> Stream for DeviceRecordBatchStreamAdapter<S> {
    type Item = Result<B>;

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

    fn size_hint(&self) -> (usize, Option<usize>) {
        match &self.stream {
            // An error may end it earlier.
            Some(stream) => (0, stream.size_hint().1),
            None => (0, Some(0)),
        }
    }
}

impl<B: Into<AsyncBatch>, S: Stream<Item = Result<B>>> DeviceRecordBatchStream
    for DeviceRecordBatchStreamAdapter<S>
{
    type Batch = B;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
