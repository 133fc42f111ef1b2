//! The producer's task.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::thread;

use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;

use super::demand::Turn;
use super::foreign::ForeignHandler;
use super::shared::Shared;
use crate::abi::{ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowDeviceArray};
use crate::async_stream::{AsyncBatch, DeviceRecordBatchStream};
use crate::error::{Error, Result};
use crate::interchange::metadata::encode_metadata;
use crate::interchange::schema::export_schema;
use crate::interchange::{ExportOptions, export_async};

/// The most batches that one poll sends, so that other tasks get their turn.
const BUDGET: usize = 32;

/// How a stream is produced.
#[derive(Clone, Debug)]
pub struct ProduceOptions {
    export: ExportOptions,
    metadata: HashMap<String, String>,
}

impl ProduceOptions {
    /// Exports batches with these options, and sends no metadata of the stream.
    pub fn new(export: ExportOptions) -> Self {
        let metadata = HashMap::new();
        Self { export, metadata }
    }

    /// Sets the metadata of the whole stream (`ArrowAsyncProducer.additional_metadata`).
    #[must_use]
    pub fn with_metadata(mut self, metadata: HashMap<String, String>) -> Self {
        self.metadata = metadata;
        self
    }
}

/// How a stream without an error ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// All batches have been sent.
    Completed,
    /// The consumer cancelled.
    Cancelled,
    /// The consumer answered a callback with an error.
    Refused {
        /// Its answer.
        errno: i32,
    },
}

/// Sends the batches of `stream` to a consumer's handler: the C struct, or what
/// [`AsyncDeviceRecordBatchStream::handler`](crate::async_stream::AsyncDeviceRecordBatchStream::handler) returns.
///
/// Nothing happens until the future is polled, on any thread; only its polls call the handler. A poll never blocks,
/// neither for the consumer's requests nor, with [`SyncPolicy::Event`](crate::SyncPolicy::Event), for the device: both
/// wake the task.
///
/// One batch is taken from `stream` and exported ahead of the consumer's requests, so that the consumer learns of the end
/// as soon as it is reached. Dropping the future before its end reports an error (`ECANCELED`) to the consumer and releases
/// the handler: at once, or on another thread while a call by the consumer is waking the task, for which the release waits.
///
/// A consumer's request wakes the task. The waker must not poll the task on the thread that wakes it, as no executor does:
/// the handler would then be called within its own request.
///
/// A task that the consumer refuses and does not extract leaks, since the consumer may still extract it later.
///
/// # Errors
/// The future returns the error of the stream or of an export, which it has reported to the consumer, and
/// [`Error::Released`] or [`Error::InvalidInput`] for a handler that cannot be called.
///
/// ```
/// # use arrow_array::record_batch;
/// # use arrow_device::abi::FFI_ArrowAsyncDeviceStreamHandler;
/// # use arrow_device::async_stream::{DeviceRecordBatchStream, Outcome, ProduceOptions, produce};
/// # use arrow_device::{ExportOptions, Result, SyncPolicy};
/// async fn serve(batches: impl DeviceRecordBatchStream, consumer: FFI_ArrowAsyncDeviceStreamHandler) -> Result<()> {
///     let options = ProduceOptions::new(ExportOptions::new(SyncPolicy::Event));
///     match produce(batches, consumer, options).await? {
///         Outcome::Refused { errno } => eprintln!("the consumer refuses: errno {errno}"),
///         outcome => println!("{outcome:?}"),
///     }
///     Ok(())
/// }
/// ```
pub fn produce<S: DeviceRecordBatchStream>(
    stream: S,
    handler: impl Into<FFI_ArrowAsyncDeviceStreamHandler>,
    options: ProduceOptions,
) -> Produce<S> {
    Produce::new(stream, ForeignHandler::own(handler.into()), options)
}

/// Sends batches like [`produce`], to a handler that stays where the consumer put it.
///
/// # Safety
/// `handler` is null, or points to a handler that keeps to the async device stream interface, that no other producer is
/// given, and that stays valid until its release callback is called.
pub unsafe fn produce_at<S: DeviceRecordBatchStream>(
    stream: S,
    handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
    options: ProduceOptions,
) -> Produce<S> {
    // SAFETY: the caller guarantees that no other producer uses the handler and that it is valid until its release.
    let handler = unsafe { ForeignHandler::at(handler) };
    Produce::new(stream, handler, options)
}

