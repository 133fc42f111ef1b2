//! The producer: a task that fills a consumer's handler.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread;

use super::DeviceRecordBatchStream;
use super::demand::{Demand, Turn};
use super::foreign::{ForeignHandler, Shared};
use crate::abi::{FFI_ArrowAsyncDeviceStreamHandler, ForeignSchema};
use crate::error::{Error, Result};
use crate::interchange::schema::{encode_metadata, export_schema};
use crate::interchange::{ExportOptions, export_async};

/// The most batches that one poll sends, so that other tasks get their turn.
const BUDGET: usize = 32;

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

/// Sends the batches of `stream` to a consumer's handler, with the stream's metadata and that of each batch: to the C struct, or to
/// what [`AsyncDeviceRecordBatchStream::handler`](crate::async_stream::AsyncDeviceRecordBatchStream::handler) returns.
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
/// # use arrow_device::abi::FFI_ArrowAsyncDeviceStreamHandler;
/// # use arrow_device::async_stream::{DeviceRecordBatchStream, Outcome, produce};
/// # use arrow_device::{ExportOptions, Result, SyncPolicy};
/// async fn serve(batches: impl DeviceRecordBatchStream, consumer: FFI_ArrowAsyncDeviceStreamHandler) -> Result<()> {
///     match produce(batches, consumer, ExportOptions::new(SyncPolicy::Event)).await? {
///         Outcome::Refused { errno } => eprintln!("the consumer refuses: errno {errno}"),
///         outcome => println!("{outcome:?}"),
///     }
///     Ok(())
/// }
/// ```
pub fn produce<S: DeviceRecordBatchStream>(
    stream: S,
    handler: impl Into<FFI_ArrowAsyncDeviceStreamHandler>,
    options: ExportOptions,
) -> impl Future<Output = Result<Outcome>> + Unpin {
    start(stream, ForeignHandler::own(handler.into()), options)
}

/// Sends batches like [`produce`], to a handler that stays where the consumer put it.
///
/// # Safety
/// `handler` is null, or points to a handler that keeps to the async device stream interface, that no other producer is
/// given, and that stays valid until its release callback is called.
pub unsafe fn produce_at<S: DeviceRecordBatchStream>(
    stream: S,
    handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
    options: ExportOptions,
) -> impl Future<Output = Result<Outcome>> + Unpin {
    // SAFETY: the caller guarantees that no other producer uses the handler and that it is valid until its release.
    let handler = unsafe { ForeignHandler::at(handler) };
    start(stream, handler, options)
}

fn start<S: DeviceRecordBatchStream>(
    stream: S,
    handler: Result<ForeignHandler>,
    options: ExportOptions,
) -> impl Future<Output = Result<Outcome>> + Unpin {
    let (metadata, encoded) = match encode_metadata(stream.metadata()) {
        Ok(metadata) => (metadata, Ok(())),
        Err(e) => (ForeignSchema::empty(), Err(e)),
    };
    let shared = Shared::new(stream.device_type(), metadata);
    let consumer = handler.map(|mut handler| {
        // SAFETY: `shared`, which `Consumer` keeps until after the release, holds the producer's struct.
        unsafe { handler.set_producer(shared.as_producer()) };
        let handler = Some(handler);
        Consumer { handler, shared }
    });
    Box::pin(async move {
        // Dropped after the consumer, which is told nothing of a panic there.
        let stream = pin!(stream);
        let mut consumer = consumer?;
        let result = match encoded {
            Ok(()) => send(stream, &mut consumer, options).await,
            Err(e) => Err(e),
        };
        consumer.shared.demand.close();
        if let (Some(handler), Err(e)) = (&mut consumer.handler, &result) {
            handler.on_error(e);
        }
        // A consumer's release waits for its own calls of the producer. One that is waking this task may need a lock that this
        // thread holds, so the release comes after it.
        poll_fn(|cx| match consumer.shared.demand.is_waking() {
            true => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            false => Poll::Ready(()),
        })
        .await;
        drop(consumer.handler.take());
        result
    })
}

