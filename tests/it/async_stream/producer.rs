//! What the producer does with a consumer that asks, takes its time, cancels and refuses, and when its stream fails or it is dropped.

use std::ffi::c_int;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use arrow_array::{ArrayRef, Int32Array, RecordBatch};
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, Outcome};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, Devices, Error, ExportOptions,
    ImportOptions, Result, SyncPolicy,
};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use futures::executor::block_on;
use futures::{Stream, StreamExt, stream};
use libc::{ECANCELED, EINVAL, EIO, ENOMEM};

use crate::async_stream::kit::*;

pub(crate) type Running = Pin<Box<dyn Future<Output = Result<Outcome>> + Send>>;

pub(crate) fn options() -> ExportOptions {
    ExportOptions::new(SyncPolicy::Event)
}

/// Batches as a stream, in memory of the host.
pub(crate) fn adapted<S>(batches: S) -> DeviceRecordBatches<Pin<Box<S>>>
where
    S: Stream<Item = Result<DeviceRecordBatch>>,
{
    let schema = numbers(0, 1).schema();
    DeviceRecordBatches::from_stream(batches, schema, ArrowDeviceType::CPU)
}

/// `n` batches of the host for `consumer`.
pub(crate) fn producing(n: i64, consumer: &FakeConsumer) -> Running {
    let batches = adapted(stream::iter((0..n).map(|i| Ok(batch(i)))));
    Box::pin(produce(batches, consumer.handler(), options()))
}

pub(crate) fn producing_items(
    items: Vec<Result<DeviceRecordBatch>>,
    consumer: &FakeConsumer,
) -> Running {
    Box::pin(produce(
        adapted(stream::iter(items)),
        consumer.handler(),
        options(),
    ))
}

#[track_caller]
pub(crate) fn completed(outcome: Result<Outcome>) {
    assert!(matches!(outcome, Ok(Outcome::Completed)), "{outcome:?}");
}

#[track_caller]
pub(crate) fn cancelled(outcome: Result<Outcome>) {
    assert!(matches!(outcome, Ok(Outcome::Cancelled)), "{outcome:?}");
}

#[test]
fn a_good_stream_goes_out_as_it_is() {
    let consumer = FakeConsumer::requesting(100);
    let mut produce = producing(5, &consumer);
    assert_eq!(consumer.story(), "", "nothing before the first poll");
    completed(block_on(&mut produce));
    assert_eq!(consumer.story(), "STTTTT.R");
    assert_eq!(consumer.calls()[0], Call::Schema(numbers(0, 1).schema()));
    assert_eq!(consumer.device_type(), ArrowDeviceType::CPU);
    assert_eq!(consumer.metadata(), None);
    for i in 0..5 {
        assert_eq!(number_of(&consumer.extract()), i);
    }
    consumer.assert_done();
}

#[test]
fn metadata_of_the_stream_and_of_batches_goes_out() {
    let consumer = FakeConsumer::requesting(9);
    let batches = adapted(stream::iter([Ok(batch(0))])).with_metadata(map(&[("k", "v")]));
    completed(block_on(produce(batches, consumer.handler(), options())));
    assert_eq!(consumer.metadata(), Some(map(&[("k", "v")])));
    assert_eq!(consumer.calls()[1], Call::Task(None));
    consumer.assert_done();

    let consumer = FakeConsumer::requesting(9);
    // Of another stream, and passed on as it came.
    let (producer, first) = FakeProducer::open(2);
    producer.set_metadata(encode(&[(b"rows", b"10")]));
    assert_eq!(producer.schema(), 0);
    for part in [b"0", b"1"] {
        let metadata = encode(&[(b"part", part)]);
        assert_eq!(producer.task_with(&batch(0), Some(&metadata)), 0);
    }
    producer.end();
    producer.release();
    let batches = block_on(first).unwrap();
    completed(block_on(produce(batches, consumer.handler(), options())));
    assert_eq!(consumer.metadata(), Some(map(&[("rows", "10")])));
    let parts = ["0", "1"].map(|i| Call::Task(Some(map(&[("part", i)]))));
    assert_eq!(consumer.calls()[1..3], parts);
    consumer.assert_done();
}

// ---- request

