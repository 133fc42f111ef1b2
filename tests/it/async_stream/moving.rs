//! Streams whose batches move to another device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Poll;

use arrow_array::RecordBatch;
use arrow_device::async_stream::{
    DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, MovingStream,
};
use arrow_device::device::Backend;
use arrow_device::device::sim::{FaultOp, SimConfig, SimMode};
use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch, Devices, Error, Result};
use arrow_schema::{DataType, SchemaRef};
use futures::stream;

use crate::async_stream::adapters::forgotten;
use crate::async_stream::kit::*;
use crate::simkit::{MODES, Sim};
use crate::support::{Nulls, all_types, assert_same_batch};

fn sim(mode: SimMode) -> Sim {
    Sim::new(mode)
}

/// A device that copies from others directly.
fn peer(mode: SimMode) -> Sim {
    Sim::with(SimConfig::default().with_mode(mode).with_peer_access(true))
}

/// A stream of these items, and how often it was asked.
fn given(
    schema: SchemaRef,
    items: Vec<Result<DeviceRecordBatch>>,
) -> (
    impl DeviceRecordBatchStream<Batch = DeviceRecordBatch> + Unpin + Send + 'static,
    Arc<AtomicUsize>,
) {
    let asked = Arc::new(AtomicUsize::new(0));
    let (count, mut items) = (asked.clone(), items.into_iter());
    let items = stream::poll_fn(move |_| {
        count.fetch_add(1, SeqCst);
        Poll::Ready(items.next())
    });
    let device_type = ArrowDeviceType::EXT_DEV;
    let stream = DeviceRecordBatchStreamAdapter::new(schema, device_type, items);
    (stream, asked)
}

/// What comes, and how often the devices had to be told to run. Polls do not wait, nor run the devices' work.
#[track_caller]
fn told<S: DeviceRecordBatchStream>(
    stream: MovingStream<S>,
    mode: SimMode,
    sims: &[&Sim],
) -> (Vec<Result<DeviceRecordBatch>>, usize) {
    let state = |sim: &&Sim| (sim.stats().host_waits, sim.sim.report().pending_operations);
    let deferred = mode == SimMode::Deferred;
    let (mut items, mut pauses) = (Vec::new(), 0);
    let mut stream = Box::pin(stream);
    loop {
        let before: Vec<_> = sims.iter().map(state).collect();
        let (wakes, waker) = Wakes::new();
        let polled = poll_next_with(&mut stream, &waker);
        for (before, after) in before.iter().zip(sims.iter().map(state)) {
            assert_eq!(before.0, after.0, "a host wait within a poll");
            assert!(!deferred || after.1 >= before.1, "work ran within a poll");
        }
        match polled {
            Poll::Ready(None) => return (items, pauses),
            Poll::Ready(Some(item)) => items.push(item),
            Poll::Pending => {
                pauses += 1;
                assert!(pauses < 1000, "gets nowhere");
                sims.iter().for_each(|sim| _ = sim.sim.synchronize());
                wakes.wait();
            }
        }
    }
}

/// The next batch, for which `sim` is told to run.
fn next_of<S: DeviceRecordBatchStream>(
    stream: &mut MovingStream<S>,
    sim: &Sim,
) -> Result<DeviceRecordBatch> {
    loop {
        let (wakes, waker) = Wakes::new();
        match poll_next_with(stream, &waker) {
            Poll::Ready(batch) => return batch.unwrap(),
            Poll::Pending => {
                sim.sim.synchronize().unwrap();
                wakes.wait();
            }
        }
    }
}

fn up(device: &Device, i: i64) -> DeviceRecordBatch {
    device.upload(&numbers(i * 100, 5)).unwrap()
}

