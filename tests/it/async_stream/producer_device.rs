//! The producer and the work of its device.

use std::ptr;
use std::sync::Arc;
use std::task::Poll;

use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_device::async_stream::Outcome;
use arrow_device::device::Backend;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, ExportOptions, ImportOptions,
    SyncPolicy,
};
use arrow_schema::{DataType, Field, Schema};
use futures::stream;
use libc::{ECANCELED, EINVAL, EIO};

use crate::async_stream::kit::*;
use crate::async_stream::producer::{Running, completed};
use crate::simkit::Sim;

/// Batches of a simulated device, and a consumer that knows it.
pub(crate) fn on_sim(
    sim: &Sim,
    batches: Vec<DeviceRecordBatch>,
    sync: SyncPolicy,
) -> (FakeConsumer, Running) {
    let consumer = FakeConsumer::with_options(options_of(sim));
    consumer.on_schema(|this| {
        this.request(100);
        0
    });
    let schema = batches[0].schema();
    let batches = stream::iter(batches.into_iter().map(Ok));
    let batches = DeviceRecordBatches::from_stream(batches, schema, ArrowDeviceType::EXT_DEV);
    let options = ExportOptions::new(sync);
    let produce = Box::pin(produce(batches, consumer.handler(), options));
    (consumer, produce)
}

/// Two columns, each with an event of a queue of its own.
pub(crate) fn two_queues(sim: &Sim) -> DeviceRecordBatch {
    let queues = [sim.default_queue(), sim.new_queue().unwrap()];
    let columns = queues.map(|queue| {
        let up = sim.upload_on(&numbers(0, 5), &queue).unwrap();
        up.column(0).unwrap()
    });
    let fields = ["a", "b"].map(|name| Field::new(name, DataType::Int64, true));
    let schema = Arc::new(Schema::new(fields.to_vec()));
    DeviceRecordBatch::try_new(schema, &columns).unwrap()
}

/// Runs `produce`, whose polls do not wait, and the device between them.
fn told(sim: &Sim, produce: &mut Running) {
    loop {
        let (wakes, waker) = Wakes::new();
        if let Poll::Ready(outcome) = in_poll(|| poll_with(produce, &waker)) {
            return completed(outcome);
        }
        sim.sim.synchronize().unwrap();
        wakes.wait();
    }
}

#[test]
fn with_sync_policy_wait_a_poll_does_not_wait_but_wakes() {
    let sim = Sim::new(SimMode::Deferred);
    let batches = (0..2).map(|i| sim.upload(&numbers(i * 100, 5)).unwrap());
    let (consumer, mut produce) = on_sim(&sim, batches.collect(), SyncPolicy::Wait);
    let before = sim.stats();
    let (wakes, waker) = Wakes::new();
    assert!(poll_with(&mut produce, &waker).is_pending());
    std::thread::sleep(SHORT);
    assert_eq!((wakes.count(), consumer.story().as_str()), (0, "S"));
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    sim.synchronize().unwrap();
    wakes.wait();
    completed(ready(poll(&mut produce)));
    assert_eq!(sim.stats().since(&before).host_waits, 1, "the test's own");
    for i in 0..2 {
        let (code, array) = FakeConsumer::extract_raw(consumer.take());
        assert!(code == 0 && array.sync_event().is_null(), "{i}");
    }
    drop(produce);
    consumer.assert_done();
    sim.assert_done();
}

#[test]
fn with_sync_policy_event_nothing_waits() {
    let sim = Sim::new(SimMode::Deferred);
    let batches = (0..2).map(|i| sim.upload(&numbers(i * 100, 5)).unwrap());
    let (consumer, mut produce) = on_sim(&sim, batches.collect(), SyncPolicy::Event);
    let before = sim.stats();
    completed(ready(poll(&mut produce)));
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    drop(produce);
    let back = consumer.extract();
    assert!(!back.is_ready().unwrap());
    assert_eq!(number_of(&back), 0);
    drop(back);
    consumer.assert_done();
    sim.assert_done();
}

