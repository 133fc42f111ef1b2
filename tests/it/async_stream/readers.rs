//! Readers as streams and streams as readers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::Instant;

use arrow_device::async_stream::{BlockingReader, DeviceRecordBatchStream, ReaderStream};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatchIterator, DeviceRecordBatchReader, Error,
    Result,
};
use arrow_schema::ArrowError;
use futures::stream;

use crate::async_stream::kit::*;
use crate::async_stream::producer::adapted;

// ---- ReaderStream

/// A reader that tells when it was dropped.
struct Told<F>(F, Arc<AtomicBool>);

impl<F> Drop for Told<F> {
    fn drop(&mut self) {
        self.1.store(true, SeqCst);
    }
}

impl<T, F: FnMut() -> Option<T>> Iterator for Told<F> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        (self.0)()
    }
}

/// A reader of `next`, and whether it was dropped.
fn reader(
    next: impl FnMut() -> Option<Result<DeviceRecordBatch>> + Send + 'static,
) -> (
    impl DeviceRecordBatchReader + Send + 'static,
    Arc<AtomicBool>,
) {
    let dropped = Arc::new(AtomicBool::new(false));
    let batches = Told(next, dropped.clone());
    let schema = numbers(0, 1).schema();
    (
        DeviceRecordBatchIterator::new(batches, schema, ArrowDeviceType::CPU),
        dropped,
    )
}

pub(crate) fn counting(
    n: i64,
) -> impl FnMut() -> Option<Result<DeviceRecordBatch>> + Send + 'static {
    let mut numbers = 0..n;
    move || numbers.next().map(|i| Ok(batch(i)))
}

/// And again as a reader.
#[test]
fn a_reader_as_a_stream() {
    for depth in [0, 1, 5, usize::MAX >> 1] {
        let (reader, dropped) = reader(counting(100));
        let stream = ReaderStream::spawn(reader, depth).unwrap();
        assert_eq!(stream.schema(), numbers(0, 1).schema());
        assert_eq!(stream.device_type(), ArrowDeviceType::CPU);
        let found: Vec<_> = if depth == 1 {
            let reader = stream.into_blocking_reader();
            assert_eq!(reader.schema(), numbers(0, 1).schema());
            assert_eq!(reader.device_type(), ArrowDeviceType::CPU);
            reader.map(|b| number_of(&b.unwrap())).collect()
        } else {
            let found = all(stream).into_iter();
            found.map(|b| number_of(&b.unwrap())).collect()
        };
        assert_eq!(found, (0..100).collect::<Vec<_>>());
        eventually("the thread ends", || dropped.load(SeqCst));
    }
}

#[test]
fn a_reader_that_blocks_does_not_block_the_poll() {
    let gate = Gate::default();
    let pass = gate.clone();
    let mut batches = counting(2);
    let (reader, _) = reader(move || {
        pass.pass();
        batches()
    });
    let mut stream = ReaderStream::spawn(reader, 2).unwrap();
    let (wakes, waker) = Wakes::new();
    let start = Instant::now();
    assert!(poll_next_with(&mut stream, &waker).is_pending());
    assert!(start.elapsed() < LONG / 4);
    gate.open();
    wakes.wait();
    assert_eq!(number_of(&next(&mut stream).unwrap().unwrap()), 0);
    assert_eq!(number_of(&next(&mut stream).unwrap().unwrap()), 1);
    assert!(next(&mut stream).is_none());
    assert!(next(&mut stream).is_none());
}

#[test]
fn a_reader_is_asked_ahead_no_further_than_the_depth() {
    for depth in [1, 3] {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let mut batches = counting(100);
        let (reader, _) = reader(move || {
            count.fetch_add(1, SeqCst);
            batches()
        });
        let mut stream = ReaderStream::spawn(reader, depth).unwrap();
        for taken in 1..20 {
            assert!(next(&mut stream).unwrap().is_ok());
            std::thread::sleep(SHORT / 25);
            let ahead = asked.load(SeqCst).saturating_sub(taken);
            assert!(ahead <= depth + 1, "{ahead} of {depth}");
        }
    }
}

