//! Readers as streams.

use std::pin::Pin;
use std::task::{Context, Poll};

use arrow_schema::SchemaRef;
use futures_core::Stream;

use crate::abi::ArrowDeviceType;
use crate::async_stream::DeviceRecordBatchStream;
use crate::data::DeviceRecordBatch;
use crate::error::Result;
use crate::stream::DeviceRecordBatchReader;
use crate::stream::ahead::{Ahead, ahead};

/// Makes a stream of a reader. A thread of its own reads it, so that a reader that blocks (the `get_next` of a foreign stream,
/// for example) does not block a thread of the executor. The thread ends with the reader, after an error, or at the next batch
/// after the stream has been dropped.
#[derive(Debug)]
pub struct ReaderStream {
    batches: Ahead<DeviceRecordBatch>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
}

impl ReaderStream {
    /// Starts the thread. It reads ahead until `depth` batches (at least 1) wait to be taken, and then one more.
    ///
    /// # Errors
    /// [`Error::Arrow`](crate::Error::Arrow) with an [`IoError`](arrow_schema::ArrowError::IoError) if the thread cannot be started.
    pub fn spawn(
        reader: impl DeviceRecordBatchReader + Send + 'static,
        depth: usize,
    ) -> Result<Self> {
        let (schema, device_type) = (reader.schema(), reader.device_type());
        Ok(Self {
            batches: ahead(reader, depth)?,
            schema,
            device_type,
        })
    }
}

impl Stream for ReaderStream {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.batches).poll_next(cx)
    }
}

impl DeviceRecordBatchStream for ReaderStream {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
