//! Host streams as device streams.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_array::nonblocking::RecordBatchStream;
use arrow_schema::{ArrowError, SchemaRef};
use futures_core::Stream;

use crate::abi::ArrowDeviceType;
use crate::async_stream::DeviceRecordBatchStream;
use crate::data::DeviceRecordBatch;
use crate::device::{Completion, Device, Queue};
use crate::error::{Error, Result};
use crate::memory::{MemoryBudget, Reserved};
use crate::stream::upload::Uploads;

/// Uploads the batches of a host stream to a device: the asynchronous [`UploadingReader`](crate::UploadingReader).
///
/// If the host stream is faster than the device, this stream is pending once 128 MiB or 64 batches are being uploaded, until
/// the oldest upload is done. Polling does not block, except to upload a single batch that needs more staging
/// memory than that. The stream ends after an error, its own or that of an upload.
#[derive(Debug)]
pub struct UploadingStream<S> {
    /// `None` after its end or an error.
    stream: Option<Pin<Box<S>>>,
    schema: SchemaRef,
    uploads: Uploads,
    /// The wait for the oldest upload.
    wait: Option<Completion>,
    /// What the batch that was returned last takes of the budget.
    returned: Reserved,
}

impl<S: RecordBatchStream> UploadingStream<S> {
    /// Uploads on the default queue of `device`.
    pub fn new(stream: S, device: &Device) -> Self {
        let schema = stream.schema().clone();
        Self::new_on(schema, stream, device.default_queue())
    }
}

impl<S, E> UploadingStream<S>
where
    S: Stream<Item = std::result::Result<RecordBatch, E>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Uploads the batches of any stream on `queue`. All of them must [fit](crate::DeviceRecordBatchReader#schemas) `schema`.
    ///
    /// ```
    /// # use arrow_array::RecordBatch;
    /// # use arrow_device::async_stream::{DeviceRecordBatchStream, UploadingStream};
    /// # use arrow_device::Device;
    /// # use arrow_schema::SchemaRef;
    /// # use futures::Stream;
    /// fn up(
    ///     schema: SchemaRef,
    ///     batches: impl Stream<Item = std::io::Result<RecordBatch>>,
    ///     device: &Device,
    /// ) -> impl DeviceRecordBatchStream {
    ///     UploadingStream::new_on(schema, batches, device.default_queue())
    /// }
    /// ```
    pub fn new_on(schema: SchemaRef, stream: S, queue: Queue) -> Self {
        Self {
            schema,
            stream: Some(Box::pin(stream)),
            uploads: Uploads::new(queue),
            wait: None,
            returned: Reserved::default(),
        }
    }
}

impl<S> UploadingStream<S> {
    /// Asks `budget` before device memory is allocated for a batch.
    #[must_use]
    pub fn with_budget(mut self, budget: Arc<dyn MemoryBudget>) -> Self {
        self.returned = Reserved::new(Some(budget));
        self
    }
}

/// Unwraps an error of this crate or of arrow-rs, and wraps one of another crate.
fn error_of(e: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    let e = e.into().downcast::<ArrowError>();
    Error::from(e.map_or_else(ArrowError::ExternalError, |e| *e))
}

impl<S, E> Stream for UploadingStream<S>
where
    S: Stream<Item = std::result::Result<RecordBatch, E>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else {
            return Poll::Ready(None);
        };
        // The reader is done with the batch before.
        this.returned.free();
        ready!(this.uploads.poll_room(&mut this.wait, cx));
        let next = ready!(stream.as_mut().poll_next(cx));
        let mut admit = |bytes| this.returned.grow(bytes);
        let schema = &this.schema;
        let mut upload = |batch| this.uploads.upload(&batch, &mut admit)?.fitted(schema);
        let next = next.map(|batch| batch.map_err(error_of).and_then(&mut upload));
        if !matches!(next, Some(Ok(_))) {
            this.stream = None;
            this.returned.free();
        }
        Poll::Ready(next)
    }
}

impl<S, E> DeviceRecordBatchStream for UploadingStream<S>
where
    S: Stream<Item = std::result::Result<RecordBatch, E>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.uploads.device().id().device_type
    }
}