#[test]
fn errors_and_panics_of_the_reader_are_the_last_item() {
    for (panics, expected) in [(false, "line 7"), (true, "inside the reader")] {
        let mut batches = counting(9);
        let mut n = 0;
        let (reader, dropped) = reader(move || {
            n += 1;
            match n {
                3 if panics => panic!("inside the reader"),
                3 => Some(Err(ArrowError::ParseError("line 7".into()).into())),
                _ => batches(),
            }
        });
        let mut items = all(ReaderStream::spawn(reader, 2).unwrap());
        assert_eq!(items.len(), 3);
        let e = items.pop().unwrap().unwrap_err();
        assert!(e.to_string().contains(expected), "{e}");
        assert_eq!(matches!(e, Error::Panic { .. }), panics);
        eventually("the thread ends", || dropped.load(SeqCst));
    }
}

/// The waker of the task that waits for the stream is dropped at once, too.
#[test]
fn dropping_a_reader_stream_ends_its_thread() {
    // Held up by a full queue.
    let (first, dropped) = reader(counting(i64::MAX));
    let mut stream = ReaderStream::spawn(first, 2).unwrap();
    assert!(next(&mut stream).is_some());
    drop(stream);
    eventually("the thread ends", || dropped.load(SeqCst));
    // Inside the reader: nobody waits for it.
    let gate = Gate::default();
    let pass = gate.clone();
    let (second, dropped) = reader(move || {
        pass.pass();
        None
    });
    let mut stream = ReaderStream::spawn(second, 2).unwrap();
    let (wakes, waker) = Wakes::new();
    assert!(poll_next_with(&mut stream, &waker).is_pending());
    gate.reached();
    drop((stream, waker));
    assert_eq!(Arc::strong_count(&wakes), 1);
    assert!(!dropped.load(SeqCst));
    gate.open();
    eventually("the thread ends", || dropped.load(SeqCst));
}

// ---- BlockingReader

/// A foreign async stream as a plain reader of the host; its error comes along.
#[test]
fn an_async_stream_as_a_reader_of_the_host() {
    let (producer, stream) = crate::async_stream::consumer::opened(2);
    let feeding = std::thread::spawn(move || {
        for i in 0..100 {
            eventually("a request", || producer.requested() > i);
            producer.task(&batch(i));
        }
        producer.error(7, Some(c"line 7"), None);
        producer.release();
        producer.assert_balanced_but_tasks();
    });
    let reader = stream.into_batches().into_blocking_reader();
    let mut reader = reader.into_host_reader();
    for (i, back) in (0..100).zip(&mut reader) {
        assert_eq!(back.unwrap(), numbers(i * 100, 5));
    }
    let e = reader.next().unwrap().unwrap_err();
    assert!(e.to_string().contains("line 7"), "{e}");
    assert!(reader.next().is_none());
    feeding.join().unwrap();
}

/// Whatever parks the thread within a poll takes the token of the wake-up.
#[test]
fn a_reader_waits_for_a_wake_and_not_for_a_token() {
    let mut polls = 0;
    let stream = futures::stream::poll_fn(move |cx| {
        polls += 1;
        if polls > 1 {
            return Poll::Ready(None);
        }
        cx.waker().wake_by_ref();
        std::thread::park();
        Poll::Pending
    });
    assert!(adapted(stream).into_blocking_reader().next().is_none());
}

#[test]
fn a_stream_is_not_asked_after_its_end_or_an_error() {
    for fails in [false, true] {
        let mut polls = 0;
        let stream = futures::stream::poll_fn(move |_| {
            polls += 1;
            assert_eq!(polls, 1, "asked again");
            Poll::Ready(fails.then(|| Err(Error::InvalidArgument("no".into()))))
        });
        let mut reader = adapted(stream).into_blocking_reader();
        assert_eq!(reader.next().is_some(), fails);
        assert!(reader.next().is_none());
    }
}

