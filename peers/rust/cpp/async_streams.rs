//! Async streams: ours for a handler of the other side's, and handlers of ours for its producers.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, Int64Array, ListArray, RecordBatch, RecordBatchOptions, StringArray,
    make_array,
};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_device::abi::FFI_ArrowAsyncDeviceStreamHandler;
use arrow_device::async_stream::{
    AsyncBatch, AsyncDeviceRecordBatchStream, DeviceRecordBatchStream,
    DeviceRecordBatchStreamAdapter, Opening, Outcome, ProduceOptions, ReaderStream, produce,
    produce_at,
};
use arrow_device::{
    DeviceRecordBatchIterator, DeviceRecordBatchReader, Error, ExportOptions, Queue, Result,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use futures::channel::oneshot;
use futures::executor::block_on;
use futures::future::{Either, select};
use futures::stream::{self, BoxStream, Stream, StreamExt};

use super::answer::{DIFFERS, Failure, answer};
use super::batches::make;
use super::{device, options, policy, queue, spelling, write};
use crate::sim::PeersSim;
use crate::support::same_batch;

/// In place of a kind: the batches of [`numbered`].
const NUMBERED: usize = usize::MAX;

/// Streams that were given to a producer, and handlers' streams, that live.
static STREAMS: AtomicIsize = AtomicIsize::new(0);
/// Batches that were given away, of whose buffers somebody still holds one.
static BATCHES: AtomicIsize = AtomicIsize::new(0);

/// Counts one thing as long as it lives.
struct Alive(&'static AtomicIsize);

impl Alive {
    fn new(counter: &'static AtomicIsize) -> Self {
        counter.fetch_add(1, SeqCst);
        Self(counter)
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_async_live() -> isize {
    STREAMS.load(SeqCst)
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_async_batches() -> isize {
    BATCHES.load(SeqCst)
}

fn numbered_schema() -> SchemaRef {
    let list = DataType::List(Arc::new(Field::new("item", DataType::Int32, true)));
    Arc::new(Schema::new(vec![
        Field::new("n", DataType::Int64, false),
        Field::new("text", DataType::Utf8, true),
        Field::new("list", list, true),
    ]))
}

/// Batch `i` of 0 to 4 rows that both sides make by themselves: see `Numbered` in peers/cpp/async.cc.
fn numbered(i: i64) -> RecordBatch {
    let rows = || 0..i % 5;
    let n: Int64Array = rows().map(|row| i * 1000 + row).collect();
    let text = rows().map(|row| ((i + row) % 7 != 0).then(|| format!("batch {i} row {row}")));
    let text: StringArray = text.collect();
    let list = rows().map(|row| {
        let items = (0..(i + row) % 3).map(move |item| Some((i * 10 + item) as i32));
        Some(items)
    });
    let list = ListArray::from_iter_primitive::<Int32Type, _, _>(list);
    let columns: Vec<ArrayRef> = vec![Arc::new(n), Arc::new(text), Arc::new(list)];
    RecordBatch::try_new(numbered_schema(), columns).expect("columns of this schema")
}

fn made(kind: usize, k: u64) -> Result<RecordBatch, Failure> {
    match kind {
        NUMBERED => Ok(numbered(k as i64)),
        kind => make(kind, k),
    }
}

/// The same buffer; `one` lives as long.
fn with(buffer: &Buffer, one: &Arc<Alive>) -> Buffer {
    let Some(address) = NonNull::new(buffer.as_ptr().cast_mut()) else {
        return buffer.clone();
    };
    let owner = Arc::new((buffer.clone(), one.clone()));
    // SAFETY: the owner holds the buffer, and so the memory.
    unsafe { Buffer::from_custom_allocation(address, buffer.len(), owner) }
}

/// The same data; `one` lives as long as one of its buffers.
fn counted(data: &ArrayData, one: &Arc<Alive>) -> ArrayData {
    let nulls = data.nulls().map(|nulls| {
        let (bits, buffer) = (nulls.inner(), with(nulls.buffer(), one));
        NullBuffer::new(BooleanBuffer::new(buffer, bits.offset(), bits.len()))
    });
    let children = data.child_data().iter();
    let builder = ArrayData::builder(data.data_type().clone())
        .len(data.len())
        .offset(data.offset())
        .nulls(nulls)
        .buffers(data.buffers().iter().map(|b| with(b, one)).collect())
        .child_data(children.map(|child| counted(child, one)).collect());
    // SAFETY: the data is that of `data`, which is valid, in buffers with other owners.
    unsafe { builder.build_unchecked() }
}

/// The same batch, counted as long as somebody holds a buffer of it: see [`peers_cpp_async_batches`].
fn counted_batch(batch: &RecordBatch) -> Result<RecordBatch> {
    let one = Arc::new(Alive::new(&BATCHES));
    let columns = batch.columns().iter();
    let columns = columns.map(|column| make_array(counted(&column.to_data(), &one)));
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(
        batch.schema(),
        columns.collect(),
        &rows,
    )?)
}

/// What each batch of a stream with metadata goes with.
fn batch_metadata(k: u64) -> HashMap<String, String> {
    let pairs = [("batch", k.to_string()), ("ключ", "значение".into())];
    pairs.map(|(key, value)| (key.to_owned(), value)).into()
}

/// What a stream answers with in place of batch `k`.
fn failure(errno: c_int, k: u64) -> Error {
    let text = format!("batch {k} cannot be made");
    if errno == 0 {
        // A panic, without the hook's words on the terminal.
        std::panic::resume_unwind(Box::new(text));
    }
    Error::AsyncProducer {
        errno,
        message: text.into(),
        metadata: batch_metadata(k),
    }
}

fn batch(kind: usize, k: u64, queue: &Queue, metadata: bool) -> Result<AsyncBatch> {
    let host = made(kind, k).map_err(|_| Error::Released("kind of batch"))?;
    let host = counted_batch(&host)?;
    let batch = queue.device().upload_on(&host, queue)?;
    let metadata = if metadata {
        batch_metadata(k)
    } else {
        HashMap::new()
    };
    Ok(AsyncBatch { batch, metadata })
}

/// A stream that goes away and comes back before each item, as one does that waits for something.
struct Yielding<S>(S, bool);

impl<S: Stream + Unpin> Stream for Yielding<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        self.1 = !self.1;
        if self.1 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.0.poll_next_unpin(context)
    }
}

/// How a stream of ours ended.
enum End {
    Of(Result<Outcome>),
    Dropped,
    Panicked,
}

/// A stream of ours on its way to a handler, on a thread of its own.
pub(super) struct Giving {
    stop: Option<oneshot::Sender<()>>,
    end: Receiver<End>,
}

/// Gives a handler `count` batches of a kind, with seeds from 0. `fail_at`, unless negative: in place of this batch
/// comes an error with errno `how`, or a panic if that is 0. `in_place`: the handler is called where it is, and must
/// stay there; otherwise it is moved away. `threaded`: batches come
/// from a reader on one more thread, without metadata.
///
/// # Safety
/// `sim` is null or live, and lives for longer; `handler` keeps to the C async device stream interface; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_give(
    kind: usize,
    count: u64,
    fail_at: i64,
    how: c_int,
    sim: *const PeersSim,
    wait: bool,
    metadata: bool,
    in_place: bool,
    threaded: bool,
    handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
    out: *mut *mut Giving,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `sim` is null or alive (see `# Safety`).
        let sim = unsafe { sim.as_ref() };
        let (schema, of, queue) = (made(kind, 0)?.schema(), device(sim), queue(sim)?);
        let alive = Alive::new(&STREAMS);
        let batches = (0..count).map(move |k| {
            let _alive = &alive;
            if k as i64 == fail_at {
                return Err(failure(how, k));
            }
            batch(kind, k, &queue, metadata)
        });
        let device_type = of.id().device_type;
        let batches: BoxStream<'static, Result<AsyncBatch>> = if threaded {
            let batches = batches.map(|batch| Ok(batch?.batch));
            let reader = DeviceRecordBatchIterator::new(batches, schema.clone(), device_type);
            let batches = ReaderStream::spawn(reader, 3)?;
            Box::pin(batches.map(|batch| Ok(batch?.into())))
        } else {
            Box::pin(Yielding(stream::iter(batches), false))
        };
        let batches = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
        let mut options = ProduceOptions::new(ExportOptions::new(policy(wait)));
        if metadata {
            options = options.with_metadata(batch_metadata(count));
        }
        let (stop, stopped) = oneshot::channel::<()>();
        let (ended, end) = channel();
        let place = if in_place {
            Either::Left(Place(handler))
        } else {
            // SAFETY: the caller passes a handler that it gives away (see `# Safety`); Arrow C++ does not depend on its address.
            Either::Right(unsafe { FFI_ArrowAsyncDeviceStreamHandler::from_raw(handler) })
        };
        thread::spawn(move || {
            let run = move || match place {
                Either::Left(Place(at)) => {
                    // SAFETY: the caller guarantees that the handler keeps to the interface and stays where it is (see `# Safety`).
                    let produced = unsafe { produce_at(batches, at, options) };
                    run(produced, stopped)
                }
                Either::Right(handler) => run(produce(batches, handler, options), stopped),
            };
            let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            let _ = ended.send(end.unwrap_or(End::Panicked));
        });
        let giving = Giving {
            stop: Some(stop),
            end,
        };
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe { write(out, Box::into_raw(Box::new(giving))) }
    })
}