#[test]
fn cancel_and_drop_while_a_batch_is_not_ready() {
    for cancel in [true, false] {
        let sim = Sim::new(SimMode::Deferred);
        let up = vec![sim.upload(&numbers(0, 5)).unwrap()];
        let (consumer, mut produce) = on_sim(&sim, up, SyncPolicy::Wait);
        assert!(poll(&mut produce).is_pending());
        if cancel {
            consumer.cancel();
            let outcome = ready(poll(&mut produce));
            assert!(matches!(outcome, Ok(Outcome::Cancelled)), "{outcome:?}");
        }
        drop(produce);
        assert_eq!(consumer.story(), if cancel { "SR" } else { "SER" });
        consumer.assert_done();
        sim.assert_done();
    }
}

#[test]
fn a_device_that_fails_while_a_batch_is_awaited_is_an_error() {
    let sim = Sim::new(SimMode::Async);
    let gate = Gate::default();
    let pass = gate.clone();
    let queue = sim.default_queue();
    crate::simkit::launch(&queue, move |_| {
        pass.pass();
        Err("the kernel failed".into())
    })
    .unwrap();
    let up = vec![sim.upload(&numbers(0, 5)).unwrap()];
    let (consumer, mut produce) = on_sim(&sim, up, SyncPolicy::Wait);
    assert!(poll(&mut produce).is_pending());
    gate.open();
    let outcome = block_on(produce);
    assert_eq!(outcome.unwrap_err().errno(), EIO);
    assert_eq!(consumer.story(), "SER");
    consumer.assert_done();
}

/// The tests below would see a poll that waits.
#[test]
fn the_kernels_see_waits() {
    let sim = Sim::new(SimMode::Deferred);
    let up = sim.upload(&numbers(0, 5)).unwrap();
    forbid_waits(&sim);
    assert!(in_poll(|| up.to_host()).is_err());
}

/// Columns of two queues: both are waited for.
#[test]
fn with_sync_policy_wait_all_queues_are_waited_for() {
    let sim = Sim::new(SimMode::Deferred);
    forbid_waits(&sim);
    let two = two_queues(&sim);
    let ready_there = two.column(1).unwrap();
    let (consumer, mut produce) = on_sim(&sim, vec![two], SyncPolicy::Wait);
    let (wakes, waker) = Wakes::new();
    assert!(in_poll(|| poll_with(&mut produce, &waker)).is_pending());
    // One of the two.
    ready_there.wait().unwrap();
    assert!(in_poll(|| poll_with(&mut produce, &waker)).is_pending());
    assert_eq!(consumer.story(), "S");
    sim.sim.synchronize().unwrap();
    wakes.wait();
    completed(in_poll(|| block_on(&mut produce)));
    drop((produce, ready_there));
    consumer.assert_done();
    sim.assert_done();
}

/// Nulls that nobody has counted are counted on the way out; nobody waits for the masks within a poll.
#[test]
fn nulls_are_counted_without_a_wait() {
    let sim = Sim::new(SimMode::Deferred);
    forbid_waits(&sim);
    let values: ArrayRef = Arc::new(Int64Array::from_iter(
        (0..40).map(|i| (i % 3 > 0).then_some(i)),
    ));
    let host = RecordBatch::try_from_iter([("i", values)]).unwrap();
    let up = sim.upload(&host).unwrap();
    let unknown = ExportOptions {
        counts_nulls: false,
        ..ExportOptions::new(SyncPolicy::Event)
    };
    let array = up.slice(3, 30).unwrap().export_array(&unknown).unwrap();
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type
    // is the exported one.
    let cut = unsafe { DeviceRecordBatch::import_as(array, up.schema(), &options_of(&sim)) };
    let cut = cut.unwrap();
    assert_eq!(
        cut.column(0).unwrap().null_count(),
        None,
        "the test needs another batch"
    );
    drop(up);
    let (consumer, mut produce) = on_sim(&sim, vec![cut], SyncPolicy::Event);
    told(&sim, &mut produce);
    let back = consumer.extract();
    assert_eq!(back.column(0).unwrap().null_count(), Some(10));
    assert_eq!(back.to_host().unwrap(), host.slice(3, 30));
    drop((back, produce));
    consumer.assert_done();
    sim.assert_done();
}

