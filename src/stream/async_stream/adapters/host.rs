//! Device streams as host streams.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_array::nonblocking::RecordBatchStream;
use arrow_schema::{ArrowError, SchemaRef};
use futures_core::Stream;

use crate::async_stream::adapters::ahead::{Ahead, Coming};
use crate::async_stream::batch::AsyncBatch;
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::memory::MemoryBudget;
use crate::stream::host::CopyQueues;
use crate::transfer::{Download, Extent};

/// Reads a device stream as host batches, made by
/// [`into_host_stream`](crate::async_stream::DeviceRecordBatchStream::into_host_stream): the asynchronous
/// [`HostRecordBatchReader`](crate::HostRecordBatchReader).
///
/// Batches are downloaded one ahead of the consumer. Polling never blocks, neither for copies nor for sizes that are stored
/// in device memory. The stream ends after an error.
#[derive(Debug)]
pub struct HostRecordBatchStream<S> {
    ahead: Ahead<S, RecordBatch>,
    schema: SchemaRef,
    queues: CopyQueues,
    extent: Extent,
}

impl<S> HostRecordBatchStream<S> {
    pub(in crate::stream) fn new(stream: S, schema: SchemaRef) -> Self {
        Self {
            ahead: Ahead::new(stream),
            schema,
            queues: CopyQueues::default(),
            extent: Extent::Rows,
        }
    }

    /// Sets how many batches are downloaded ahead of the consumer; see
    /// [`HostRecordBatchReader::with_prefetch`](crate::HostRecordBatchReader::with_prefetch).
    #[must_use]
    pub fn with_prefetch(mut self, batches: usize) -> Self {
        self.ahead.prefetch = batches;
        self
    }

    /// Gives each column of a batch host memory of its own, so that a consumer that keeps one column keeps no other's memory. By
    /// default the columns of a batch share one piece of memory, and each keeps all of it.
    ///
    /// There is still one list of copies and one host wait for a batch, but columns that are next to each other on the device
    /// are a copy each. Columns of less than 16 KiB, or of less than 1/64 of the batch, share pieces of about that size.
    #[must_use]
    pub fn with_separate_columns(mut self) -> Self {
        self.extent = Extent::Columns;
        self
    }

    /// Asks `budget` before host memory is allocated for a batch. Those ahead of the consumer count, too.
    #[must_use]
    pub fn with_budget(mut self, budget: Arc<dyn MemoryBudget>) -> Self {
        self.ahead.budget = Some(budget);
        self
    }
}

impl<B: Into<AsyncBatch>, S: Stream<Item = Result<B>>> Stream for HostRecordBatchStream<S> {
    type Item = Result<RecordBatch, ArrowError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self {
            ahead,
            schema,
            queues,
            extent,
        } = &mut *self;
        let prefetch = ahead.prefetch;
        let start = |batch: DeviceRecordBatch, reserved| {
            let batch = batch.fitted(schema)?;
            let queues = queues.of(batch.device(), prefetch)?;
            let download = Download::lazy(&batch, *extent, queues);
            Ok(Coming::started(download.with_reserved(reserved)))
        };
        let next = ready!(ahead.poll_next(cx, start));
        Poll::Ready(next.map(|batch| batch.map_err(Error::into)))
    }
}

impl<B: Into<AsyncBatch>, S: Stream<Item = Result<B>>> RecordBatchStream
    for HostRecordBatchStream<S>
{
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }
}