#[track_caller]
fn assert_numbers(moved: Vec<Result<DeviceRecordBatch>>, to: &Device, expected: &[i64]) {
    let found: Vec<_> = moved
        .into_iter()
        .map(|batch| {
            let batch = batch.unwrap();
            assert_eq!(batch.device(), to);
            number_of(&batch)
        })
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn through_the_host_each_byte_moves_once_each_way() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let (a, b) = (sim(mode), sim(mode));
        let items = (0..6).map(|i| Ok(up(&a, i))).collect();
        let (stream, _) = given(numbers(0, 5).schema(), items);
        let before = (a.stats(), b.stats());
        let moving = MovingStream::new(stream, &b);
        assert_eq!(moving.schema(), numbers(0, 5).schema());
        assert_eq!(moving.device_type(), ArrowDeviceType::EXT_DEV);
        let (moved, pauses) = told(moving, mode, &[&a, &b]);
        assert!(pauses > 0 || mode == SimMode::Async);
        let (on_a, on_b) = (a.stats().since(&before.0), b.stats().since(&before.1));
        assert_eq!((on_a.copies, on_a.bytes_to_host), (6, 6 * 40));
        assert_eq!((on_b.copies, on_b.bytes_to_device), (6, 6 * 64));
        assert_eq!((on_a.host_waits, on_b.host_waits), (0, 0));
        assert_eq!(on_b.allocations, 6);
        assert_numbers(moved, &b, &[0, 1, 2, 3, 4, 5]);
        b.assert_done();
        a.assert_done();
    }
}

#[test]
fn a_device_that_reaches_the_other_copies_directly() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let (a, b) = (peer(mode), peer(mode));
        let items = (0..6).map(|i| Ok(up(&a, i))).collect();
        let (stream, asked) = given(numbers(0, 5).schema(), items);
        let before = (a.stats(), b.stats());
        let mut moving = MovingStream::new(stream, &b);
        // These devices cannot wait for each other's events, so that the batch is waited for.
        let first = next_of(&mut moving, &a);
        assert_eq!(asked.load(SeqCst), 1, "nothing is gained by more");
        let (mut moved, _) = told(moving, mode, &[&a, &b]);
        moved.insert(0, first);
        let (on_a, on_b) = (a.stats().since(&before.0), b.stats().since(&before.1));
        assert_eq!((on_a.copies, on_a.bytes_to_host), (0, 0));
        assert_eq!((on_b.copies, on_b.bytes_to_device), (6, 0));
        assert_eq!(on_b.bytes_on_device, 6 * 64);
        assert_eq!((on_a.host_waits, on_b.host_waits), (0, 0));
        assert_numbers(moved, &b, &[0, 1, 2, 3, 4, 5]);
        b.assert_done();
        a.assert_done();
    }
}

/// Text, nested types, dictionaries: what only the device knows is read without a wait, and what the host has to rewrite goes
/// through it.
#[test]
fn every_type_moves_without_a_wait() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        for (name, data_type) in all_types() {
            for direct in [false, true] {
                let [a, b] = match direct {
                    true => [peer(mode), peer(mode)],
                    false => [sim(mode), sim(mode)],
                };
                let types = [data_type.clone(), DataType::Int32];
                let whole = crate::support::batch(&types, 40, Nulls::Some, 5);
                let slices = [(0, 40), (3, 5), (0, 0), (7, 11), (8, 16), (39, 1)];
                let sent = slices.map(|(first, rows)| whole.slice(first, rows));
                let on_a = forgotten(&a.upload(&whole).unwrap(), &options_of(&a));
                let mut items: Vec<_> = slices
                    .iter()
                    .map(|(first, rows)| on_a.slice(*first, *rows))
                    .collect();
                // Sliced where it is, or before.
                items.push(Ok(forgotten(&a.upload(&sent[1]).unwrap(), &options_of(&a))));
                let (stream, _) = given(whole.schema(), items);
                drop(on_a);
                let (moved, _) = told(MovingStream::new(stream, &b), mode, &[&a, &b]);
                assert_eq!(moved.len(), sent.len() + 1, "{name}, {mode:?}");
                for (sent, moved) in sent.iter().chain([&sent[1]]).zip(moved) {
                    let moved = moved.unwrap();
                    assert_eq!(moved.device(), &b.device);
                    assert_same_batch(sent, &moved.to_host().unwrap(), &name);
                }
                b.assert_done();
                a.assert_done();
            }
        }
    }
}

