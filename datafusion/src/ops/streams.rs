//! Streams of some columns, and of some rows, of another.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Result};
use arrow_schema::SchemaRef;
use futures_core::Stream;

use crate::stream::SendableDeviceStream;

/// A stream with a schema of its own: some of the columns, perhaps renamed. Nothing is moved.
pub(super) struct Columns {
    pub(super) stream: SendableDeviceStream,
    pub(super) schema: SchemaRef,
    /// `None`: all columns in their order.
    pub(super) columns: Option<Arc<[usize]>>,
}

impl Columns {
    fn of(&self, batch: DeviceRecordBatch) -> Result<DeviceRecordBatch> {
        let own = match &self.columns {
            None if batch.schema_ref() == &self.schema => return Ok(batch),
            None => batch.columns().collect::<Vec<_>>(),
            Some(columns) => {
                let own = columns.iter().map(|&i| batch.column(i));
                own.collect::<Result<_>>()?
            }
        };
        let (device, rows) = (batch.device(), batch.num_rows());
        DeviceRecordBatch::try_new_with_rows(device, self.schema.clone(), &own, rows)
    }
}

impl Stream for Columns {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.stream.as_mut().poll_next(cx));
        Poll::Ready(next.map(|batch| batch.and_then(|batch| self.of(batch))))
    }
}

impl DeviceRecordBatchStream for Columns {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.stream.device_type()
    }
}

/// A stream without its first `skip` rows, and with at most `left` of those that follow. Nothing is moved.
pub(super) struct Limited {
    /// `None` once enough rows have come, which ends its producer.
    stream: Option<SendableDeviceStream>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    skip: usize,
    left: Option<usize>,
}

impl Limited {
    pub(super) fn new(stream: SendableDeviceStream, skip: usize, fetch: Option<usize>) -> Self {
        Self {
            schema: stream.schema(),
            device_type: stream.device_type(),
            stream: (fetch != Some(0)).then_some(stream),
            skip,
            left: fetch,
        }
    }

    /// The rows of a batch that are wanted; `None` if it has none of them.
    fn cut(&mut self, batch: DeviceRecordBatch) -> Result<Option<DeviceRecordBatch>> {
        let rows = batch.num_rows();
        let skip = self.skip.min(rows);
        self.skip -= skip;
        let wanted = self.left.unwrap_or(rows).min(rows - skip);
        if wanted == 0 {
            return Ok(None);
        }
        self.left = self.left.map(|left| left - wanted);
        if self.left == Some(0) {
            self.stream = None;
        }
        let whole = wanted == rows;
        let batch = if whole {
            batch
        } else {
            batch.slice(skip, wanted)?
        };
        Ok(Some(batch))
    }
}

impl Stream for Limited {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(stream) = &mut self.stream else {
                return Poll::Ready(None);
            };
            let Some(next) = ready!(stream.as_mut().poll_next(cx)) else {
                self.stream = None;
                return Poll::Ready(None);
            };
            if let Some(cut) = next.and_then(|batch| self.cut(batch)).transpose() {
                return Poll::Ready(Some(cut));
            }
        }
    }
}

impl DeviceRecordBatchStream for Limited {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