#[test]
fn a_request_wakes_and_no_more_comes_than_was_requested() {
    let consumer = FakeConsumer::new();
    let mut produce = producing(6, &consumer);
    let (wakes, waker) = Wakes::new();
    assert!(poll_with(&mut produce, &waker).is_pending());
    let mut story = String::from("S");
    for n in [1, 2, 1] {
        let before = wakes.count();
        consumer.request(n);
        assert!(wakes.count() > before);
        assert_eq!(consumer.story(), story, "not from inside request");
        assert!(poll_with(&mut produce, &waker).is_pending());
        story.push_str(&"T".repeat(n as usize));
        assert_eq!(consumer.story(), story);
    }
    consumer.request(2);
    completed(block_on(produce));
    consumer.assert_done();
}

#[test]
fn a_request_of_0_or_less_is_an_error() {
    for (n, within_on_schema) in [(0, false), (-1, false), (i64::MIN, false), (-7, true)] {
        let consumer = match within_on_schema {
            true => FakeConsumer::requesting(n),
            false => FakeConsumer::new(),
        };
        let mut produce = producing(6, &consumer);
        if !within_on_schema {
            let (wakes, waker) = Wakes::new();
            assert!(poll_with(&mut produce, &waker).is_pending());
            consumer.request(n);
            assert_eq!(consumer.story(), "S", "not from inside request");
            assert!(wakes.count() > 0);
        }
        assert_eq!(ready(poll(&mut produce)).unwrap_err().errno(), EINVAL);
        assert_eq!(
            (consumer.story().as_str(), consumer.error().0),
            ("SER", EINVAL)
        );
        consumer.assert_done();
    }
}

/// Sums saturate.
#[test]
fn a_request_from_inside_on_next_task_is_served_after_it() {
    let many = if cfg!(miri) { 20 } else { 500 };
    for (n, batches) in [(1, many), (i64::MAX, 20)] {
        let consumer = FakeConsumer::requesting(n);
        consumer.on_task(move |this| {
            this.request(n);
            0
        });
        completed(block_on(producing(batches, &consumer)));
        assert_eq!(consumer.received() as i64, batches);
        consumer.assert_done();
    }
}

/// However often the consumer requests.
#[test]
fn a_poll_gives_way_to_other_tasks() {
    let consumer = FakeConsumer::requesting(1);
    consumer.on_task(|this| {
        this.request(1);
        0
    });
    let mut produce = producing(100, &consumer);
    let (wakes, waker) = Wakes::new();
    assert!(poll_with(&mut produce, &waker).is_pending());
    assert!((1..=32).contains(&consumer.received()));
    assert!(wakes.count() > 0);
    completed(block_on(produce));
    consumer.assert_done();
}

#[test]
fn a_consumer_that_never_requests_blocks_nobody() {
    let consumer = FakeConsumer::new();
    let mut produce = producing(6, &consumer);
    let (wakes, waker) = Wakes::new();
    for _ in 0..100 {
        assert!(poll_with(&mut produce, &waker).is_pending());
    }
    std::thread::sleep(SHORT);
    assert_eq!((wakes.count(), consumer.story().as_str()), (0, "S"));
    drop(produce);
    assert_eq!(consumer.story(), "SER");
    consumer.assert_done();
}

/// A stream is asked for one batch ahead of what was requested, to see its end.
#[test]
fn one_batch_is_made_ahead_of_the_demand() {
    let made = Arc::new(AtomicUsize::new(0));
    let counted = made.clone();
    let batches = stream::iter((0..10).map(move |i| {
        counted.fetch_add(1, SeqCst);
        Ok(batch(i))
    }));
    let consumer = FakeConsumer::new();
    let mut produce: Running = Box::pin(produce(adapted(batches), consumer.handler(), options()));
    assert!(poll(&mut produce).is_pending());
    assert!(made.load(SeqCst) <= 1);
    consumer.request(2);
    assert!(poll(&mut produce).is_pending());
    assert!((2..=3).contains(&made.load(SeqCst)), "{made:?}");
    drop(produce);
    consumer.assert_done();
}

// ---- the end and cancel

#[test]
fn the_end_needs_no_demand() {
    let consumer = FakeConsumer::new();
    completed(block_on(producing(0, &consumer)));
    assert_eq!(consumer.story(), "S.R");
    consumer.assert_done();
}

