//! The stream that a handler fills.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use futures_core::Stream;
use futures_core::stream::FusedStream;

use super::handler::AsyncStreamHandler;
use super::inbox::Next;
use super::shared::{Opened, Producer, Shared};
use super::task::Task;
use crate::abi::ArrowDeviceType;
use crate::async_stream::{AsyncBatch, DeviceRecordBatchStream};
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::interchange::{ImportOptions, check_async};

/// The receiving end of a handler. Dropping it cancels the stream.
#[derive(Debug)]
struct Consumer {
    shared: Arc<Shared>,
    options: ImportOptions,
    /// Tasks that were taken since the last request.
    taken: i64,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // SAFETY: `Inbox::abandon` calls this only before the handler's release has returned to the producer.
        let cancel = |producer: Producer| _ = unsafe { producer.cancel() };
        // Dropping what was queued extracts it with null.
        drop(self.shared.inbox.abandon(cancel));
    }
}

/// A future of a stream, which is ready once the producer has sent the schema. Dropping it cancels the stream:
/// `on_schema` is answered with `ECANCELED`.
#[must_use = "dropping it cancels the stream"]
#[derive(Debug)]
pub struct Opening {
    /// `None` once it has ended.
    consumer: Option<Consumer>,
}

impl Future for Opening {
    type Output = Result<AsyncDeviceRecordBatchStream>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(consumer) = &self.consumer else {
            return Poll::Ready(Err(Error::argument("the stream has already been opened")));
        };
        let opened = ready!(consumer.shared.inbox.poll_schema(cx.waker()));
        let consumer = self.consumer.take();
        Poll::Ready(opened.map(|opened| AsyncDeviceRecordBatchStream {
            consumer,
            opened,
            arrived: None,
        }))
    }
}

/// A producer's async device stream: batches with their metadata, in order. It ends after an error. Dropping it cancels
/// it; batches may outlive it.
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
}

type Checking = Pin<Box<dyn Future<Output = Result<AsyncBatch>> + Send + Sync>>;

impl fmt::Debug for AsyncDeviceRecordBatchStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncDeviceRecordBatchStream")
            .field("consumer", &self.consumer)
            .field("opened", &self.opened)
            .finish_non_exhaustive()
    }
}

impl AsyncDeviceRecordBatchStream {
    /// Makes a handler for a producer, and the stream that it fills. The stream first requests `queue_depth` batches (at
    /// least 1), then half as many (rounded up) each time that so many have been taken from it. So at most `queue_depth` batches
    /// wait in it, and a producer on another thread is woken for several at once.
    ///
    /// The producer is not called any more once its call of the handler's `release` has returned. So `release` waits for a
    /// `request` or `cancel` that another thread is in. A producer must not hold a lock around `release` that those take.
    ///
    /// ```
    /// # use arrow_array::record_batch;
    /// # use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, ProduceOptions, produce};
    /// # use arrow_device::{Devices, ExportOptions, SyncPolicy};
    /// # use futures::StreamExt;
    /// # futures::executor::block_on(async {
    /// let batch = Devices::cpu().upload(&record_batch!(("id", Int64, [1, 2, 3]))?)?;
    /// // SAFETY: the producer is one of ours.
    /// let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(4, Default::default()) };
    /// let (schema, device_type) = (batch.schema(), batch.device().id().device_type);
    /// let batches = futures::stream::iter([Ok(batch)]);
    /// let batches = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
    /// let producing = produce(batches, handler, ProduceOptions::new(ExportOptions::new(SyncPolicy::Event)));
    /// let consuming = async {
    ///     let mut stream = opening.await?;
    ///     while let Some(batch) = stream.next().await {
    ///         assert_eq!(batch?.batch.num_rows(), 3);
    ///     }
    ///     Ok(())
    /// };
    /// let (produced, consumed): (_, arrow_device::Result<()>) = futures::join!(producing, consuming);
    /// produced?;
    /// consumed
    /// # }).map_err(Box::<dyn std::error::Error>::from)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Safety
    /// The producer that is given the handler keeps to the async device stream interface, and its arrays meet the safety
    /// requirements of [`DeviceArray::import`](crate::DeviceArray::import).
    pub unsafe fn handler(
        queue_depth: usize,
        options: ImportOptions,
    ) -> (AsyncStreamHandler, Opening) {
        let (handler, shared) = AsyncStreamHandler::new(queue_depth);
        let consumer = Consumer {
            shared,
            options,
            taken: 0,
        };
        let consumer = Some(consumer);
        (handler, Opening { consumer })
    }