struct Place(*mut FFI_ArrowAsyncDeviceStreamHandler);

// SAFETY: the handler is that of `peers_cpp_async_give`, whose caller does not use it before its
// release; the interface lets a producer call it on any thread.
unsafe impl Send for Place {}

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
/// `giving` is of [`peers_cpp_async_give`]; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_given(
    giving: *mut Giving,
    seconds: f64,
    out: *mut c_int,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `giving` is alive (see `# Safety`).
        let giving = unsafe { &*giving };
        let end = giving.end.recv_timeout(Duration::from_secs_f64(seconds));
        let end = end.map_err(|e| match e {
            RecvTimeoutError::Timeout => Failure::differs("does not end"),
            RecvTimeoutError::Disconnected => Failure::differs("was asked before"),
        })?;
        let how = match end {
            End::Of(Ok(Outcome::Completed)) => 0,
            End::Of(Ok(Outcome::Cancelled)) => 1,
            End::Of(Ok(Outcome::Refused { errno })) => 1000 + errno,
            End::Of(Ok(_)) => DIFFERS,
            End::Of(Err(e)) => return Err(e.into()),
            End::Dropped => 2,
            End::Panicked => 3,
        };
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe { write(out, how) }
    })
}

/// Drops what is given before its end.
///
/// # Safety
/// `giving` is of [`peers_cpp_async_give`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_stop(giving: *mut Giving) {
    // SAFETY: the caller guarantees that `giving` is alive (see `# Safety`).
    if let Some(stop) = unsafe { &mut *giving }.stop.take() {
        let _ = stop.send(());
    }
}

