//! Async streams: ours for a handler of the other side's, and handlers of ours for its producers.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, channel};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::Duration;

use arrow_device::abi::FFI_ArrowAsyncDeviceStreamHandler;
use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, Outcome, produce,
};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, ExportOptions, FFI_ArrowDeviceArray, ImportOptions, Result,
};
use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;
use futures::channel::oneshot;
use futures::executor::block_on;
use futures::future::{BoxFuture, Either, select};
use futures::stream::{self, Stream, StreamExt};

use crate::answer::{self, Failure, answer, device, policy};
use crate::cases::{COMMON, Columns};
use crate::exchange::{failure, put, queue, upload};
use crate::live::Counted;

/// How a stream of ours ended.
enum End {
    Of(Result<Outcome>),
    Dropped,
    Panicked,
}

/// A stream of ours on its way to a handler, on a thread of its own.
pub(crate) struct Giving {
    stop: Option<oneshot::Sender<()>>,
    end: Receiver<End>,
}

struct Place(*mut FFI_ArrowAsyncDeviceStreamHandler);

// SAFETY: the handler is that of `peers_async_give`, whose caller does not use it before its release; the interface
// lets a producer call it on any thread.
unsafe impl Send for Place {}

/// Gives a handler the batches of `peers_stream`. `metadata`: the stream and each batch have some. `in_place`: the
/// handler is called where it is, and must stay there; otherwise it is moved away.
///
/// # Safety
/// As `peers_stream`; `handler` keeps to the C async device stream interface.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_async_give(
    list: *const u64,
    n: usize,
    count: u64,
    fail_at: i64,
    errno: c_int,
    name: *const c_char,
    wait: bool,
    metadata: bool,
    in_place: bool,
    handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
    out: *mut *mut Giving,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `list` has `n` numbers and that `name` is null-terminated (see `# Safety`).
        let (columns, device) = unsafe { (Columns::listed(list, n)?, device(name)?) };
        let (schema, open, queue) = (columns.schema(), Counted::reader(), queue(&device)?);
        let of = move |k: u64| match metadata {
            true => [("batch", k.to_string()), ("ключ", "значение".into())]
                .map(|(key, value)| (key.to_owned(), value))
                .into(),
            false => Default::default(),
        };
        let batches = (0..count).map(move |k| {
            let _open = &open;
            if k as i64 == fail_at {
                return Err(failure(errno, k));
            }
            let batch = upload(&columns, k % COMMON as u64, &queue).map_err(Failure::into_error)?;
            Ok((batch, of(k)))
        });
        let batches = Described {
            batches: stream::iter(batches),
            schema,
            device_type: device.id().device_type,
            metadata: of(count),
            batch_metadata: HashMap::new(),
        };
        let options = ExportOptions::new(policy(wait));
        let (stop, stopped) = oneshot::channel::<()>();
        let (ended, end) = channel();
        let place = Place(match in_place {
            true => handler,
            // Its 48 bytes are never freed, since its release may come at any time.
            // SAFETY: the caller passes a handler that it gives away (see `# Safety`); Arrow C++ does not depend on its address.
            false => Box::into_raw(Box::new(unsafe { handler.read() })),
        });
        thread::spawn(move || {
            let run = move || {
                let Place(at) = { place };
                // SAFETY: the caller guarantees that the handler keeps to the interface and stays where it is (see `# Safety`).
                let produced = unsafe { produce(batches, at, options) };
                run(produced, stopped)
            };
            let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            let _ = ended.send(end.unwrap_or(End::Panicked));
        });
        let stop = Some(stop);
        // SAFETY: the caller guarantees that `out` is valid for writes (see `# Safety`).
        unsafe { out.write(Box::into_raw(Box::new(Giving { stop, end }))) };
        Ok(())
    })
}

/// Batches with metadata.
struct Described<S> {
    batches: S,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    metadata: HashMap<String, String>,
    batch_metadata: HashMap<String, String>,
}

type DescribedBatch = (DeviceRecordBatch, HashMap<String, String>);

impl<S: Stream<Item = Result<DescribedBatch>> + Unpin> Stream for Described<S> {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.batches.poll_next_unpin(cx));
        Poll::Ready(next.map(|item| {
            let (batch, metadata) = item?;
            self.batch_metadata = metadata;
            Ok(batch)
        }))
    }
}

impl<S: Stream<Item = Result<DescribedBatch>> + Unpin> DeviceRecordBatchStream for Described<S> {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    fn metadata(&self) -> Option<&HashMap<String, String>> {
        Some(&self.metadata)
    }

    fn batch_metadata(&self) -> Option<&HashMap<String, String>> {
        Some(&self.batch_metadata)
    }
}

/// Drives a producer to its end, or drops it when it is told to.
fn run(produce: impl Future<Output = Result<Outcome>>, stop: oneshot::Receiver<()>) -> End {
    block_on(async {
        match select(Box::pin(produce), stop).await {
            Either::Left((end, _)) => End::Of(end),
            Either::Right((Ok(()), _)) => End::Dropped,
            Either::Right((Err(_), produce)) => End::Of(produce.await),
        }
    })
}