/// Whole columns of text need one read of their sizes, and none of it goes through the host.
#[test]
fn sizes_are_read_before_a_direct_copy() {
    if cfg!(miri) {
        return;
    }
    let mode = SimMode::Deferred;
    let (a, b) = (peer(mode), peer(mode));
    let whole = crate::support::batch(&[DataType::Utf8, DataType::Utf8], 64, Nulls::None, 5);
    let on_a = forgotten(&a.upload(&whole).unwrap(), &options_of(&a));
    let (stream, _) = given(whole.schema(), vec![Ok(on_a)]);
    let before = (a.stats(), b.stats());
    let (moved, pauses) = told(MovingStream::new(stream, &b), mode, &[&a, &b]);
    let (on_a, on_b) = (a.stats().since(&before.0), b.stats().since(&before.1));
    assert_eq!((pauses, on_a.bytes_to_host), (1, 2 * 4), "two last offsets");
    assert_eq!((on_b.bytes_to_device, on_b.bytes_to_host), (0, 0));
    assert_eq!((on_a.host_waits, on_b.host_waits), (0, 0));
    let back = moved.into_iter().next().unwrap().unwrap();
    assert_same_batch(&whole, &back.to_host().unwrap(), "text");
    drop(back);
    b.assert_done();
    a.assert_done();
}

#[test]
fn batches_that_are_there_pass_as_they_are() {
    if cfg!(miri) {
        return;
    }
    let b = sim(SimMode::Deferred);
    let batches: Vec<_> = (0..100).map(|i| up(&b, i)).collect();
    let (stream, asked) = given(
        numbers(0, 5).schema(),
        batches.iter().cloned().map(Ok).collect(),
    );
    let before = b.stats();
    let mut moving = MovingStream::new(stream, &b);
    for (i, batch) in batches.iter().enumerate() {
        // However many are still being uploaded.
        let passed = ready(poll_next(&mut moving)).unwrap().unwrap();
        let address = |batch: &DeviceRecordBatch| {
            let column = batch.column(0).unwrap();
            column.buffer(1).unwrap().address().address()
        };
        assert_eq!(address(&passed), address(batch));
        assert_eq!(asked.load(SeqCst), i + 1);
    }
    assert!(ready(poll_next(&mut moving)).is_none());
    let cost = b.stats().since(&before);
    assert_eq!((cost.copies, cost.events, cost.queue_waits), (0, 0, 0));
    drop((moving, batches));
    b.assert_done();
}

/// Of several devices, the host among them.
#[test]
fn batches_of_several_devices_keep_their_order() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let (a, b, near) = (sim(mode), peer(mode), peer(mode));
        let cpu = Devices::cpu();
        let from: [&Device; 7] = [&a, &b, &cpu, &near, &near, &a, &b];
        let items = from.iter().zip(0..).map(|(from, i)| Ok(up(from, i)));
        let (stream, _) = given(numbers(0, 5).schema(), items.collect());
        let (moved, _) = told(MovingStream::new(stream, &b), mode, &[&a, &b, &near]);
        assert_numbers(moved, &b, &[0, 1, 2, 3, 4, 5, 6]);
        for sim in [&b, &a, &near] {
            sim.assert_done();
        }
        // The CPU takes what the others have.
        let items = from.iter().zip(0..).map(|(from, i)| Ok(up(from, i)));
        let (stream, _) = given(numbers(0, 5).schema(), items.collect());
        let (moved, _) = told(MovingStream::new(stream, &cpu), mode, &[&a, &b, &near]);
        assert_numbers(moved, &cpu, &[0, 1, 2, 3, 4, 5, 6]);
        for sim in [&b, &a, &near] {
            sim.assert_done();
        }
    }
}

/// A source that is faster than its device: the task waits, no thread does, and the memory is bounded.
#[test]
fn moves_ahead_are_bounded() {
    if cfg!(miri) {
        return;
    }
    for direct in [false, true] {
        let [from, to] = match direct {
            true => [peer(SimMode::Async), peer(SimMode::Deferred)],
            false => [sim(SimMode::Async), sim(SimMode::Deferred)],
        };
        let items: Vec<_> = (0..200).map(|i| Ok(up(&from, i))).collect();
        from.synchronize().unwrap();
        let (stream, _) = given(numbers(0, 5).schema(), items);
        let mut moving = MovingStream::new(stream, &to);
        let mut moved: Vec<DeviceRecordBatch> = Vec::new();
        let mut most = 0;
        while moved.len() < 200 {
            let (wakes, waker) = Wakes::new();
            let under_way = moved.iter().filter(|batch| !batch.is_ready().unwrap());
            let under_way = under_way.count();
            most = most.max(under_way);
            match poll_next_with(&mut moving, &waker) {
                Poll::Ready(batch) => moved.push(batch.unwrap().unwrap()),
                Poll::Pending => {
                    if under_way == 64 {
                        to.sim.synchronize().unwrap();
                    }
                    wakes.wait();
                }
            }
        }
        assert_eq!(most, 64, "direct: {direct}");
        assert_eq!(to.stats().host_waits, 0);
        let moved = moved.into_iter().map(Ok).collect();
        assert_numbers(moved, &to, &(0..200).collect::<Vec<_>>());
        drop(moving);
        to.assert_done();
        from.assert_done();
    }
}

