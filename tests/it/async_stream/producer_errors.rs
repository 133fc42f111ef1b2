//! The producer when its stream fails, its batches do not fit, or it is dropped; and device work.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int32Array, RecordBatch};
use arrow_device::async_stream::{DeviceRecordBatchStreamAdapter, produce};
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Devices, Error, Result, SyncPolicy};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use futures::stream;
use libc::{ECANCELED, EINVAL, EIO};

use crate::async_stream::kit::*;
use crate::async_stream::producer::{
    Running, adapted, completed, options, producing, producing_items,
};
use crate::async_stream::producer_device::on_sim;
use crate::simkit::Sim;

fn failure(errno: i32, message: &'static str, pairs: &[(&str, &str)]) -> Error {
    Error::AsyncProducer {
        errno,
        message: message.into(),
        metadata: map(pairs),
    }
}

// ---- errors of the stream

#[test]
fn an_error_goes_out_with_errno_text_and_metadata() {
    let e = failure(28, "the disk is full", &[("disk", "3")]);
    let consumer = FakeConsumer::requesting(9);
    let items = vec![Ok(batch(0)), Err(e), Ok(batch(1))];
    let outcome = block_on(producing_items(items, &consumer));
    assert_eq!(outcome.unwrap_err().errno(), 28);
    assert_eq!(
        consumer.story(),
        "STER",
        "nothing is asked for behind an error"
    );
    let (errno, text, metadata) = consumer.error();
    assert_eq!((errno, metadata), (28, Some(map(&[("disk", "3")]))));
    assert!(text.contains("the disk is full"), "{text}");
    assert_eq!(number_of(&consumer.extract()), 0);
    consumer.assert_done();
}

#[test]
fn an_error_needs_no_demand_and_no_metadata() {
    let consumer = FakeConsumer::new();
    let e = Error::Arrow(Arc::new(ArrowError::MemoryError("none left".into())));
    let outcome = block_on(producing_items(vec![Err(e)], &consumer));
    assert_eq!(outcome.unwrap_err().errno(), libc::ENOMEM);
    let (errno, text, metadata) = consumer.error();
    assert_eq!((errno, metadata), (libc::ENOMEM, None));
    assert!(text.contains("none left"), "{text}");
    assert_eq!(consumer.story(), "SER");
    consumer.assert_done();
}

#[test]
fn a_text_with_a_nul_byte_goes_out() {
    for text in ["a\0b", "\0", ""] {
        let consumer = FakeConsumer::new();
        let e = failure(5, text, &[("k\0", "v\0w")]);
        block_on(producing_items(vec![Err(e)], &consumer)).unwrap_err();
        let (errno, got, metadata) = consumer.error();
        assert_eq!(errno, 5);
        if text.starts_with('a') {
            assert!(got.contains('a') && got.contains('b'), "{got:?}");
        }
        assert_eq!(metadata, Some(map(&[("k\0", "v\0w")])));
        consumer.assert_done();
    }
}

#[test]
fn an_errno_of_0_goes_out_as_an_error() {
    let consumer = FakeConsumer::new();
    let outcome = block_on(producing_items(vec![Err(failure(0, "?", &[]))], &consumer));
    assert_eq!(outcome.unwrap_err().errno(), EIO);
    assert_eq!(consumer.error().0, EIO);
    consumer.assert_done();
}

#[test]
fn a_stream_that_panics_is_an_error_of_the_consumer() {
    let consumer = FakeConsumer::requesting(9);
    let mut i = 0;
    let batches = stream::poll_fn(move |_| {
        i += 1;
        assert!(i < 2, "inside the stream");
        std::task::Poll::Ready(Some(Ok(batch(0))))
    });
    let produce: Running = Box::pin(produce(adapted(batches), consumer.handler(), options()));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| block_on(produce)));
    assert!(!matches!(outcome, Ok(Ok(_))), "{outcome:?}");
    assert_eq!(consumer.story(), "STER");
    assert_ne!(consumer.error().0, 0);
    consumer.assert_done();
}

#[test]
fn a_schema_that_cannot_go_out_is_an_error() {
    let consumer = FakeConsumer::new();
    let schema = Arc::new(Schema::new(vec![Field::new("a\0b", DataType::Int32, true)]));
    let none = stream::iter(Vec::<Result<DeviceRecordBatch>>::new());
    let batches = DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::CPU, none);
    let outcome = block_on(produce(batches, consumer.handler(), options()));
    let e = outcome.unwrap_err();
    assert_eq!(consumer.story(), "ER");
    assert_eq!(consumer.error().0, e.errno());
    consumer.assert_done();
}

// ---- batches that do not fit

#[test]
fn a_batch_of_another_schema_is_an_error() {
    let values: ArrayRef = Arc::new(Int32Array::from(vec![1]));
    for name in ["i", "other"] {
        let other = RecordBatch::try_from_iter([(name, values.clone())]).unwrap();
        let other = Devices::cpu().upload(&other).unwrap();
        let consumer = FakeConsumer::requesting(9);
        let items = vec![Ok(batch(0)), Ok(other), Ok(batch(1))];
        let outcome = block_on(producing_items(items, &consumer));
        assert_eq!(outcome.unwrap_err().errno(), EINVAL);
        assert_eq!(consumer.story(), "STER");
        assert_eq!(consumer.error().0, EINVAL);
        consumer.assert_done();
    }
}

