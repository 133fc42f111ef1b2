//! Device streams as host streams.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use arrow_array::RecordBatch;
use arrow_array::nonblocking::RecordBatchStream;
use arrow_schema::{ArrowError, SchemaRef};
use futures_core::Stream;

use crate::async_stream::batch::AsyncBatch;
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::stream::host::CopyQueues;
use crate::transfer::Download;

/// Reads a device stream as host batches, made by
/// [`into_host_stream`](crate::async_stream::DeviceRecordBatchStream::into_host_stream): the asynchronous
/// [`HostRecordBatchReader`](crate::HostRecordBatchReader).
///
/// Batches are downloaded one ahead of the consumer. Polling never blocks, neither for copies nor for sizes that are stored
/// in device memory. The stream ends after an error.
#[derive(Debug)]
pub struct HostRecordBatchStream<S> {
    /// `None` after its end or an error.
    stream: Option<Pin<Box<S>>>,
    schema: SchemaRef,
    prefetch: usize,
    /// Batches that were taken from the stream and not yet returned, oldest first. An error is the last.
    coming: VecDeque<Result<Coming>>,
    queues: CopyQueues,
}

/// A batch on its way to the host.
#[derive(Debug)]
struct Coming {
    download: Download<RecordBatch>,
    /// The batch, once it has arrived.
    arrived: Option<Result<RecordBatch>>,
}

impl Coming {
    fn drive(&mut self, cx: &mut Context<'_>) {
        if self.arrived.is_none() {
            if let Poll::Ready(batch) = Pin::new(&mut self.download).poll(cx) {
                self.arrived = Some(batch);
            }
        }
    }
}

impl<S> HostRecordBatchStream<S> {
    pub(in crate::stream) fn new(stream: S, schema: SchemaRef) -> Self {
        Self {
            schema,
            stream: Some(Box::pin(stream)),
            prefetch: 1,
            coming: VecDeque::new(),
            queues: CopyQueues::default(),
        }
    }

    /// Sets how many batches are downloaded ahead of the consumer; see
    /// [`HostRecordBatchReader::with_prefetch`](crate::HostRecordBatchReader::with_prefetch).
    #[must_use]
    pub fn with_prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }
}

impl<B: Into<AsyncBatch>, S: Stream<Item = Result<B>>> HostRecordBatchStream<S> {
    /// Takes batches from the stream until there are enough, or it is pending.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while self.coming.len() <= self.prefetch && self.worth_it() {
            let Some(stream) = &mut self.stream else {
                break;
            };
            let next = match stream.as_mut().poll_next(cx) {
                Poll::Pending => break,
                Poll::Ready(next) => next,
            };
            match next {
                Some(batch) => {
                    let coming = batch.and_then(|batch| self.start(batch.into().batch));
                    if coming.is_err() {
                        self.stream = None;
                    }
                    self.coming.push_back(coming);
                }
                None => self.stream = None,
            }
        }
    }

    /// Batches that need no copy gain nothing from a prefetch.
    fn worth_it(&self) -> bool {
        let next = self.coming.front();
        next.is_none_or(|next| matches!(next, Ok(next) if !next.download.is_in_place()))
    }

    fn start(&mut self, batch: DeviceRecordBatch) -> Result<Coming> {
        if batch.schema_ref().fields() != self.schema.fields() {
            return Err(Error::argument(
                "a batch's schema differs from its stream's",
            ));
        }
        let queues = self.queues.of(batch.device(), self.prefetch)?;
        Ok(Coming {
            download: Download::lazy(&batch, queues),
            arrived: None,
        })
    }
}

impl<B: Into<AsyncBatch>, S: Stream<Item = Result<B>>> Stream for HostRecordBatchStream<S> {
    type Item = Result<RecordBatch, ArrowError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            // Batches at hand start first, so that their copies overlap with the making of the next one.
            for coming in this.coming.iter_mut().flatten() {
                coming.drive(cx);
            }
            let before = this.coming.len();
            this.fill(cx);
            if this.coming.len() == before {
                break;
            }
        }
        let batch = match this.coming.front() {
            None if this.stream.is_none() => return Poll::Ready(None),
            None => return Poll::Pending,
            Some(Ok(next)) if next.arrived.is_none() => return Poll::Pending,
            Some(_) => this.coming.pop_front(),
        };
        let batch = batch.and_then(|next| match next {
            Ok(next) => next.arrived,
            Err(e) => Some(Err(e)),
        });
        if matches!(batch, Some(Err(_))) {
            this.stream = None;
            this.coming.clear();
        }
        Poll::Ready(batch.map(|batch| batch.map_err(Error::into)))
    }
}

impl<B: Into<AsyncBatch>, S: Stream<Item = Result<B>>> RecordBatchStream
    for HostRecordBatchStream<S>
{
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }
}