    /// Returns the schema of all batches.
    pub fn schema(&self) -> SchemaRef {
        self.opened.schema.clone()
    }

    /// Returns the type of device that all batches are on.
    pub fn device_type(&self) -> ArrowDeviceType {
        self.opened.device_type
    }

    /// Returns the producer's metadata of the whole stream (`ArrowAsyncProducer.additional_metadata`).
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.opened.metadata
    }

    /// Returns the batches without their metadata.
    pub fn into_batches(self) -> Batches {
        Batches(self)
    }

    /// Ends the stream with `e`: the producer is cancelled, and queued batches are dropped.
    fn fail(&mut self, e: Error) -> Poll<Option<Result<AsyncBatch>>> {
        self.consumer = None;
        Poll::Ready(Some(Err(e)))
    }
}

impl Consumer {
    fn extract(&mut self, task: Task, opened: &Opened) -> Result<Checking> {
        let inbox = &self.shared.inbox;
        let (array, metadata) = task.extract(opened.device_type).map_err(|e| match e {
            // `on_error` may have reported more.
            Error::AsyncProducer { .. } => inbox.take_error().unwrap_or(e),
            e => e,
        })?;
        self.taken += 1;
        // Each request may wake the producer's thread. At least as many tasks as this are still requested, so both sides go on.
        if self.taken >= (self.shared.queue_depth + 1) / 2 {
            let n = std::mem::take(&mut self.taken);
            inbox.request(n as u64, |producer| {
                // SAFETY: `Inbox::request` calls this only before the handler's release has returned to the producer.
                if let Err(e) = unsafe { producer.request(n) } {
                    inbox.refuse(e);
                }
            });
        }
        let (schema, options) = (opened.schema.clone(), &self.options);
        // SAFETY: the caller of `handler` guarantees that the producer's arrays may be imported.
        let batch = unsafe { DeviceRecordBatch::import_unread(array, schema, options) }?;
        let validation = options.validation;
        Ok(Box::pin(async move {
            let batch = check_async(batch, validation).await?;
            Ok(AsyncBatch { batch, metadata })
        }))
    }
}

impl Stream for AsyncDeviceRecordBatchStream {
    type Item = Result<AsyncBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(consumer) = &mut this.consumer else {
            return Poll::Ready(None);
        };
        if this.arrived.is_none() {
            let task = match ready!(consumer.shared.inbox.poll_next(cx.waker())) {
                Next::Task(task) => task,
                Next::Failed(e) => return this.fail(e),
                Next::Ended => {
                    this.consumer = None;
                    return Poll::Ready(None);
                }
            };
            match consumer.extract(task, &this.opened) {
                Ok(arrived) => this.arrived = Some(arrived),
                Err(e) => return this.fail(e),
            }
        }
        let Some(checking) = &mut this.arrived else {
            return Poll::Pending;
        };
        let checked = ready!(checking.as_mut().poll(cx));
        this.arrived = None;
        match checked {
            Ok(batch) => Poll::Ready(Some(Ok(batch))),
            Err(e) => this.fail(e),
        }
    }
}

impl FusedStream for AsyncDeviceRecordBatchStream {
    fn is_terminated(&self) -> bool {
        self.consumer.is_none()
    }
}

impl DeviceRecordBatchStream for AsyncDeviceRecordBatchStream {
    type Batch = AsyncBatch;

    fn schema(&self) -> SchemaRef {
        self.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type()
    }
}

/// The batches of an [`AsyncDeviceRecordBatchStream`], without their metadata.
#[derive(Debug)]
pub struct Batches(AsyncDeviceRecordBatchStream);

impl Batches {
    /// Returns the producer's metadata of the whole stream, like [`AsyncDeviceRecordBatchStream::metadata`].
    pub fn metadata(&self) -> &HashMap<String, String> {
        self.0.metadata()
    }
}

impl Stream for Batches {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(Pin::new(&mut self.0).poll_next(cx));
        Poll::Ready(next.map(|item| item.map(|batch| batch.batch)))
    }
}

impl DeviceRecordBatchStream for Batches {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device_type()
    }
}