// ---- BlockingReader on threads of Tokio's

/// Runs a test on a thread that may hang, which is a failure.
#[track_caller]
fn timed<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(test()));
    receiver
        .recv_timeout(LONG)
        .expect("it hangs, or has panicked")
}

/// A runtime of this many workers; of one thread, with none.
fn runtime(workers: usize) -> tokio::runtime::Runtime {
    let mut builder = match workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.worker_threads(workers.max(1)).build().unwrap()
}

/// More than a task may take without giving its thread back.
const MANY: i64 = 400;

/// A reader of a Tokio channel with room for `room` batches, which another task fills: one that the reading task has spawned last, so
/// that Tokio keeps it for the same worker. With room for all of them it is full: nothing is ever waited for, and only the budget is
/// spent.
fn received(room: usize) -> BlockingReader<impl DeviceRecordBatchStream> {
    let (sender, mut receiver) = tokio::sync::mpsc::channel(room);
    if room as i64 == MANY {
        (0..MANY).for_each(|i| sender.try_send(Ok(batch(i))).unwrap());
    } else {
        tokio::spawn(async move {
            for i in 0..MANY {
                sender.send(Ok(batch(i))).await.unwrap();
            }
        });
    }
    let received = stream::poll_fn(move |cx| receiver.poll_recv(cx));
    adapted(received).into_blocking_reader()
}

fn read_all(reader: impl Iterator<Item = Result<DeviceRecordBatch>>) {
    let found: Vec<_> = reader.map(|b| number_of(&b.unwrap())).collect();
    assert_eq!(found, (0..MANY).collect::<Vec<_>>());
}

#[test]
fn a_tokio_channel_is_read_by_a_task_on_a_worker_and_on_a_blocking_thread() {
    if cfg!(miri) {
        return;
    }
    for workers in [0, 2] {
        timed(move || {
            runtime(workers).block_on(async {
                let reader = received(4);
                let read = tokio::task::spawn_blocking(|| read_all(reader));
                read.await.unwrap();
            });
        });
    }
    for workers in [1, 2, 4] {
        for room in [1, 4, MANY as usize] {
            timed(move || {
                runtime(workers).block_on(async {
                    let read = async move { read_all(received(room)) };
                    tokio::spawn(read).await.unwrap();
                    // In what the runtime blocks on, too.
                    read_all(received(room));
                });
            });
        }
    }
}

/// Its producer could not run meanwhile: an error, neither a wait for ever nor a panic.
#[test]
fn on_the_thread_of_a_current_thread_runtime_a_read_is_an_error() {
    if cfg!(miri) {
        return;
    }
    for spawned in [true, false] {
        let (error, next) = timed(move || {
            let read = async {
                let mut reader = received(4);
                (reader.next().unwrap().unwrap_err(), reader.next())
            };
            runtime(0).block_on(async move {
                match spawned {
                    true => tokio::spawn(read).await.unwrap(),
                    false => read.await,
                }
            })
        });
        assert!(matches!(error, Error::InvalidArgument(_)), "{error:?}");
        assert!(error.to_string().contains("spawn_blocking"), "{error}");
        assert!(next.is_none());
    }
}

/// A panic of the stream is the reader's own, on a worker as elsewhere.
#[test]
fn a_panic_of_the_stream_on_a_worker_is_the_readers() {
    if cfg!(miri) {
        return;
    }
    let text = timed(|| {
        let read = async {
            let stream = stream::poll_fn(|_| panic!("inside the stream"));
            adapted(stream).into_blocking_reader().next();
        };
        let panic = runtime(2).block_on(async { tokio::spawn(read).await.unwrap_err() });
        *panic.into_panic().downcast::<&str>().unwrap()
    });
    assert_eq!(text, "inside the stream");
}
