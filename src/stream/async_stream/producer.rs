//! The producer: a task that fills a consumer's handler.

use std::future::poll_fn;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use super::DeviceRecordBatchStream;
use super::demand::Turn;
use super::foreign::{Calls, ForeignHandler, Shared, invalid_request};
use crate::abi::{FFI_ArrowAsyncDeviceStreamHandler, ForeignSchema};
use crate::error::{Result, bail};
use crate::interchange::schema::{encode_metadata, export_schema};
use crate::interchange::{ExportOptions, export};

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

/// Sends the batches of `stream` to a consumer's handler, with the stream's metadata and that of each batch: to that of another
/// library, or to the one that [`AsyncDeviceRecordBatchStream::handler`](crate::async_stream::AsyncDeviceRecordBatchStream::handler)
/// returns. It is called where its consumer keeps it.
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
/// The batch of a task that the consumer refuses and has not extracted is dropped. A later extraction returns `ECANCELED`: what that
/// takes, without the batch, is never freed if there is none.
///
/// # Safety
/// `handler` is null, or points to a handler that keeps to the async device stream interface, that no other producer is
/// given, and that stays valid until its release callback is called.
///
/// # Errors
/// The future returns the error of the stream or of an export, which it has reported to the consumer, and
/// [`Error::Released`](crate::Error::Released) or [`Error::InvalidInput`](crate::Error::InvalidInput) for a handler that cannot be called.
///
/// ```
/// # use arrow_device::abi::FFI_ArrowAsyncDeviceStreamHandler;
/// # use arrow_device::async_stream::{DeviceRecordBatchStream, Outcome, produce};
/// # use arrow_device::{ExportOptions, Result, SyncPolicy};
/// /// # Safety
/// /// That of `produce`.
/// async unsafe fn serve(
///     batches: impl DeviceRecordBatchStream,
///     consumer: *mut FFI_ArrowAsyncDeviceStreamHandler,
/// ) -> Result<()> {
///     let options = ExportOptions::new(SyncPolicy::Event);
///     // SAFETY: the caller passes a consumer's handler to this producer alone.
///     match unsafe { produce(batches, consumer, options) }.await? {
///         Outcome::Refused { errno } => eprintln!("the consumer refuses: errno {errno}"),
///         outcome => println!("{outcome:?}"),
///     }
///     Ok(())
/// }
/// ```
pub unsafe fn produce<S: DeviceRecordBatchStream>(
    stream: S,
    handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
    options: ExportOptions,
) -> impl Future<Output = Result<Outcome>> + Unpin {
    let (metadata, encoded) = match encode_metadata(stream.metadata()) {
        Ok(metadata) => (metadata, Ok(())),
        Err(e) => (ForeignSchema::empty(), Err(e)),
    };
    let shared = Shared::new(options.label(stream.device_type()), metadata);
    // SAFETY: the caller guarantees that no other producer uses the handler and that it is valid until its release.
    let handler = unsafe { ForeignHandler::new(handler, shared) };
    Box::pin(async move {
        // Dropped after the handler, which is told nothing of a panic there.
        let stream = pin!(stream);
        let handler = handler?;
        let (calls, shared) = (handler.calls, handler.shared.clone());
        let result = match encoded {
            Ok(()) => send(stream, calls, &shared, options).await,
            Err(e) => Err(e),
        };
        shared.demand.close();
        if let Err(e) = &result {
            calls.on_error(e);
        }
        // A consumer's release waits for its own calls of the producer. One that is waking this task may need a lock that this
        // thread holds, so the release comes after it.
        while shared.demand.is_waking() {
            yield_now().await;
        }
        result
    })
}

/// Sends everything but errors, until the consumer cancels.
async fn send<S: DeviceRecordBatchStream>(
    stream: Pin<&mut S>,
    calls: Calls,
    shared: &Arc<Shared>,
    options: ExportOptions,
) -> Result<Outcome> {
    let mut sending = pin!(send_all(stream, calls, shared, options));
    match poll_fn(|cx| shared.demand.poll(cx, |cx| sending.as_mut().poll(cx))).await {
        Ok(sent) => sent,
        Err(Turn::Invalid(n)) => Err(invalid_request(n)),
        Err(_) => Ok(Outcome::Cancelled),
    }
}

/// Sends everything but errors. Is pending once the consumer has cancelled, which [`send`] sees.
async fn send_all<S: DeviceRecordBatchStream>(
    mut stream: Pin<&mut S>,
    calls: Calls,
    shared: &Arc<Shared>,
    options: ExportOptions,
) -> Result<Outcome> {
    let demand = &shared.demand;
    let (schema, device_type) = (stream.schema(), stream.device_type());
    let mut answer = calls.on_schema(export_schema(&schema)?);
    for sent in 1.. {
        if answer != 0 {
            break;
        }
        if sent % BUDGET == 0 {
            yield_now().await;
        }
        let next = poll_fn(|cx| match demand.turn() {
            Turn::Produce(_) => stream.as_mut().poll_next(cx),
            _ => Poll::Pending,
        });
        let Some(batch) = next.await.transpose()? else {
            answer = calls.on_next_task(None, &ForeignSchema::empty());
            break;
        };
        let metadata = encode_metadata(stream.batch_metadata())?;
        let batch = batch.with_schema(schema.clone())?;
        if batch.device().id().device_type != device_type {
            let device = batch.device();
            bail!("a batch on {device} in a stream of {device_type}");
        }
        let array = export(batch.as_struct(), &options, true).await?;
        // An exported batch waits for the consumer's request.
        let requested = poll_fn(|_| match demand.turn() {
            Turn::Produce(true) => Poll::Ready(()),
            _ => Poll::Pending,
        });
        requested.await;
        demand.take_one();
        answer = calls.on_next_task(Some(shared.task(array)), &metadata);
    }
    Ok(match answer {
        0 => Outcome::Completed,
        errno => Outcome::Refused { errno },
    })
}

/// Lets other tasks have their turn.
async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}