#[test]
fn tasks_may_be_taken_after_the_release_and_the_producers_end() {
    let consumer = FakeConsumer::requesting(3);
    completed(block_on(producing(3, &consumer)));
    let tasks = [(); 3].map(|()| consumer.take());
    // The struct lives until the last task: a request is nothing, and not a crash.
    consumer.request(4);
    consumer.request(-1);
    consumer.cancel();
    consumer.cancel();
    for (i, task) in tasks.into_iter().enumerate() {
        consumer.request(1);
        let batch = std::thread::scope(|scope| {
            let extract = scope.spawn(|| consumer.extract_task(task));
            extract.join().unwrap()
        });
        assert_eq!(number_of(&batch), i as i64);
    }
    assert_eq!(consumer.story(), "STTT.R");
    consumer.assert_done();
}

/// A cancellation is no error, even if nobody polls any more.
#[test]
fn cancel_is_followed_by_the_release_alone() {
    for (taken, polled) in [(0, true), (1, true), (3, true), (1, false)] {
        let consumer = match taken {
            0 => FakeConsumer::new(),
            n => FakeConsumer::requesting(n),
        };
        let mut produce = producing(6, &consumer);
        let (wakes, waker) = Wakes::new();
        assert!(poll_with(&mut produce, &waker).is_pending());
        consumer.cancel();
        assert!(wakes.count() > 0);
        assert!(!consumer.released(), "not from inside cancel");
        for _ in 0..3 {
            consumer.cancel();
            consumer.request(5);
            consumer.request(-1);
        }
        if polled {
            cancelled(ready(poll(&mut produce)));
        }
        drop(produce);
        let expected = format!("S{}R", "T".repeat(taken as usize));
        assert_eq!(consumer.story(), expected);
        consumer.assert_done();
    }
}

#[test]
fn cancel_from_inside_on_schema_and_on_next_task() {
    for (within_on_schema, story) in [(true, "SR"), (false, "STTR")] {
        let consumer = FakeConsumer::new();
        consumer.on_schema(move |this| {
            this.request(5);
            if within_on_schema {
                this.cancel();
            }
            0
        });
        consumer.on_task(|this| {
            if this.received() == 2 {
                this.cancel();
            }
            0
        });
        cancelled(block_on(producing(6, &consumer)));
        assert_eq!(consumer.story(), story);
        consumer.assert_done();
    }
}

// ---- refusals

/// Of a schema and of a task; a panic is one with EIO.
#[test]
fn a_refusal_is_followed_by_the_release_alone() {
    type Refuse = fn() -> c_int;
    let refusals: [(Refuse, c_int); 4] = [
        (|| EINVAL, EINVAL),
        (|| -5, -5),
        (|| i32::MAX, i32::MAX),
        (|| panic!("inside a callback"), EIO),
    ];
    for ((refuse, errno), of_schema) in refusals
        .into_iter()
        .flat_map(|refusal| [(refusal, true), (refusal, false)])
    {
        let consumer = FakeConsumer::new();
        consumer.on_schema(move |this| {
            this.request(3);
            if of_schema { refuse() } else { 0 }
        });
        consumer.on_task(move |this| if this.received() == 2 { refuse() } else { 0 });
        let outcome = ready(poll(&mut producing(6, &consumer)));
        let refused = Outcome::Refused { errno };
        assert!(
            matches!(&outcome, Ok(outcome) if *outcome == refused),
            "{outcome:?}"
        );
        assert_eq!(consumer.story(), if of_schema { "SR" } else { "STTR" });
        consumer.assert_done();
    }
}

/// Released ones, none, and ones without a callback, which are released.
#[test]
fn handlers_that_are_none() {
    let batches = || adapted(stream::iter([Ok(batch(0))]));
    let mut released = Handler {
        on_schema: None,
        on_next_task: None,
        on_error: None,
        release: None,
        producer: std::ptr::null_mut(),
        private_data: std::ptr::null_mut(),
    };
    let e = block_on(produce(batches(), &raw mut released, options())).unwrap_err();
    assert!(matches!(e, Error::Released(_)), "{e:?}");
    let e = block_on(produce(batches(), std::ptr::null_mut(), options())).unwrap_err();
    assert!(matches!(e, Error::InvalidInput { .. }), "{e:?}");
    for missing in 0..3 {
        let consumer = FakeConsumer::requesting(3);
        let handler = consumer.handler();
        // SAFETY: each of the struct's first three words is a callback, which may be null.
        unsafe {
            let words = handler.cast::<*const u8>();
            words.add(missing).write(std::ptr::null());
        }
        let e = block_on(produce(batches(), handler, options())).unwrap_err();
        assert!(matches!(e, Error::InvalidInput { .. }), "{e:?}");
        assert_eq!(consumer.story(), "R");
        consumer.assert_done();
    }
}