#[test]
fn errors_keep_their_place_and_are_the_end() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let (a, b) = (sim(mode), sim(mode));
        let error = Err(Error::InvalidArgument("line 7".into()));
        let items = vec![Ok(up(&a, 0)), Ok(up(&a, 1)), error, Ok(up(&a, 2))];
        let (stream, asked) = given(numbers(0, 5).schema(), items);
        let (mut moved, _) = told(MovingStream::new(stream, &b), mode, &[&a, &b]);
        let e = moved.pop().unwrap().unwrap_err();
        assert!(e.to_string().contains("line 7"), "{e}");
        assert_eq!(asked.load(SeqCst), 3);
        assert_numbers(moved, &b, &[0, 1]);
        b.assert_done();
        a.assert_done();
    }
}

#[test]
fn failures_of_both_sides_are_errors_and_the_end() {
    if cfg!(miri) {
        return;
    }
    let mode = SimMode::Deferred;
    for direct in [false, true] {
        for op in [
            FaultOp::Copy,
            FaultOp::Record,
            FaultOp::NewQueue,
            FaultOp::Allocate,
        ] {
            for far in [false, true] {
                let [a, b] = match direct {
                    true => [peer(mode), peer(mode)],
                    false => [sim(mode), sim(mode)],
                };
                let items = (0..4).map(|i| Ok(up(&a, i))).collect();
                let (stream, asked) = given(numbers(0, 5).schema(), items);
                let failing = if far { &a } else { &b };
                failing.faults().fail_nth(op, 1);
                let (moved, _) = told(MovingStream::new(stream, &b), mode, &[&a, &b]);
                if failing.faults().fired() == 0 {
                    // The source of a direct copy does little itself.
                    assert!(far, "{op:?}");
                    assert_numbers(moved, &b, &[0, 1, 2, 3]);
                } else {
                    assert_eq!(moved.len(), 1, "{op:?}, direct: {direct}, far: {far}");
                    assert!(moved[0].is_err() && asked.load(SeqCst) <= 2);
                    drop(moved);
                }
                failing.faults().clear();
                b.assert_done();
                a.assert_done();
            }
        }
    }
}

#[test]
fn a_stream_dropped_in_the_middle_leaves_nothing() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        for direct in [false, true] {
            for polls in 0..5 {
                let [a, b] = match direct {
                    true => [peer(mode), peer(mode)],
                    false => [sim(mode), sim(mode)],
                };
                let items = (0..5).map(|i| Ok(up(&a, i))).collect();
                let (stream, _) = given(numbers(0, 5).schema(), items);
                let mut moving = MovingStream::new_on(stream, b.default_queue());
                for _ in 0..polls {
                    drop(poll_next(&mut moving));
                    let _ = a.sim.synchronize();
                }
                drop(moving);
                b.assert_done();
                a.assert_done();
            }
        }
    }
}

/// What a blocking move makes, and the same bytes.
#[test]
fn the_same_as_to_device() {
    if cfg!(miri) {
        return;
    }
    let mode = SimMode::Async;
    let (a, b) = (peer(mode), peer(mode));
    let batch: RecordBatch =
        crate::support::batch(&[DataType::Utf8, DataType::Boolean], 37, Nulls::Some, 9);
    let on_a = a.upload(&batch).unwrap();
    let before = b.stats();
    let there = on_a.to_device(&b).unwrap();
    let blocking = b.stats().since(&before);
    let (stream, _) = given(batch.schema(), vec![Ok(on_a)]);
    let before = b.stats();
    let (moved, _) = told(MovingStream::new(stream, &b), mode, &[&a, &b]);
    let cost = b.stats().since(&before);
    assert_eq!(
        (cost.copies, cost.bytes_on_device, cost.allocated_bytes),
        (
            blocking.copies,
            blocking.bytes_on_device,
            blocking.allocated_bytes
        )
    );
    for batch in moved {
        let host = batch.unwrap().to_host().unwrap();
        assert_eq!(host, there.to_host().unwrap());
    }
}
