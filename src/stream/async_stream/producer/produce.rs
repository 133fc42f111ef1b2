//! The producer's task.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;

use super::demand::Turn;
use super::foreign::ForeignHandler;
use super::shared::Shared;
use crate::abi::{ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowDeviceArray};
use crate::async_stream::{AsyncBatch, DeviceRecordBatchStream};
use crate::error::{Error, Result};
use crate::interchange::schema::{encode_metadata, export_schema};
use crate::interchange::{ExportOptions, Exporting};

/// Batches that one poll hands over at most, so that other tasks get their turn.
const BUDGET: usize = 32;

/// How a stream is produced.
#[derive(Clone, Debug)]
pub struct ProduceOptions {
    export: ExportOptions,
    metadata: HashMap<String, String>,
}

impl ProduceOptions {
    /// Batches go out with these options; no metadata.
    pub fn new(export: ExportOptions) -> Self {
        let metadata = HashMap::new();
        Self { export, metadata }
    }

    /// What the consumer is told of the whole stream (`ArrowAsyncProducer.additional_metadata`).
    #[must_use]
    pub fn with_metadata(mut self, metadata: HashMap<String, String>) -> Self {
        self.metadata = metadata;
        self
    }
}

/// How a stream ended that had no error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// The consumer has all batches.
    Completed,
    /// The consumer cancelled.
    Cancelled,
    /// The consumer answered a callback with an error.
    Refused {
        /// Its answer.
        errno: i32,
    },
}

/// Fills a consumer's handler from `stream`. Nothing happens until the future is polled, anywhere; all calls of the
/// handler are made by its polls. It never waits: neither for the consumer's requests nor, with
/// [`SyncPolicy::Event`](crate::SyncPolicy::Event), for the device; what must be waited for wakes the task.
///
/// One batch is taken from `stream` and exported ahead of the consumer's requests, so that the end is told as soon as
/// it is reached. Dropping the future before its end tells the consumer an error (`ECANCELED`) and releases the handler at
/// once, which waits for a call of the consumer's that is under way on another thread.
///
/// A consumer's requests wake the task. With a waker that polls at once, on the thread that wakes it, the handler would be
/// called within its own request: executors do not do that.
///
/// A task that the consumer refuses and does not extract is not taken back, since it may be extracted later: it leaks.
///
/// # Errors
/// Of the future: the stream's error, or that of an export, which the consumer was told; [`Error::Released`] and
/// [`Error::InvalidInput`] for a handler that cannot be called.
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
    handler: FFI_ArrowAsyncDeviceStreamHandler,
    options: ProduceOptions,
) -> Produce<S> {
    Produce::new(stream, ForeignHandler::own(handler), options)
}

/// As [`produce`], for a handler that stays where the consumer put it.
///
/// # Safety
/// `handler` is null, or points to a handler that keeps to the async device stream interface, that nobody else gives to
/// a producer, and that stays valid until its release callback is called.
pub unsafe fn produce_at<S: DeviceRecordBatchStream>(
    stream: S,
    handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
    options: ProduceOptions,
) -> Produce<S> {
    // SAFETY: the caller's.
    let handler = unsafe { ForeignHandler::at(handler) };
    Produce::new(stream, handler, options)
}

/// The future of [`produce`].
#[must_use = "a stream is produced only while its future is polled"]
pub struct Produce<S> {
    /// In memory of its own, so that this can be moved. `None` after the end.
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
    /// It cannot be produced at all.
    Failed(Error),
    Schema(FFI_ArrowSchema),
    /// The stream's next batch.
    Next,
    Exporting(Exporting, Metadata),
    /// The consumer's request.
    HandOver(FFI_ArrowDeviceArray, Metadata),
    /// The handler's release.
    Release(Result<Outcome>),
    Over,
}

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
                // SAFETY: this holds a share until after the release.
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

    /// One step; `None` if there is more to do.
    fn step(&mut self, wanted: bool, cx: &mut Context<'_>) -> Poll<Result<Option<Outcome>>> {
        let (Some(handler), Some(stream)) = (&mut self.handler, &mut self.stream) else {
            return Poll::Ready(Err(match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Failed(e) => e,
                _ => Error::argument("the stream was produced already"),
            }));
        };
        match &mut self.stage {
            Stage::Next => {
                let Some(batch) = ready!(stream.as_mut().poll_next(cx)?) else {
                    let answer = handler.on_next_task(None, None);
                    return Poll::Ready(Ok(Some(refused(answer).unwrap_or(Outcome::Completed))));
                };
                let AsyncBatch { batch, metadata } = batch.into();
                if batch.schema().fields() != self.schema.fields() {
                    let what = "a batch's schema differs from its stream's";
                    return Poll::Ready(Err(Error::argument(what)));
                }
                let device = batch.device();
                if device.id().device_type != self.device_type {
                    let what = format!("a batch on {device} in a stream of {}", self.device_type);
                    return Poll::Ready(Err(Error::argument(what)));
                }
                let metadata = encode_metadata(&metadata)?;
                self.stage = Stage::Exporting(Exporting::new(batch, self.export), metadata);
            }
            Stage::Exporting(exporting, metadata) => {
                let array = ready!(exporting.poll(cx))?;
                self.stage = Stage::HandOver(array, metadata.take());
            }
            Stage::HandOver(..) if !wanted => return Poll::Pending,
            stage => match std::mem::replace(stage, Stage::Next) {
                Stage::Schema(schema) => {
                    let answer = handler.on_schema(schema);
                    return Poll::Ready(Ok(refused(answer)));
                }
                Stage::HandOver(array, metadata) => {
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

/// What the consumer's answer ends, if it does.
fn refused(answer: i32) -> Option<Outcome> {
    (answer != 0).then_some(Outcome::Refused { errno: answer })
}

impl<S> Produce<S> {
    /// The consumer is told an error, if there is one; only the release follows.
    fn end(&mut self, result: Result<Outcome>) {
        self.shared.demand.close();
        if let (Some(handler), Err(e)) = (&mut self.handler, &result) {
            handler.on_error(e);
        }
        // Before what may panic: the consumer is told nothing twice.
        self.stage = Stage::Release(result);
        self.stream = None;
    }

    fn release(&mut self) {
        if let Some(handler) = self.handler.take() {
            handler.release();
        }
    }

    /// The result, after the release. A consumer's release waits for its own calls of the producer; one that wakes this
    /// task may need what this thread holds, so it is let go first.
    fn poll_release(&mut self, cx: &mut Context<'_>) -> Poll<Result<Outcome>> {
        if self.shared.demand.is_waking() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.release();
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Release(result) => Poll::Ready(result),
            _ => Poll::Ready(Err(Error::argument("the stream was produced already"))),
        }
    }
}

/// What an invalid request is told.
fn invalid(n: i64) -> Error {
    Error::argument(format!("request({n}): at least one batch is asked for"))
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
                // What the consumer did meanwhile is not missed.
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
        if self.handler.is_none() {
            return;
        }
        let operation = "producing an async stream";
        match (
            std::mem::replace(&mut self.stage, Stage::Over),
            self.shared.demand.turn(),
        ) {
            // The consumer knows.
            (Stage::Release(_), _) => {}
            (Stage::Failed(e), _) => self.end(Err(e)),
            (_, Turn::Cancelled) => self.end(Ok(Outcome::Cancelled)),
            (_, Turn::Invalid(n)) => self.end(Err(invalid(n))),
            (_, Turn::Produce(_)) => self.end(Err(Error::Cancelled { operation })),
        }
        self.release();
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
