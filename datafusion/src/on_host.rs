//! Streams of a device that begin anew on the host.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::{RecordBatchStream, SendableRecordBatchStream};
use futures::Stream;

/// Starts a partition on the host, for this reason.
pub(super) type OnHost = Box<dyn FnOnce(&str) -> Result<SendableRecordBatchStream> + Send>;

/// A partition on a device, which runs on the host if there is too little memory for its first batch.
pub(super) struct UntilFirst {
    pub(super) stream: SendableRecordBatchStream,
    /// `None` once there has been a batch.
    pub(super) host: Option<OnHost>,
}

impl Stream for UntilFirst {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.stream.as_mut().poll_next(cx));
        let started = match (&next, self.host.take()) {
            (Some(Err(e)), Some(host)) if is_exhausted(e) => host(&e.to_string()),
            _ => return Poll::Ready(next),
        };
        match started {
            Ok(stream) => self.stream = stream,
            Err(e) => return Poll::Ready(Some(Err(e))),
        }
        self.stream.as_mut().poll_next(cx)
    }
}

/// Whether it is a lack of memory.
pub(super) fn is_exhausted(e: &DataFusionError) -> bool {
    matches!(e.find_root(), DataFusionError::ResourcesExhausted(_))
}

impl RecordBatchStream for UntilFirst {
    fn schema(&self) -> SchemaRef {
        self.stream.schema()
    }
}