/// Bitmaps that start within a byte are moved on the way out; nobody waits for them within a poll.
#[test]
fn bitmaps_are_moved_without_a_wait() {
    for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
        let sim = Sim::new(SimMode::Deferred);
        forbid_waits(&sim);
        let input: Int64Array = (0..60).map(|i| (i % 3 > 0).then_some(i)).collect();
        let up = sim.upload_array(&input).unwrap();
        // Two that are moved, and one whose nulls are only counted.
        let columns = [3, 13, 16].map(|offset| {
            let values = sim.upload_array(&Int64Array::from(vec![7; 40])).unwrap();
            let input = up.slice(offset, 40).unwrap();
            input
                .with_values(DataType::Int64, values.buffer(1).unwrap())
                .unwrap()
        });
        let fields = ["a", "b", "c"].map(|name| Field::new(name, DataType::Int64, true));
        let schema = Arc::new(Schema::new(fields.to_vec()));
        let batch = DeviceRecordBatch::try_new(schema, &columns).unwrap();
        drop((up, columns));
        let (consumer, mut produce) = on_sim(&sim, vec![batch], sync);
        told(&sim, &mut produce);
        let back = consumer.extract();
        let down = back.to_host().unwrap();
        for (column, (down, offset)) in back.columns().zip(down.columns().iter().zip([3, 13, 16])) {
            let nulls = input.slice(offset, 40).nulls().cloned().unwrap();
            assert_eq!(column.null_count(), Some(nulls.null_count()));
            let expected = Int64Array::new(vec![7; 40].into(), Some(nulls));
            assert_eq!(down.as_ref(), &expected as &dyn Array);
        }
        drop((back, down, produce));
        consumer.assert_done();
        sim.assert_done();
    }
}

/// A consumer that checks all values waits for them, but not within a poll.
#[test]
fn full_validation_waits_for_the_batch_outside_the_poll() {
    use arrow_device::Validation;
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "bc", ""]));
    let texts = RecordBatch::try_from_iter([("s", texts)]).unwrap();
    // Of numbers without nulls nothing is read. Of texts their size and then their values are.
    for (sent, waits) in [(numbers(400, 5), 1), (texts, 3)] {
        let sim = Sim::new(SimMode::Deferred);
        forbid_waits(&sim);
        let options = ImportOptions {
            validation: Validation::Full,
            ..options_of(&sim)
        };
        let (producer, opening) = FakeProducer::open_with(2, ArrowDeviceType::EXT_DEV, options);
        producer.schema_of(sent.schema().as_ref());
        let mut stream = block_on(opening).unwrap();
        producer.task(&sim.upload(&sent).unwrap());
        producer.end();
        producer.release();
        let before = sim.stats();
        let mut waited = 0;
        let item = loop {
            let (wakes, waker) = Wakes::new();
            let item = in_poll(|| poll_next_with(&mut stream, &waker));
            if let Poll::Ready(item) = item {
                break item;
            }
            waited += 1;
            std::thread::sleep(SHORT);
            assert_eq!(wakes.count(), 0);
            sim.sim.synchronize().unwrap();
            wakes.wait();
        };
        assert_eq!(waited, waits);
        assert_eq!(sim.stats().since(&before).host_waits, 0);
        let back = item.unwrap().unwrap();
        assert_eq!(back.to_host().unwrap(), sent);
        assert!(next(&mut stream).is_none());
        drop((back, stream));
        producer.assert_balanced();
        sim.assert_done();
    }
}