/// What is given goes on.
///
/// # Safety
/// `giving` is of [`peers_cpp_async_give`], and not used again.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_give_drop(giving: *mut Giving) {
    // SAFETY: the caller guarantees that `giving` came from this library and is not used again (see `# Safety`).
    drop(unsafe { Box::from_raw(giving) });
}

/// Our end of a handler.
pub(super) struct Taking {
    stream: Either<Opening, AsyncDeviceRecordBatchStream>,
    _alive: Alive,
}

/// A handler of ours, for a producer to call where it is.
///
/// # Safety
/// `sim` is null or live; whoever gets the handler keeps to the C async device stream interface; `handler` and `out`
/// are valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_take(
    depth: usize,
    sim: *const PeersSim,
    handler: *mut *mut c_void,
    out: *mut *mut Taking,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `sim` is null or alive (see `# Safety`).
        let options = options(unsafe { sim.as_ref() }, false);
        // SAFETY: the caller guarantees that whoever gets the handler keeps to the interface (see `# Safety`).
        let (ours, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(depth, options) };
        let taking = Taking {
            stream: Either::Left(opening),
            _alive: Alive::new(&STREAMS),
        };
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe {
            write(handler, ours.into_raw().cast())?;
            write(out, Box::into_raw(Box::new(taking)))
        }
    })
}

/// What does not come in a minute does not come.
fn in_time<T>(what: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let (late, too_late) = oneshot::channel::<()>();
    let (done, waiting) = channel::<()>();
    let timer = thread::spawn(move || {
        if let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(Duration::from_secs(60)) {
            let _ = late.send(());
        }
    });
    let result = block_on(async {
        match select(Box::pin(what), too_late).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(Failure::differs("nothing comes for a minute")),
        }
    });
    drop(done);
    let _ = timer.join();
    result
}