#[test]
fn a_batch_on_another_type_of_device_is_an_error() {
    let consumer = FakeConsumer::requesting(9);
    let batches = stream::iter([Ok(batch(0))]);
    let schema = numbers(0, 1).schema();
    let batches = DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::CUDA, batches);
    let outcome = block_on(produce(batches, consumer.handler(), options()));
    assert_eq!(outcome.unwrap_err().errno(), EINVAL);
    assert_eq!(consumer.device_type(), ArrowDeviceType::CUDA);
    assert_eq!(consumer.story(), "SER");
    consumer.assert_done();
}

/// Two events become one, on a queue that fails at it.
#[test]
fn an_export_that_fails_is_an_error() {
    if cfg!(miri) {
        return;
    }
    for op in [FaultOp::QueueWait, FaultOp::Record] {
        let sim = Sim::new(SimMode::Deferred);
        let queues = [sim.default_queue(), sim.new_queue().unwrap()];
        let columns = queues.map(|queue| {
            let up = sim.upload_on(&numbers(0, 5), &queue).unwrap();
            up.column(0).unwrap()
        });
        let fields = ["a", "b"].map(|name| Field::new(name, DataType::Int64, true));
        let schema = Arc::new(Schema::new(fields.to_vec()));
        let two = DeviceRecordBatch::try_new(schema, &columns).unwrap();
        drop(columns);
        let (consumer, produce) = on_sim(&sim, vec![two], SyncPolicy::Event);
        sim.faults().fail_nth(op, 1);
        let outcome = block_on(produce);
        assert_eq!(
            sim.faults().fired(),
            1,
            "{op:?}: the test needs another fault"
        );
        assert_eq!(outcome.unwrap_err().errno(), EIO);
        assert_eq!(consumer.story(), "SER");
        let (errno, text, _) = consumer.error();
        assert_eq!(errno, EIO);
        assert!(text.contains("injected"), "{text}");
        consumer.assert_done();
        sim.faults().clear();
        sim.assert_done();
    }
}

// ---- dropping

#[test]
fn a_produce_that_was_never_polled_tells_its_consumer() {
    let consumer = FakeConsumer::requesting(3);
    drop(producing(2, &consumer));
    assert_eq!(consumer.story(), "ER");
    let (errno, text, _) = consumer.error();
    assert_eq!(errno, ECANCELED);
    assert!(!text.is_empty());
    consumer.assert_done();
}

#[test]
fn a_produce_dropped_in_the_middle_tells_its_consumer() {
    let consumer = FakeConsumer::requesting(2);
    let mut produce = producing(5, &consumer);
    assert!(poll(&mut produce).is_pending());
    drop(produce);
    assert_eq!(consumer.story(), "STTER");
    assert_eq!(consumer.error().0, ECANCELED);
    // What went out stays good.
    assert_eq!(number_of(&consumer.extract()), 0);
    consumer.assert_done();
}

#[test]
fn a_produce_dropped_after_its_end_does_nothing() {
    let consumer = FakeConsumer::requesting(2);
    let mut produce = producing(1, &consumer);
    completed(ready(poll(&mut produce)));
    drop(produce);
    assert_eq!(consumer.story(), "ST.R");
    consumer.assert_done();
}

/// A successful cancellation is no error, even if nobody polls any more.
#[test]
fn a_cancelled_produce_that_is_dropped_only_releases() {
    let consumer = FakeConsumer::requesting(1);
    let mut produce = producing(5, &consumer);
    assert!(poll(&mut produce).is_pending());
    consumer.cancel();
    drop(produce);
    assert_eq!(consumer.story(), "STR");
    consumer.assert_done();
}

#[test]
fn a_task_that_is_not_wanted_releases_its_array() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let batches = (0..3).map(|i| sim.upload(&numbers(i, 5)).unwrap());
    let (consumer, produce) = on_sim(&sim, batches.collect(), SyncPolicy::Event);
    completed(block_on(produce));
    for _ in 0..3 {
        assert_eq!(FakeConsumer::refuse(consumer.take()), 0);
    }
    consumer.assert_done();
    sim.assert_done();
}

/// Tasks that nobody extracts: what was not handed over is let go with the last of them, not before.
#[test]
fn arrays_live_until_their_task_is_extracted() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let batches = (0..3).map(|i| sim.upload(&numbers(i * 100, 5)).unwrap());
    let (consumer, produce) = on_sim(&sim, batches.collect(), SyncPolicy::Event);
    completed(block_on(produce));
    sim.synchronize().unwrap();
    assert_eq!(sim.sim.report().live_allocations, 3);
    assert_eq!(number_of(&consumer.extract()), 0);
    consumer.assert_done();
    sim.assert_done();
}