/// A stream that is dropped while its batch is awaited.
#[test]
fn a_stream_dropped_while_a_batch_is_checked_leaves_nothing() {
    use arrow_device::Validation;
    let sim = Sim::new(SimMode::Deferred);
    let options = ImportOptions {
        validation: Validation::Full,
        ..options_of(&sim)
    };
    let (producer, opening) = FakeProducer::open_with(2, ArrowDeviceType::EXT_DEV, options);
    producer.schema();
    let mut stream = block_on(opening).unwrap();
    (0..2).for_each(|i| assert_eq!(producer.task(&sim.upload(&numbers(i, 5)).unwrap()), 0));
    assert!(poll_next(&mut stream).is_pending());
    drop(stream);
    assert_eq!(producer.cancels(), 1);
    producer.release();
    producer.assert_balanced();
    sim.assert_done();
}

/// Two events become one, on a queue that fails at it.
#[test]
fn an_export_that_fails_is_an_error() {
    for op in [FaultOp::QueueWait, FaultOp::Record] {
        let sim = Sim::new(SimMode::Deferred);
        let two = two_queues(&sim);
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

/// Some consumers (SedonaDB) set the callback to null before they call it, so that they do not call it again.
#[test]
fn a_task_whose_callback_was_taken_out_is_extracted_once() {
    let sim = Sim::new(SimMode::Async);
    let batch = sim.upload(&numbers(0, 5)).unwrap();
    let (consumer, produce) = on_sim(&sim, vec![batch], SyncPolicy::Event);
    completed(block_on(produce));
    let mut task = consumer.take();
    let extract = task.extract_data.take().unwrap();
    assert_eq!(sim.sim.report().live_allocations, 1);
    for answer in [0, EINVAL] {
        // SAFETY: the task is the producer's; a second call through the same struct finds it empty.
        let code = unsafe { extract(&raw mut task, ptr::null_mut()) };
        assert_eq!(code, answer);
    }
    consumer.assert_done();
    sim.assert_done();
}

/// The consumer takes a task and refuses it. If it extracts it all the same, it is too late.
#[test]
fn a_refused_task_leaves_no_batch_behind() {
    for refuses_again in [true, false] {
        let sim = Sim::new(SimMode::Async);
        let batches = (0..3).map(|i| sim.upload(&numbers(i * 100, 5)).unwrap());
        let (consumer, produce) = on_sim(&sim, batches.collect(), SyncPolicy::Event);
        consumer.on_task(|_| EINVAL);
        assert!(matches!(
            block_on(produce),
            Ok(Outcome::Refused { errno: EINVAL })
        ));
        assert_eq!(consumer.story(), "STR");
        let task = consumer.take();
        sim.synchronize().unwrap();
        assert_eq!(sim.sim.report().live_allocations, 0);
        if refuses_again {
            assert_eq!(FakeConsumer::refuse(task), 0);
        } else {
            let (code, array) = FakeConsumer::extract_raw(task);
            assert!(code == ECANCELED && array.is_released());
        }
        consumer.assert_done();
        sim.assert_done();
    }
}

/// What is not handed over is let go with the last task, and not before; what nobody wants is let go, too.
#[test]
fn arrays_live_until_their_task_is_extracted() {
    let sim = Sim::new(SimMode::Async);
    let batches = (0..3).map(|i| sim.upload(&numbers(i * 100, 5)).unwrap());
    let (consumer, produce) = on_sim(&sim, batches.collect(), SyncPolicy::Event);
    completed(block_on(produce));
    sim.synchronize().unwrap();
    assert_eq!(sim.sim.report().live_allocations, 3);
    assert_eq!(number_of(&consumer.extract()), 0);
    assert_eq!(FakeConsumer::refuse(consumer.take()), 0);
    consumer.assert_done();
    sim.assert_done();
}
