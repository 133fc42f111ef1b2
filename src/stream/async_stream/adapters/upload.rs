//! Host streams as device streams.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_array::nonblocking::RecordBatchStream;
use arrow_schema::SchemaRef;
use futures_core::Stream;

use crate::abi::ArrowDeviceType;
use crate::async_stream::DeviceRecordBatchStream;
use crate::data::DeviceRecordBatch;
use crate::device::{Completion, Device, Queue};
use crate::error::Result;
use crate::stream::upload::Uploads;

/// A [`RecordBatchStream`] whose batches are brought to a device: [`UploadingReader`](crate::UploadingReader) for
/// tasks. A stream that is faster than the device is held up without a wait in a poll: beyond some 128 MiB under way,
/// or 64 batches, the task waits for the oldest upload. A single batch that needs more staging memory than that
/// waits within the poll.
#[derive(Debug)]
pub struct UploadingStream<S> {
    stream: Pin<Box<S>>,
    schema: SchemaRef,
    uploads: Uploads,
    /// For the oldest upload.
    wait: Option<Completion>,
}

impl<S: RecordBatchStream> UploadingStream<S> {
    /// Uploads on `device`'s default queue.
    pub fn new(stream: S, device: &Device) -> Self {
        Self::new_on(stream, device.default_queue())
    }

    /// Uploads on `queue`.
    pub fn new_on(stream: S, queue: Queue) -> Self {
        Self {
            schema: stream.schema().clone(),
            stream: Box::pin(stream),
            uploads: Uploads::new(queue),
            wait: None,
        }
    }
}

impl<S: RecordBatchStream> Stream for UploadingStream<S> {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            // An upload that failed is done: who reads its batch waits for the same event.
            if Completion::poll_all(&mut this.wait, cx).is_pending() {
                return Poll::Pending;
            }
            match this.uploads.oldest_beyond_limit() {
                Some(event) => this.wait = Some(Completion::of(event)),
                None => break,
            }
        }
        let next = ready!(this.stream.as_mut().poll_next(cx));
        Poll::Ready(next.map(|batch| this.uploads.upload(&batch?)))
    }
}

impl<S: RecordBatchStream> DeviceRecordBatchStream for UploadingStream<S> {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.uploads.device().id().device_type
    }
}
