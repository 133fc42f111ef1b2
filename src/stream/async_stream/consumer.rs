//! The consumer: the stream that a handler fills.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use futures_core::Stream;
use futures_core::future::BoxFuture;

use super::DeviceRecordBatchStream;
use super::handler::{Item, Metadata, Opened, Producer, Shared, Task};
use crate::abi::{ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler};
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::interchange::{ImportOptions, import_async};

/// A producer's async device stream: batches in order, with their [metadata](DeviceRecordBatchStream::batch_metadata). It ends after
/// an error. Dropping it cancels it; batches may outlive it.
///
/// A batch carries the event after which it may be read. The stream itself waits for that event in two cases only: for
/// [`Validation::Full`](crate::Validation::Full), and for a root array whose validity bitmap has no known null count. The
/// task is then woken once the checked data has been copied to the host.
pub struct AsyncDeviceRecordBatchStream {
    /// `None` once it has ended.
    consumer: Option<Consumer>,
    opened: Opened,
    /// A batch that is being checked.
    arrived: Option<Checking>,
    /// That of the batch that was returned last.
    metadata: Metadata,
}

type Checking = Pin<Box<dyn Future<Output = Result<(DeviceRecordBatch, Metadata)>> + Send + Sync>>;

impl fmt::Debug for AsyncDeviceRecordBatchStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AsyncDeviceRecordBatchStream({:?})", self.opened)
    }
}

impl AsyncDeviceRecordBatchStream {
    /// Makes a handler for a producer, and a future of the stream that it fills, which is ready once the producer has sent the schema.
    /// Dropping the future cancels the stream: `on_schema` is answered with `ECANCELED`. The stream first requests `queue_depth` batches (at
    /// least 1), then half as many (rounded up) each time that so many have been taken from it. So at most `queue_depth` batches
    /// wait in it, and a producer on another thread is woken for several at once.
    ///
    /// The handler is for a producer in C, or for [`produce`](crate::async_stream::produce). Its memory is freed once the producer
    /// has called its `release` and the stream has been dropped. If no producer gets it, it leaks, and the stream never opens.
    ///
    /// The producer is not called any more once its call of the handler's `release` has returned. So `release` waits for a
    /// `request` or `cancel` that another thread is in. A producer must not hold a lock around `release` that those take.
    ///
    /// The example of [the module](crate::async_stream) reads a stream.
    ///
    /// # Safety
    /// The producer that is given the handler keeps to the async device stream interface, and its arrays meet the safety
    /// requirements of [`DeviceArray::import`](crate::DeviceArray::import).
    pub unsafe fn handler(
        queue_depth: usize,
        options: ImportOptions,
    ) -> (
        *mut FFI_ArrowAsyncDeviceStreamHandler,
        BoxFuture<'static, Result<Self>>,
    ) {
        let shared = Shared::new(queue_depth);
        let handler = shared.handler.get();
        let consumer = Consumer {
            shared,
            options,
            taken: 0,
        };
        let opening = async move {
            match poll_fn(|cx| consumer.shared.inbox.poll(cx.waker())).await {
                Some(Item::Schema(opened)) => Ok(Self {
                    consumer: Some(consumer),
                    opened,
                    arrived: None,
                    metadata: HashMap::new(),
                }),
                Some(Item::Failed(e)) => Err(e),
                _ => Err(Error::invalid("on_schema", "was not called")),
            }
        };
        (handler, Box::pin(opening))
    }
}

impl Stream for AsyncDeviceRecordBatchStream {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(consumer) = &mut this.consumer else {
            return Poll::Ready(None);
        };
        let next = loop {
            if let Some(checking) = &mut this.arrived {
                let checked = ready!(checking.as_mut().poll(cx));
                this.arrived = None;
                break Some(checked);
            }
            match ready!(consumer.shared.inbox.poll(cx.waker())) {
                Some(Item::Task(task, of)) => match consumer.extract(task, of, &this.opened) {
                    Ok(arrived) => this.arrived = Some(arrived),
                    Err(e) => break Some(Err(e)),
                },
                Some(Item::Failed(e)) => break Some(Err(e)),
                Some(Item::Schema(_) | Item::End) | None => break None,
            }
        };
        Poll::Ready(match next {
            Some(Ok((batch, metadata))) => {
                this.metadata = metadata;
                Some(Ok(batch))
            }
            end => {
                this.consumer = None;
                end.map(|e| e.map(|(batch, _)| batch))
            }
        })
    }
}

impl DeviceRecordBatchStream for AsyncDeviceRecordBatchStream {
    fn schema(&self) -> SchemaRef {
        self.opened.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.opened.device_type
    }

    fn metadata(&self) -> Option<&HashMap<String, String>> {
        Some(&self.opened.metadata)
    }

    fn batch_metadata(&self) -> Option<&HashMap<String, String>> {
        Some(&self.metadata)
    }
}

/// The receiving end of a handler. Dropping it cancels the stream.
struct Consumer {
    shared: Arc<Shared>,
    options: ImportOptions,
    /// Tasks that were taken since the last request.
    taken: i64,
}

impl Consumer {
    /// Cancels the stream, unless it has ended. Returns what has come.
    fn end(&self) -> VecDeque<Item> {
        // SAFETY: `Inbox::abandon` calls this only before the handler's release has returned to the producer.
        let cancel = |producer: Producer| _ = unsafe { producer.cancel() };
        self.shared.inbox.abandon(cancel)
    }

    fn extract(&mut self, task: Task, metadata: Metadata, opened: &Opened) -> Result<Checking> {
        let array = task.extract(opened.device_type).map_err(|e| match e {
            // `on_error` may have reported more.
            Error::AsyncProducer { .. } => {
                let reported = self.end().into_iter().find_map(|item| match item {
                    Item::Failed(e) => Some(e),
                    _ => None,
                });
                reported.unwrap_or(e)
            }
            e => e,
        })?;
        self.taken += 1;
        // Each request may wake the producer's thread. At least as many tasks as this are still requested, so both sides go on.
        if self.taken >= (self.shared.queue_depth + 1) / 2 {
            let (n, mut requested) = (std::mem::take(&mut self.taken), Ok(()));
            // SAFETY: `Inbox::request` calls this only before the handler's release has returned to the producer.
            let request = |producer: Producer| requested = unsafe { producer.request(n) };
            self.shared.inbox.request(n as u64, request);
            requested?;
        }
        let (schema, options) = (opened.schema.clone(), &self.options);
        // SAFETY: the caller of `handler` guarantees that the producer's arrays may be imported.
        let batch = unsafe { import_async(array, schema, options) }?;
        Ok(Box::pin(async move { Ok((batch.await?, metadata)) }))
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // Dropping what was queued extracts it with null.
        drop(self.end());
    }
}