/// The future of [`produce`].
#[must_use = "a stream is produced only while its future is polled"]
pub struct Produce<S> {
    /// Boxed, so that this can be moved. `None` after the end.
    stream: Option<Pin<Box<S>>>,
    /// `None` after its release.
    handler: Option<ForeignHandler>,
    shared: Arc<Shared>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    export: ExportOptions,
    stage: Stage,
}

/// What comes next.
enum Stage {
    /// Nothing can be produced.
    Failed(Error),
    Schema(FFI_ArrowSchema),
    /// The stream's next batch.
    Next,
    Exporting(Exporting, Metadata),
    /// An exported batch waits for the consumer's request.
    Send(FFI_ArrowDeviceArray, Metadata),
    /// The handler's release.
    Release(Result<Outcome>),
    Over,
}

/// An export on its way.
type Exporting = Pin<Box<dyn Future<Output = Result<FFI_ArrowDeviceArray>> + Send + Sync>>;

/// Encoded.
type Metadata = Option<Vec<u8>>;

impl<S: DeviceRecordBatchStream> Produce<S> {
    fn new(stream: S, handler: Result<ForeignHandler>, options: ProduceOptions) -> Self {
        let (schema, device_type) = (stream.schema(), stream.device_type());
        let (metadata, mut failed) = match encode_metadata(&options.metadata) {
            Ok(metadata) => (metadata, None),
            Err(e) => (None, Some(e)),
        };
        let shared = Shared::new(device_type, metadata);
        let handler = match handler {
            Ok(mut handler) => {
                // SAFETY: `shared`, which `Produce` keeps until after the release, holds the producer's struct.
                unsafe { handler.set_producer(shared.as_producer()) };
                Some(handler)
            }
            Err(e) => {
                failed = Some(e);
                None
            }
        };
        let stage = match (failed, export_schema(&schema)) {
            (Some(e), _) | (None, Err(e)) => Stage::Failed(e),
            (None, Ok(schema)) => Stage::Schema(schema),
        };
        Self {
            stream: Some(Box::pin(stream)),
            handler,
            shared,
            schema,
            device_type,
            export: options.export,
            stage,
        }
    }

    /// Does one step. Returns `None` if there is more to do.
    fn step(&mut self, wanted: bool, cx: &mut Context<'_>) -> Poll<Result<Option<Outcome>>> {
        let (Some(handler), Some(stream)) = (&mut self.handler, &mut self.stream) else {
            return Poll::Ready(Err(match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Failed(e) => e,
                _ => Error::argument("the future has already returned a result"),
            }));
        };
        match &mut self.stage {
            Stage::Next => {
                let Some(batch) = ready!(stream.as_mut().poll_next(cx)?) else {
                    let answer = handler.on_next_task(None, None);
                    return Poll::Ready(Ok(Some(refused(answer).unwrap_or(Outcome::Completed))));
                };
                let AsyncBatch { batch, metadata } = batch.into();
                let batch = batch.fitted(&self.schema)?;
                let device = batch.device();
                if device.id().device_type != self.device_type {
                    let what = format!("a batch on {device} in a stream of {}", self.device_type);
                    return Poll::Ready(Err(Error::argument(what)));
                }
                let metadata = encode_metadata(&metadata)?;
                self.stage = Stage::Exporting(Box::pin(export_async(batch, self.export)), metadata);
            }
            Stage::Exporting(exporting, metadata) => {
                let array = ready!(exporting.as_mut().poll(cx))?;
                self.stage = Stage::Send(array, metadata.take());
            }
            Stage::Send(..) if !wanted => return Poll::Pending,
            stage => match std::mem::replace(stage, Stage::Next) {
                Stage::Schema(schema) => {
                    let answer = handler.on_schema(schema);
                    return Poll::Ready(Ok(refused(answer)));
                }
                Stage::Send(array, metadata) => {
                    self.shared.demand.take_one();
                    let task = self.shared.task(array);
                    let answer = handler.on_next_task(Some(task), metadata.as_deref());
                    return Poll::Ready(Ok(refused(answer)));
                }
                Stage::Failed(e) => return Poll::Ready(Err(e)),
                Stage::Next | Stage::Exporting(..) | Stage::Release(_) | Stage::Over => {}
            },
        }
        Poll::Ready(Ok(None))
    }
}

