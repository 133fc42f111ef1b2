//! Streams whose batches move to another device.

use std::sync::atomic::Ordering::SeqCst;
use std::task::Poll;

use arrow_device::async_stream::{DeviceRecordBatchStream, MovingStream};
use arrow_device::device::Backend;
use arrow_device::device::sim::SimMode;
use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch, Devices, Result};

use crate::async_stream::adapters::{given, pair, peer, told};
use crate::async_stream::kit::*;
use crate::simkit::{MODES, Sim};

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

/// Through the host, or directly where one device reaches the other.
#[test]
fn each_byte_moves_once_each_way() {
    for mode in MODES {
        for direct in [false, true] {
            let [a, b] = pair(mode, direct);
            let items = (0..6).map(|i| Ok(up(&a, i))).collect();
            let (stream, asked) = given(numbers(0, 5).schema(), items);
            let before = (a.stats(), b.stats());
            let mut moving = MovingStream::new(stream, &b);
            assert_eq!(moving.schema(), numbers(0, 5).schema());
            assert_eq!(moving.device_type(), ArrowDeviceType::EXT_DEV);
            let mut moved = vec![];
            if direct {
                // These devices cannot wait for each other's events, so that the batch is waited for.
                moved.push(next_of(&mut moving, &a));
                assert_eq!(asked.load(SeqCst), 1, "nothing is gained by more");
            }
            let (others, pauses) = told(moving, mode, &[&a, &b]);
            assert!(pauses > 0 || direct || mode == SimMode::Async);
            moved.extend(others);
            let (on_a, on_b) = (a.stats().since(&before.0), b.stats().since(&before.1));
            let (down, on_device) = if direct { (0, 6) } else { (6, 0) };
            assert_eq!((on_a.copies, on_a.bytes_to_host), (down, down * 40));
            assert_eq!((on_b.copies, on_b.bytes_to_device), (6, down * 64));
            assert_eq!(on_b.bytes_on_device, on_device * 64);
            assert_eq!((on_a.host_waits, on_b.host_waits), (0, 0));
            assert_eq!(on_b.allocations, 6);
            assert_numbers(moved, &b, &[0, 1, 2, 3, 4, 5]);
            b.assert_done();
            a.assert_done();
        }
    }
}

#[test]
fn batches_that_are_there_pass_as_they_are() {
    let b = Sim::new(SimMode::Deferred);
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
    for mode in MODES {
        let (a, b, near) = (Sim::new(mode), peer(mode), peer(mode));
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
    for direct in [false, true] {
        let [from, to] = match direct {
            true => [peer(SimMode::Async), peer(SimMode::Deferred)],
            false => [Sim::new(SimMode::Async), Sim::new(SimMode::Deferred)],
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
