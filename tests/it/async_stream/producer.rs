//! What the producer does with a consumer that asks, takes its time, cancels and refuses.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Poll;

use arrow_device::async_stream::{
    AsyncBatch, DeviceRecordBatchStreamAdapter, Outcome, ProduceOptions, produce, produce_at,
};
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Error, ExportOptions, Result, SyncPolicy};
use futures::{Stream, stream};
use libc::{EINVAL, EIO};

use crate::async_stream::kit::*;

pub(crate) type Running = Pin<Box<dyn Future<Output = Result<Outcome>> + Send>>;

pub(crate) fn options() -> ProduceOptions {
    ProduceOptions::new(ExportOptions::new(SyncPolicy::Event))
}

/// Batches as a stream, in memory of the host.
pub(crate) fn adapted<S>(batches: S) -> DeviceRecordBatchStreamAdapter<S>
where
    S: Stream<Item = Result<DeviceRecordBatch>>,
{
    let schema = numbers(0, 1).schema();
    DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::CPU, batches)
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
pub(crate) fn refused(outcome: Poll<Result<Outcome>>) -> i32 {
    match ready(outcome).unwrap() {
        Outcome::Refused { errno } => errno,
        other => panic!("{other:?}"),
    }
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
fn the_schema_comes_with_the_first_poll_and_no_demand() {
    let consumer = FakeConsumer::new();
    let mut produce = producing(5, &consumer);
    for _ in 0..5 {
        assert!(poll(&mut produce).is_pending());
        assert_eq!(consumer.story(), "S");
    }
    consumer.cancel();
    cancelled(block_on(produce));
    consumer.assert_done();
}

#[test]
fn metadata_of_the_stream_and_of_batches_goes_out() {
    let consumer = FakeConsumer::requesting(9);
    let batches = stream::iter((0..2).map(|i| {
        let metadata = map(&[("part", &i.to_string())]);
        Ok(AsyncBatch {
            batch: batch(i),
            metadata,
        })
    }));
    let batches =
        DeviceRecordBatchStreamAdapter::new(numbers(0, 1).schema(), ArrowDeviceType::CPU, batches);
    let options = options().with_metadata(map(&[("rows", "10")]));
    completed(block_on(produce(batches, consumer.handler(), options)));
    assert_eq!(consumer.metadata(), Some(map(&[("rows", "10")])));
    let parts = ["0", "1"].map(|i| Call::Task(Some(map(&[("part", i)]))));
    assert_eq!(consumer.calls()[1..3], parts);
    consumer.assert_done();
}

#[test]
fn a_handler_in_place_keeps_its_address() {
    let consumer = FakeConsumer::requesting(9);
    let mut handler = Box::new(consumer.handler());
    let batches = adapted(stream::iter([Ok(batch(3))]));
    // SAFETY: the handler stays where it is until it was released.
    let produce = unsafe { produce_at(batches, &raw mut *handler, options()) };
    completed(block_on(produce));
    assert!(handler.is_released());
    assert_eq!(number_of(&consumer.extract()), 3);
    consumer.assert_done();
}

// ---- request

#[test]
fn no_more_comes_than_was_requested() {
    let consumer = FakeConsumer::new();
    let mut produce = producing(6, &consumer);
    assert!(poll(&mut produce).is_pending());
    for (n, story) in [(1, "ST"), (2, "STTT"), (1, "STTTT")] {
        consumer.request(n);
        assert!(poll(&mut produce).is_pending());
        assert_eq!(consumer.story(), story);
    }
    consumer.request(2);
    completed(block_on(produce));
    consumer.assert_done();
}

#[test]
fn a_request_wakes_and_calls_nothing_itself() {
    let consumer = FakeConsumer::new();
    let mut produce = producing(6, &consumer);
    let (wakes, waker) = Wakes::new();
    assert!(poll_with(&mut produce, &waker).is_pending());
    let before = wakes.count();
    consumer.request(1);
    assert!(wakes.count() > before);
    assert_eq!(consumer.story(), "S");
    assert!(poll(&mut produce).is_pending());
    assert_eq!(consumer.story(), "ST");
    consumer.cancel();
    cancelled(block_on(produce));
    consumer.assert_done();
}

#[test]
fn a_request_of_0_or_less_is_an_error() {
    for n in [0, -1, i64::MIN] {
        let consumer = FakeConsumer::new();
        let mut produce = producing(6, &consumer);
        let (wakes, waker) = Wakes::new();
        assert!(poll_with(&mut produce, &waker).is_pending());
        consumer.request(n);
        assert_eq!(consumer.story(), "S", "not from inside request");
        assert!(wakes.count() > 0);
        assert_eq!(ready(poll(&mut produce)).unwrap_err().errno(), EINVAL);
        assert_eq!(consumer.story(), "SER");
        assert_eq!(consumer.error().0, EINVAL);
        consumer.assert_done();
    }
}

#[test]
fn a_bad_request_from_inside_on_schema_is_an_error() {
    let consumer = FakeConsumer::requesting(-7);
    let outcome = block_on(producing(6, &consumer));
    assert_eq!(outcome.unwrap_err().errno(), EINVAL);
    assert_eq!(consumer.story(), "SER");
    consumer.assert_done();
}

#[test]
fn requests_saturate() {
    let consumer = FakeConsumer::requesting(i64::MAX);
    consumer.on_task(|this| {
        this.request(i64::MAX);
        0
    });
    completed(block_on(producing(20, &consumer)));
    assert_eq!(consumer.received(), 20);
    consumer.assert_done();
}

#[test]
fn a_request_from_inside_on_next_task_is_served_after_it() {
    let consumer = FakeConsumer::requesting(1);
    consumer.on_task(|this| {
        this.request(1);
        0
    });
    let n = if cfg!(miri) { 20 } else { 500 };
    completed(block_on(producing(n, &consumer)));
    assert_eq!(consumer.received(), n as usize);
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
    let batches = stream::iter(0..10).map_with(move |i| {
        counted.fetch_add(1, SeqCst);
        Ok(batch(i))
    });
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

/// `map` under a name of its own: `StreamExt` and iterators would be in each other's way.
trait MapWith: Stream + Sized {
    fn map_with<T, F: FnMut(Self::Item) -> T>(self, f: F) -> futures::stream::Map<Self, F> {
        futures::StreamExt::map(self, f)
    }
}

impl<S: Stream> MapWith for S {}

// ---- the end

#[test]
fn the_end_needs_no_demand() {
    for n in [0, 3] {
        let consumer = match n {
            0 => FakeConsumer::new(),
            n => FakeConsumer::requesting(n),
        };
        completed(block_on(producing(n, &consumer)));
        let expected = format!("S{}.R", "T".repeat(n as usize));
        assert_eq!(consumer.story(), expected);
        consumer.assert_done();
    }
}

#[test]
fn tasks_may_be_taken_after_the_release_and_the_producers_end() {
    let consumer = FakeConsumer::requesting(9);
    completed(block_on(producing(3, &consumer)));
    assert!(consumer.released());
    let tasks = [(); 3].map(|()| consumer.take());
    // The struct lives until the last task: a request is nothing, and not a crash.
    consumer.request(4);
    consumer.request(-1);
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

// ---- cancel

#[test]
fn cancel_is_followed_by_the_release_alone() {
    for taken in [0, 1, 3] {
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
        cancelled(ready(poll(&mut produce)));
        let expected = format!("S{}R", "T".repeat(taken as usize));
        assert_eq!(consumer.story(), expected);
        drop(produce);
        consumer.assert_done();
    }
}

#[test]
fn cancel_from_inside_on_schema_and_on_next_task() {
    let consumer = FakeConsumer::new();
    consumer.on_schema(|this| {
        this.request(3);
        this.cancel();
        0
    });
    cancelled(block_on(producing(6, &consumer)));
    assert_eq!(consumer.story(), "SR");
    consumer.assert_done();

    let consumer = FakeConsumer::requesting(5);
    consumer.on_task(|this| {
        if this.received() == 2 {
            this.cancel();
        }
        0
    });
    cancelled(block_on(producing(6, &consumer)));
    assert_eq!(consumer.story(), "STTR");
    consumer.assert_done();
}

#[test]
fn cancel_after_the_end_changes_nothing() {
    let consumer = FakeConsumer::requesting(2);
    completed(block_on(producing(1, &consumer)));
    consumer.cancel();
    consumer.cancel();
    assert_eq!(consumer.story(), "ST.R");
    consumer.assert_done();
}

// ---- refusals

#[test]
fn a_refused_schema_is_followed_by_the_release_alone() {
    for errno in [EINVAL, 1, -5, i32::MAX] {
        let consumer = FakeConsumer::new();
        consumer.on_schema(move |this| {
            this.request(3);
            errno
        });
        let mut produce = producing(2, &consumer);
        assert_eq!(refused(poll(&mut produce)), errno);
        assert_eq!(consumer.story(), "SR");
        consumer.assert_done();
    }
}

#[test]
fn a_refused_task_is_followed_by_the_release_alone() {
    let consumer = FakeConsumer::requesting(9);
    consumer.on_task(|this| if this.received() == 2 { 28 } else { 0 });
    let mut produce = producing(6, &consumer);
    assert_eq!(refused(poll(&mut produce)), 28);
    assert_eq!(consumer.story(), "STTR");
    consumer.assert_done();
}

#[test]
fn a_panic_of_the_consumer_is_a_refusal() {
    let consumer = FakeConsumer::new();
    consumer.on_schema(|_| panic!("inside on_schema"));
    let mut produce = producing(2, &consumer);
    assert_eq!(refused(poll(&mut produce)), EIO);
    assert_eq!(consumer.story(), "SR");
    consumer.assert_done();

    let consumer = FakeConsumer::requesting(9);
    consumer.on_task(|_| panic!("inside on_next_task"));
    let mut produce = producing(2, &consumer);
    assert_eq!(refused(poll(&mut produce)), EIO);
    assert_eq!(consumer.story(), "STR");
    consumer.assert_done();
}

// ---- handlers that are none

#[test]
fn a_released_handler_is_an_error() {
    let batches = adapted(stream::iter([Ok(batch(0))]));
    let produce = produce(batches, Handler::empty(), options());
    let e = block_on(produce).unwrap_err();
    assert!(matches!(e, Error::Released(_)), "{e:?}");
    let mut handler = Handler::empty();
    for handler in [&raw mut handler, std::ptr::null_mut()] {
        let batches = adapted(stream::iter([Ok(batch(0))]));
        // SAFETY: the pointer is null, or to a released handler that stays there.
        let e = block_on(unsafe { produce_at(batches, handler, options()) }).unwrap_err();
        let expected = match handler.is_null() {
            true => matches!(e, Error::InvalidInput { .. }),
            false => matches!(e, Error::Released(_)),
        };
        assert!(expected, "{e:?}");
    }
}

#[test]
fn a_handler_with_a_missing_callback_is_released_and_nothing_else() {
    for missing in 0..3 {
        let consumer = FakeConsumer::requesting(3);
        let mut handler = consumer.handler();
        // SAFETY: each of the struct's first three words is a callback, which may be null.
        unsafe {
            (&raw mut handler)
                .cast::<*const u8>()
                .add(missing)
                .write(std::ptr::null());
        }
        let batches = adapted(stream::iter([Ok(batch(0))]));
        let e = block_on(produce(batches, handler, options())).unwrap_err();
        assert!(matches!(e, Error::InvalidInput { .. }), "{e:?}");
        assert_eq!(consumer.story(), "R");
        consumer.assert_done();
    }
}