// ---- errors

/// At the start, without demand, and after a batch; nothing is asked for behind it.
#[test]
fn an_error_goes_out_with_errno_text_and_metadata() {
    let failure = |errno, message: &'static str, metadata: &[(&str, &str)]| Error::AsyncProducer {
        errno,
        message: message.into(),
        metadata: map(metadata),
    };
    let memory = || Error::Arrow(Arc::new(ArrowError::MemoryError("none left".into())));
    let disk: &[(&str, &str)] = &[("disk", "3"), ("k\0", "v\0w")];
    for after_a_batch in [false, true] {
        let errors = [
            (
                failure(28, "the disk is full", disk),
                28,
                "the disk is full",
                disk,
            ),
            (failure(5, "a\0b", disk), 5, "a", disk),
            (failure(5, "\0", disk), 5, "", disk),
            (failure(0, "", &[]), EIO, "", &[]),
            (memory(), ENOMEM, "none left", &[]),
        ];
        for (error, errno, text, metadata) in errors {
            let (consumer, mut items) = match after_a_batch {
                false => (FakeConsumer::new(), vec![]),
                true => (FakeConsumer::requesting(9), vec![Ok(batch(0))]),
            };
            items.extend([Err(error), Ok(batch(1))]);
            let outcome = block_on(producing_items(items, &consumer));
            assert_eq!(outcome.unwrap_err().errno(), errno);
            let (found, told, pairs) = consumer.error();
            assert_eq!(found, errno);
            assert!(told.contains(text), "{told:?}");
            let metadata = (!metadata.is_empty()).then(|| map(metadata));
            assert_eq!(pairs, metadata);
            assert_eq!(consumer.story(), if after_a_batch { "STER" } else { "SER" });
            consumer.assert_done();
        }
    }
}

#[test]
fn a_stream_that_panics_is_an_error_of_the_consumer() {
    let consumer = FakeConsumer::requesting(9);
    let mut i = 0;
    let batches = stream::poll_fn(move |_| {
        i += 1;
        assert!(i < 2, "inside the stream");
        Poll::Ready(Some(Ok(batch(0))))
    });
    let produce: Running = Box::pin(produce(adapted(batches), consumer.handler(), options()));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| block_on(produce)));
    assert!(!matches!(outcome, Ok(Ok(_))), "{outcome:?}");
    assert_eq!(consumer.story(), "STER");
    assert_ne!(consumer.error().0, 0);
    consumer.assert_done();
}

/// A schema that C has no name for, batches of another schema, and on another type of device.
#[test]
fn what_does_not_fit_is_an_error() {
    let named = |name| Arc::new(Schema::new(vec![Field::new(name, DataType::Int32, true)]));
    let other = |name| {
        let values: ArrayRef = Arc::new(Int32Array::from(vec![1]));
        let other = RecordBatch::try_from_iter([(name, values)]).unwrap();
        Ok(Devices::cpu().upload(&other).unwrap())
    };
    let (ours, cpu) = (numbers(0, 1).schema(), ArrowDeviceType::CPU);
    for (schema, device_type, items, story) in [
        (named("a\0b"), cpu, vec![], "ER"),
        (ours.clone(), cpu, vec![Ok(batch(0)), other("i")], "STER"),
        (ours.clone(), cpu, vec![Ok(batch(0)), other("x")], "STER"),
        (ours, ArrowDeviceType::CUDA, vec![Ok(batch(0))], "SER"),
    ] {
        let consumer = FakeConsumer::requesting(9);
        let items = stream::iter(items);
        let batches = DeviceRecordBatches::from_stream(items, schema, device_type);
        let e = block_on(produce(batches, consumer.handler(), options())).unwrap_err();
        assert_eq!(consumer.story(), story);
        assert_eq!(consumer.error().0, e.errno());
        if story != "ER" {
            assert_eq!((e.errno(), consumer.device_type()), (EINVAL, device_type));
        }
        consumer.assert_done();
    }
}