/// Sends everything but errors.
async fn send<S: DeviceRecordBatchStream>(
    mut stream: Pin<&mut S>,
    consumer: &mut Consumer,
    options: ExportOptions,
) -> Result<Outcome> {
    let Consumer { handler, shared } = consumer;
    let Some(handler) = handler else {
        return Err(Error::argument("the handler was released"));
    };
    let demand = &shared.demand;
    let (schema, device_type) = (stream.schema(), stream.device_type());
    let c_schema = export_schema(&schema)?;
    if demand.turn() == Turn::Cancelled {
        return Ok(Outcome::Cancelled);
    }
    let mut answer = handler.on_schema(c_schema);
    for sent in 1.. {
        if answer != 0 {
            return Ok(Outcome::Refused { errno: answer });
        }
        if sent % BUDGET == 0 {
            let mut turns = 0..1;
            poll_fn(|cx| match turns.next() {
                Some(_) => {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
                None => Poll::Ready(()),
            })
            .await;
        }
        let next = unless_over(demand, |_, cx| stream.as_mut().poll_next(cx)).await?;
        let Some(next) = next else {
            return Ok(Outcome::Cancelled);
        };
        let Some(batch) = next.transpose()? else {
            answer = handler.on_next_task(None, &ForeignSchema::empty());
            break;
        };
        let metadata = encode_metadata(stream.batch_metadata())?;
        let batch = batch.fitted(&schema)?;
        if batch.device().id().device_type != device_type {
            let device = batch.device();
            let what = format!("a batch on {device} in a stream of {device_type}");
            return Err(Error::argument(what));
        }
        let mut exporting = pin!(export_async(batch, options));
        let exported = unless_over(demand, |_, cx| exporting.as_mut().poll(cx)).await?;
        let Some(array) = exported.transpose()? else {
            return Ok(Outcome::Cancelled);
        };
        // An exported batch waits for the consumer's request.
        let requested = |wanted, _: &mut Context<'_>| match wanted {
            true => Poll::Ready(()),
            false => Poll::Pending,
        };
        if unless_over(demand, requested).await?.is_none() {
            return Ok(Outcome::Cancelled);
        }
        demand.take_one();
        answer = handler.on_next_task(Some(shared.task(array)), &metadata);
    }
    Ok(match answer {
        0 => Outcome::Completed,
        errno => Outcome::Refused { errno },
    })
}

/// Polls `work` until it is ready, or the consumer has cancelled: `None`. `work` is told whether a batch may be sent.
async fn unless_over<T>(
    demand: &Demand,
    mut work: impl FnMut(bool, &mut Context<'_>) -> Poll<T>,
) -> Result<Option<T>> {
    poll_fn(|cx| {
        loop {
            let turn = demand.turn();
            let wanted = match turn {
                Turn::Produce(wanted) => wanted,
                Turn::Cancelled => return Poll::Ready(Ok(None)),
                Turn::Invalid(n) => return Poll::Ready(Err(invalid(n))),
            };
            if let Poll::Ready(done) = work(wanted, cx) {
                return Poll::Ready(Ok(Some(done)));
            }
            // A call by the consumer meanwhile is not missed.
            if demand.turn_or_wake(cx.waker()) == turn {
                return Poll::Pending;
            }
        }
    })
    .await
}

/// The error that answers an invalid request.
fn invalid(n: i64) -> Error {
    Error::argument(format!("request({n}): the number must be at least 1"))
}

/// A consumer's handler, and what it calls. Dropped before the release, it reports that the stream was cut.
struct Consumer {
    /// `None` after its release.
    handler: Option<ForeignHandler>,
    shared: Arc<Shared>,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let Some(mut handler) = self.handler.take() else {
            return;
        };
        let operation = "producing an async stream";
        let error = match self.shared.demand.close() {
            // The consumer knows.
            Turn::Cancelled => None,
            Turn::Invalid(n) => Some(invalid(n)),
            Turn::Produce(_) => Some(Error::Cancelled { operation }),
        };
        let shared = self.shared.clone();
        let is_waking = shared.demand.is_waking();
        let end = move || {
            if let Some(e) = error {
                handler.on_error(&e);
            }
            drop(handler);
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