/// How it ended: 0 completed, 1 cancelled, 2 dropped, 3 panicked, 1000 and the errno if the handler refused; or the
/// errno and text that it reported. Waits at most so long.
///
/// # Safety
/// `giving` is of [`peers_async_give`]; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_async_given(
    giving: &Giving,
    seconds: f64,
    out: &mut c_int,
) -> c_int {
    answer(|| {
        let end = giving.end.recv_timeout(Duration::from_secs_f64(seconds));
        *out = match end.map_err(|_| Failure::differs("does not end"))? {
            End::Of(Ok(Outcome::Completed)) => 0,
            End::Of(Ok(Outcome::Cancelled)) => 1,
            End::Of(Ok(Outcome::Refused { errno })) => 1000 + errno,
            End::Of(Ok(_)) => return Err(Failure::differs("an unknown outcome")),
            End::Of(Err(e)) => return Err(e.into()),
            End::Dropped => 2,
            End::Panicked => 3,
        };
        Ok(())
    })
}

/// Drops what is given before its end.
///
/// # Safety
/// `giving` is of [`peers_async_give`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_async_stop(giving: &mut Giving) {
    if let Some(stop) = giving.stop.take() {
        let _ = stop.send(());
    }
}

/// What is given goes on.
///
/// # Safety
/// `giving` is of [`peers_async_give`], and not used again.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_async_give_drop(giving: *mut Giving) {
    // SAFETY: the caller guarantees that `giving` came from this library and is not used again (see `# Safety`).
    drop(unsafe { Box::from_raw(giving) });
}

/// Our end of a handler.
pub(crate) struct Taking {
    stream: Either<
        BoxFuture<'static, arrow_device::Result<AsyncDeviceRecordBatchStream>>,
        AsyncDeviceRecordBatchStream,
    >,
    _open: Counted,
}

/// A handler of ours, for a producer to call where it is.
///
/// # Safety
/// Whoever gets the handler keeps to the C async device stream interface; `handler` and `out` are valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_async_take(
    depth: usize,
    handler: &mut *mut c_void,
    out: &mut *mut Taking,
) -> c_int {
    answer(|| {
        // Values are checked later: that would wait for a device on which nobody waits.
        let options = ImportOptions::default();
        // SAFETY: the caller guarantees that whoever gets the handler keeps to the interface (see `# Safety`).
        let (ours, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(depth, options) };
        *handler = ours.cast();
        let stream = Either::Left(opening);
        let _open = Counted::reader();
        *out = Box::into_raw(Box::new(Taking { stream, _open }));
        Ok(())
    })
}

/// What does not come in so long does not come.
fn in_time<T>(seconds: f64, what: impl Future<Output = answer::Outcome<T>>) -> answer::Outcome<T> {
    let (late, too_late) = oneshot::channel::<()>();
    let (done, waiting) = channel::<()>();
    let timer = thread::spawn(move || {
        let wait = Duration::from_secs_f64(seconds);
        let done = waiting.recv_timeout(wait).is_ok();
        let _ = if done { Ok(()) } else { late.send(()) };
    });
    let result = block_on(async {
        match select(Box::pin(what), too_late).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(Failure::differs("nothing comes in time")),
        }
    });
    let _ = done.send(());
    let _ = timer.join();
    result
}

/// Waits for the stream and its next batch, which goes out again with the stream's schema and its number of entries of
/// metadata; a released array at the end.
///
/// # Safety
/// `taking` is of [`peers_async_take`]; the outputs are valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_async_next(
    taking: &mut Taking,
    seconds: f64,
    device_type: &mut c_int,
    metadata: &mut usize,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let (schema, batch) = in_time(seconds, async {
            if let Either::Left(opening) = &mut taking.stream {
                taking.stream = Either::Right(opening.await?);
            }
            let Either::Right(stream) = &mut taking.stream else {
                return Err("is not open".into());
            };
            *device_type = stream.device_type().value();
            *metadata = stream.metadata().map_or(0, HashMap::len);
            let next = stream.next().await;
            if matches!(next, Some(Err(_))) && stream.next().await.is_some() {
                return Err(Failure::differs("goes on after an error"));
            }
            *metadata += stream.batch_metadata().map_or(0, HashMap::len);
            Ok((stream.schema(), next.transpose()?))
        })?;
        let pair = match batch {
            Some(batch) => batch.export(policy(false))?,
            None => (
                FFI_ArrowDeviceArray::empty(),
                FFI_ArrowSchema::try_from(schema.as_ref())?,
            ),
        };
        // SAFETY: the caller guarantees that both outputs are valid for writes (see `# Safety`).
        unsafe { put(pair, out, out_schema) }
    })
}

/// Drops what was not read.
///
/// # Safety
/// `taking` is of [`peers_async_take`], and not used again.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_async_take_drop(taking: *mut Taking) {
    // SAFETY: the caller guarantees that `taking` came from this library and is not used again (see `# Safety`).
    drop(unsafe { Box::from_raw(taking) });
}