/// Waits until the stream is there, and compares its schema with that of a kind.
///
/// # Safety
/// `taking` is of [`peers_cpp_async_take`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_opened(
    taking: *mut Taking,
    kind: usize,
    device_type: c_int,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `taking` is alive (see `# Safety`).
        let taking = unsafe { &mut *taking };
        in_time(async {
            if let Either::Left(opening) = &mut taking.stream {
                taking.stream = Either::Right(opening.await?);
            }
            Ok(())
        })?;
        let Either::Right(stream) = &taking.stream else {
            return Err(Failure::differs("is not open"));
        };
        let expected = spelling::batch(&made(kind, 0)?).schema();
        if stream.schema() != expected {
            let text = format!("schema: actual {:?}", stream.schema());
            return Err(Failure::differs(text));
        }
        if stream.device_type().value() != device_type || !stream.metadata().is_empty() {
            let (found, metadata) = (stream.device_type(), stream.metadata());
            return Err(Failure::differs(format!(
                "device type {found:?}, metadata {metadata:?}"
            )));
        }
        Ok(())
    })
}

/// Reads batches and compares them with those of a kind, with seeds from `from`: `count`, and the end;
/// `stop`: `count` only. `later`: they are looked at only after all are read.
///
/// # Safety
/// `taking` is of [`peers_cpp_async_take`], and open.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_read(
    taking: *mut Taking,
    kind: usize,
    from: u64,
    count: u64,
    stop: bool,
    later: bool,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `taking` is alive (see `# Safety`).
        let Either::Right(stream) = &mut unsafe { &mut *taking }.stream else {
            return Err("is not open".into());
        };
        let compare = |k: u64, batch: AsyncBatch| {
            if !batch.metadata.is_empty() {
                return Err(Failure::differs(format!("metadata {:?}", batch.metadata)));
            }
            let expected = spelling::batch(&made(kind, k)?);
            let compared = same_batch(&expected, &batch.batch.to_host()?);
            compared.map_err(|text| Failure::differs(format!("batch {k}: {text}")))
        };
        let kept = in_time(async {
            let mut kept = Vec::new();
            for k in from..from + count {
                let Some(batch) = stream.next().await else {
                    return Err(Failure::differs(format!("ends after {k} batches")));
                };
                if batch.is_err() && stream.next().await.is_some() {
                    return Err(Failure::differs("goes on after an error"));
                }
                match later {
                    true => kept.push(batch?),
                    false => compare(k, batch?)?,
                }
            }
            if !stop {
                match stream.next().await {
                    None => {}
                    Some(Err(e)) => return Err(e.into()),
                    Some(Ok(_)) => return Err(Failure::differs("too many batches")),
                }
            }
            Ok(kept)
        })?;
        for (k, batch) in (from..).zip(kept) {
            compare(k, batch)?;
        }
        Ok(())
    })
}

/// Reads all batches on this thread, as one that reads a pull stream, and compares them with those of a
/// kind. Takes the stream.
///
/// # Safety
/// `taking` is of [`peers_cpp_async_take`], open, and not used again.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_read_waiting(
    taking: *mut Taking,
    kind: usize,
    count: u64,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `taking` came from this library and is not used again (see `# Safety`).
        let taking = unsafe { Box::from_raw(taking) };
        let Either::Right(stream) = taking.stream else {
            return Err("is not open".into());
        };
        let reader = stream.into_batches().into_blocking_reader();
        let mut read = 0;
        for batch in reader.into_host_reader() {
            let expected = spelling::batch(&made(kind, read)?);
            let compared = same_batch(&expected, &batch?);
            compared.map_err(|text| Failure::differs(format!("batch {read}: {text}")))?;
            read += 1;
        }
        if read == count {
            return Ok(());
        }
        Err(Failure::differs(format!("{read} batches, not {count}")))
    })
}

/// Drops what was not read.
///
/// # Safety
/// `taking` is of [`peers_cpp_async_take`], and not used again.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_async_take_drop(taking: *mut Taking) {
    // SAFETY: the caller guarantees that `taking` came from this library and is not used again (see `# Safety`).
    drop(unsafe { Box::from_raw(taking) });
}