// ---- dropping

/// Never polled, in the middle, after its end.
#[test]
fn a_produce_that_is_dropped_tells_its_consumer() {
    for (polled, batches, story) in [(false, 2, "ER"), (true, 5, "STTER"), (true, 1, "ST.R")] {
        let consumer = FakeConsumer::requesting(2);
        let mut produce = producing(batches, &consumer);
        if polled {
            assert_eq!(poll(&mut produce).is_pending(), batches > 2);
        }
        drop(produce);
        assert_eq!(consumer.story(), story);
        if story.contains('E') {
            let (errno, text, _) = consumer.error();
            assert_eq!((errno, text.is_empty()), (ECANCELED, false));
        }
        if polled {
            assert_eq!(
                number_of(&consumer.extract()),
                0,
                "what went out stays good"
            );
        }
        consumer.assert_done();
    }
}

/// A task that its waker, or another thread, can drop.
type Slot = Arc<Mutex<Option<Running>>>;

/// A stream of one batch, with this many tasks requested at a time, and the task that produces it, which waits.
fn half_way(depth: usize, slot: &Slot, waker: &Waker) -> AsyncDeviceRecordBatchStream {
    let batches = adapted(stream::iter([Ok(batch(0))]).chain(stream::pending()));
    // SAFETY: the producer is this crate's.
    let (handler, mut opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(depth, ImportOptions::default()) };
    let mut task: Running = Box::pin(produce(batches, handler, options()));
    assert!(
        task.as_mut()
            .poll(&mut Context::from_waker(waker))
            .is_pending()
    );
    *slot.lock().unwrap() = Some(task);
    match poll(&mut opening) {
        Poll::Ready(stream) => stream.unwrap(),
        Poll::Pending => panic!("the schema has come"),
    }
}

/// What an executor does that has ended: the task's last holder is its waker.
#[test]
fn a_waker_drops_its_task_while_the_consumer_calls() {
    struct Dropping(Slot);
    impl Wake for Dropping {
        fn wake(self: Arc<Self>) {
            let task = self.0.lock().unwrap().take();
            drop(task);
        }
    }
    for depth in [1, 4] {
        let slot = Slot::default();
        let mut stream = half_way(depth, &slot, &Arc::new(Dropping(slot.clone())).into());
        // At a depth of 1 this requests the next task; at 4, only the drop of the stream calls the producer.
        let first = poll(&mut stream.next());
        assert!(matches!(first, Poll::Ready(Some(Ok(_)))), "{first:?}");
        assert_eq!(slot.lock().unwrap().is_none(), depth == 1);
        drop(stream);
        assert!(slot.lock().unwrap().is_none());
    }
}

/// An executor drops its tasks under the lock that its wakers take.
#[test]
fn a_task_is_dropped_under_the_lock_that_its_waker_waits_for() {
    struct Locking {
        slot: Slot,
        wakes: mpsc::Sender<()>,
        is_locked: Mutex<mpsc::Receiver<()>>,
    }
    impl Wake for Locking {
        fn wake(self: Arc<Self>) {
            self.wakes.send(()).unwrap();
            self.is_locked.lock().unwrap().recv().unwrap();
            drop(self.slot.lock());
        }
    }
    let slot = Slot::default();
    let ((wakes, is_waking), (locks, is_locked)) = (mpsc::channel(), mpsc::channel());
    let waker = Arc::new(Locking {
        slot: slot.clone(),
        wakes,
        is_locked: Mutex::new(is_locked),
    });
    let mut stream = half_way(1, &slot, &waker.into());
    let (done, is_done) = mpsc::channel();
    let also_done = done.clone();
    thread::spawn(move || {
        let first = poll(&mut stream.next());
        done.send(matches!(first, Poll::Ready(Some(Ok(_)))))
            .unwrap();
        let next = block_on(stream.next());
        done.send(matches!(
            next,
            Some(Err(Error::AsyncProducer {
                errno: ECANCELED,
                ..
            }))
        ))
        .unwrap();
    });
    thread::spawn(move || {
        is_waking.recv().unwrap();
        let mut task = slot.lock().unwrap();
        locks.send(()).unwrap();
        *task = None;
        also_done.send(true).unwrap();
    });
    for _ in 0..3 {
        assert_eq!(is_done.recv_timeout(LONG), Ok(true));
    }
}