/// The outcome, if the consumer's answer ends the stream.
fn refused(answer: i32) -> Option<Outcome> {
    (answer != 0).then_some(Outcome::Refused { errno: answer })
}

impl<S> Produce<S> {
    /// Reports an error, if there is one, to the consumer. Only the release follows.
    fn end(&mut self, result: Result<Outcome>) {
        self.shared.demand.close();
        if let (Some(handler), Err(e)) = (&mut self.handler, &result) {
            handler.on_error(e);
        }
        // Set before the stream is dropped, which may panic: the consumer is told nothing twice.
        self.stage = Stage::Release(result);
        self.stream = None;
    }

    fn release(&mut self) {
        if let Some(handler) = self.handler.take() {
            handler.release();
        }
    }

    /// Releases the handler and returns the result. A consumer's release waits for its own calls of the producer. One that
    /// is waking this task may need a lock that this thread holds, so the release comes after it.
    fn poll_release(&mut self, cx: &mut Context<'_>) -> Poll<Result<Outcome>> {
        if self.shared.demand.is_waking() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.release();
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Release(result) => Poll::Ready(result),
            _ => Poll::Ready(Err(Error::argument(
                "the future has already returned a result",
            ))),
        }
    }
}

/// The error that answers an invalid request.
fn invalid(n: i64) -> Error {
    Error::argument(format!("request({n}): the number must be at least 1"))
}

impl<S: DeviceRecordBatchStream> Future for Produce<S> {
    type Output = Result<Outcome>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut budget = BUDGET;
        loop {
            if matches!(this.stage, Stage::Release(_)) {
                return this.poll_release(cx);
            }
            let turn = this.shared.demand.turn();
            let step = match turn {
                Turn::Produce(wanted) => this.step(wanted, cx),
                Turn::Cancelled => Poll::Ready(Ok(Some(Outcome::Cancelled))),
                Turn::Invalid(n) => Poll::Ready(Err(invalid(n))),
            };
            match step {
                Poll::Ready(Ok(None)) => {
                    if matches!(this.stage, Stage::Next) {
                        budget -= 1;
                        if budget == 0 {
                            cx.waker().wake_by_ref();
                            return Poll::Pending;
                        }
                    }
                }
                Poll::Ready(Ok(Some(outcome))) => this.end(Ok(outcome)),
                Poll::Ready(Err(e)) => this.end(Err(e)),
                // A call by the consumer meanwhile is not missed.
                Poll::Pending if this.shared.demand.turn_or_wake(cx.waker()) == turn => {
                    return Poll::Pending;
                }
                Poll::Pending => {}
            }
        }
    }
}

impl<S> Drop for Produce<S> {
    fn drop(&mut self) {
        let Some(mut handler) = self.handler.take() else {
            return;
        };
        let operation = "producing an async stream";
        let turn = self.shared.demand.turn();
        let error = match (std::mem::replace(&mut self.stage, Stage::Over), turn) {
            // The consumer knows.
            (Stage::Release(_), _) => None,
            (Stage::Failed(e), _) => Some(e),
            (_, Turn::Cancelled) => None,
            (_, Turn::Invalid(n)) => Some(invalid(n)),
            (_, Turn::Produce(_)) => Some(Error::Cancelled { operation }),
        };
        self.shared.demand.close();
        let is_waking = self.shared.demand.is_waking();
        let shared = self.shared.clone();
        let end = move || {
            if let Some(e) = error {
                handler.on_error(&e);
            }
            handler.release();
            drop(shared);
        };
        if !is_waking {
            return end();
        }
        // A call of the consumer is waking this task, on this thread or another: the handler must not be called within it, and the
        // waker may wait for a lock that this thread holds, as the release waits for that call. A thread that cannot be started drops
        // the handler here.
        let thread = thread::Builder::new().name("arrow-device async end".into());
        let _ = thread.spawn(end);
    }
}

impl<S> fmt::Debug for Produce<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Produce")
            .field("schema", &self.schema)
            .field("device_type", &self.device_type)
            .field("ended", &self.handler.is_none())
            .finish_non_exhaustive()
    }
}
