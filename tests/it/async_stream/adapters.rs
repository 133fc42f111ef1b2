//! What brings batches up and down without waiting in a poll.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Poll;

use arrow_array::nonblocking::RecordBatchStream;
use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch};
use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::device::Backend;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, Devices, Error, ImportOptions, Result,
    SyncPolicy, upload_stream,
};
use arrow_schema::{ArrowError, DataType, SchemaRef};
use futures::{Stream, StreamExt, stream};

use crate::async_stream::kit::*;
use crate::async_stream::producer::adapted;
use crate::async_stream::readers::counting;
use crate::simkit::{MODES, Sim, launch};
use crate::support::{Nulls, all_types, assert_same_batch};

/// A stream of these items, and how often it was asked.
pub(crate) fn given(
    schema: SchemaRef,
    items: Vec<Result<DeviceRecordBatch>>,
) -> (
    impl DeviceRecordBatchStream + Unpin + Send + 'static,
    Arc<AtomicUsize>,
) {
    let asked = Arc::new(AtomicUsize::new(0));
    let (count, mut items) = (asked.clone(), items.into_iter());
    let items = stream::poll_fn(move |_| {
        count.fetch_add(1, SeqCst);
        Poll::Ready(items.next())
    });
    let device_type = ArrowDeviceType::EXT_DEV;
    let stream = DeviceRecordBatches::from_stream(items, schema, device_type);
    (stream, asked)
}

/// What comes, and how often the devices had to be told to run. Polls do not wait, nor run the devices' work.
#[track_caller]
pub(crate) fn told<S: Stream>(stream: S, mode: SimMode, sims: &[&Sim]) -> (Vec<S::Item>, usize) {
    let state = |sim: &&Sim| (sim.stats().host_waits, sim.sim.report().pending_operations);
    let (mut items, mut pauses) = (Vec::new(), 0);
    let mut stream = Box::pin(stream);
    loop {
        let before: Vec<_> = sims.iter().map(state).collect();
        let (wakes, waker) = Wakes::new();
        let polled = poll_next_with(&mut stream, &waker);
        for (sim, before) in sims.iter().zip(before) {
            let after = state(sim);
            assert_eq!(before.0, after.0, "a host wait within a poll");
            let deferred = mode == SimMode::Deferred;
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

/// Out and in again: what only the device knows is unknown.
pub(crate) fn forgotten(batch: &DeviceRecordBatch, options: &ImportOptions) -> DeviceRecordBatch {
    let (array, schema) = batch.export(SyncPolicy::Event).unwrap();
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type
    // is the exported one.
    unsafe { DeviceRecordBatch::import(array, &schema, options) }.unwrap()
}

// ---- Every stream that brings batches somewhere

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Up,
    Down,
}

const WAYS: [Way; 2] = [Way::Up, Way::Down];

/// A batch of the host, and which of its rows.
type Part = (RecordBatch, usize, usize);
type Brought = Pin<Box<dyn Stream<Item = Result<DeviceRecordBatch>> + Send>>;

impl Way {
    /// Brings parts, cut where they are. What comes to the host is on the CPU.
    fn bring(self, [from, to]: &[Sim; 2], parts: Vec<Result<Part>>) -> (Brought, Arc<AtomicUsize>) {
        let schema = parts.iter().flatten().next().unwrap().0.schema();
        if self == Self::Up {
            let asked = Arc::new(AtomicUsize::new(0));
            let count = asked.clone();
            let items = parts.into_iter().map(move |part| {
                count.fetch_add(1, SeqCst);
                part.map(|(batch, at, rows)| batch.slice(at, rows))
                    .map_err(ArrowError::from)
            });
            let up = upload_stream(stream::iter(items), schema, to.default_queue());
            return (Box::pin(up), asked);
        }
        let items = parts.into_iter().map(|part| {
            let (batch, at, rows) = part?;
            forgotten(&from.upload(&batch)?, &options_of(from)).slice(at, rows)
        });
        let (items, asked) = given(schema, items.collect());
        let down = |batch: std::result::Result<RecordBatch, ArrowError>| {
            let batch = batch?;
            batch
                .columns()
                .iter()
                .for_each(|column| column.to_data().validate_full().unwrap());
            Devices::cpu().upload(&batch)
        };
        (
            Box::pin(items.into_host_stream().with_prefetch(3).map(down)),
            asked,
        )
    }
}

fn whole(batch: RecordBatch) -> Result<Part> {
    let rows = batch.num_rows();
    Ok((batch, 0, rows))
}

/// Text, nested types, dictionaries: what only the device knows is read without a wait.
#[test]
fn every_type_comes_without_a_wait() {
    for (name, data_type) in all_types() {
        let types = [data_type, DataType::Int32];
        for way in WAYS {
            let rows = 40;
            let all = crate::support::batch(&types, rows, Nulls::Some, 5);
            let cuts = [
                (0, rows),
                (3, rows - 10),
                (0, 0),
                (7, 11),
                (8, 16),
                (rows - 1, 1),
            ];
            let parts = || {
                let parts = cuts.map(|(at, n)| Ok((all.clone(), at, n)));
                // One that was cut before.
                parts.into_iter().chain([whole(all.slice(3, 5))])
            };
            for mode in MODES {
                let context = format!("{name}, {way:?}, {mode:?}");
                let devices = [Sim::new(mode), Sim::new(mode)];
                let [from, to] = &devices;
                let (brought, _) = way.bring(&devices, parts().collect());
                let (found, pauses) = told(brought, mode, &[from, to]);
                assert_eq!(found.len(), 7, "{context}");
                let must_be_told = mode == SimMode::Deferred && way != Way::Up;
                assert!(
                    pauses > 0 || !must_be_told,
                    "{context}: nobody told the device"
                );
                for (part, found) in parts().zip(found) {
                    let ((batch, at, n), found) = (part.unwrap(), found.unwrap());
                    let there = found.device() == &to.device;
                    assert_eq!(there, way == Way::Up);
                    assert_same_batch(&batch.slice(at, n), &found.to_host().unwrap(), &context);
                }
                to.assert_done();
                from.assert_done();
            }
        }
    }
}

/// An error comes after the batches before it, and is the end, whatever the stream would still give.
#[test]
fn errors_keep_their_place_and_are_the_end() {
    let good = |i: i64| whole(numbers(i * 100, 5));
    let other = || whole(numbers(0, 5).project(&[]).unwrap());
    let line = || Err(ArrowError::ParseError("line 7".into()).into());
    for (way, mode) in WAYS
        .into_iter()
        .flat_map(|way| MODES.map(|mode| (way, mode)))
    {
        let devices = [Sim::new(mode), Sim::new(mode)];
        for (bad, text) in [(line(), "line 7"), (other(), "0 columns")] {
            if text == "0 columns" && way != Way::Down {
                continue;
            }
            let (brought, asked) = way.bring(&devices, vec![good(0), good(1), bad, good(2)]);
            let (mut found, _) = told(brought, mode, &[&devices[0], &devices[1]]);
            assert_eq!(found.len(), 3, "{way:?}, {mode:?}");
            let e = found.pop().unwrap().unwrap_err();
            assert!(e.to_string().contains(text), "{e}");
            assert!(asked.load(SeqCst) <= 4);
            for (i, found) in found.into_iter().enumerate() {
                assert_eq!(number_of(&found.unwrap()), i as i64);
            }
        }
        devices.iter().rev().for_each(Sim::assert_done);
    }
}

#[test]
fn failures_of_both_sides_are_errors_and_the_end() {
    let mut fired = 0;
    for way in WAYS {
        for op in [
            FaultOp::Copy,
            FaultOp::Record,
            FaultOp::NewQueue,
            FaultOp::Allocate,
        ] {
            for side in [0, 1] {
                let devices = [Sim::new(SimMode::Deferred), Sim::new(SimMode::Deferred)];
                let parts = (0..4).map(|i| whole(numbers(i * 100, 5))).collect();
                let (brought, asked) = way.bring(&devices, parts);
                let failing = &devices[side];
                failing.faults().fail_nth(op, 1);
                let (found, _) = told(brought, SimMode::Deferred, &[&devices[0], &devices[1]]);
                let context = format!("{op:?}, {way:?}, side {side}");
                if failing.faults().fired() == 0 {
                    assert!(
                        found.iter().all(Result::is_ok) && found.len() == 4,
                        "{context}"
                    );
                    drop(found);
                } else {
                    fired += 1;
                    assert_eq!(found.len(), 1, "{context}");
                    let e = found.into_iter().next().unwrap().unwrap_err();
                    assert!(
                        matches!(e, Error::Device { .. } | Error::OutOfMemory { .. }),
                        "{context}: {e:?}"
                    );
                    assert!(asked.load(SeqCst) <= 4, "{context}");
                }
                failing.faults().clear();
                devices.iter().rev().for_each(Sim::assert_done);
            }
        }
    }
    assert!(fired > 5, "{fired}");
}

#[test]
fn a_stream_dropped_in_the_middle_leaves_nothing() {
    for (way, mode) in WAYS
        .into_iter()
        .flat_map(|way| MODES.map(|mode| (way, mode)))
    {
        for polls in 0..5 {
            let devices = [Sim::new(mode), Sim::new(mode)];
            let parts = (0..5).map(|i| whole(numbers(i * 100, 5))).collect();
            let (mut brought, _) = way.bring(&devices, parts);
            for _ in 0..polls {
                drop(poll_next(&mut brought));
                let _ = devices[0].sim.synchronize();
            }
            drop(brought);
            devices.iter().rev().for_each(Sim::assert_done);
        }
    }
}

fn uploads(
    items: Vec<Result<RecordBatch, ArrowError>>,
    sim: &Sim,
) -> impl DeviceRecordBatchStream + Unpin + 'static {
    let schema = items.iter().flatten().next().unwrap().schema();
    upload_stream(stream::iter(items), schema, sim.default_queue())
}

#[test]
fn an_adapted_stream_ends_with_an_error() {
    let error = || Err(Error::InvalidArgument("line 7".into()));
    let items = vec![Ok(batch(0)), error(), Ok(batch(1))];
    let mut stream = Box::pin(adapted(stream::iter(items)));
    assert!(next(&mut stream).unwrap().is_ok());
    assert!(next(&mut stream).unwrap().is_err());
    assert!(next(&mut stream).is_none() && next(&mut stream).is_none());
}

/// A stream that is faster than its device is held up by `Pending`, not by a wait.
#[test]
fn uploads_ahead_are_bounded_without_a_wait() {
    let sim = Sim::new(SimMode::Deferred);
    let columns = (0..10).map(|i| {
        let values = Int64Array::from_iter_values(0..(1 << 17) - 8);
        (format!("c{i}"), Arc::new(values) as ArrayRef)
    });
    let large = RecordBatch::try_from_iter(columns).unwrap();
    let items = (0..40).map(|_| Ok(large.clone())).collect();
    let mut up = uploads(items, &sim);
    let (mut pending, mut n) = (0, 0);
    loop {
        let (wakes, waker) = Wakes::new();
        match poll_next_with(&mut up, &waker) {
            Poll::Ready(None) => break,
            Poll::Ready(Some(batch)) => {
                n += 1;
                drop(batch.unwrap());
            }
            Poll::Pending => {
                pending += 1;
                sim.sim.synchronize().unwrap();
                wakes.wait();
            }
        }
        let bytes = sim.sim.report().live_host_bytes;
        assert!(bytes <= 220 << 20, "{bytes} bytes of staging memory");
    }
    assert_eq!((n, sim.stats().host_waits), (40, 0));
    assert!(pending > 0, "nothing held it up");
    drop(up);
    sim.assert_done();
}

#[test]
fn a_download_is_pending_until_the_device_is_done() {
    let sim = Sim::new(SimMode::Deferred);
    let sent = numbers(0, 5);
    let mut down = given(sent.schema(), vec![sim.upload(&sent)])
        .0
        .into_host_stream();
    assert_eq!(*down.schema(), sent.schema());
    let before = sim.stats();
    let (wakes, waker) = Wakes::new();
    for _ in 0..3 {
        assert!(poll_next_with(&mut down, &waker).is_pending());
    }
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    std::thread::sleep(SHORT);
    assert_eq!(wakes.count(), 0, "nothing has happened");
    let (items, _) = told(down, SimMode::Deferred, &[&sim]);
    assert_eq!(
        items.into_iter().map(|b| b.unwrap()).collect::<Vec<_>>(),
        [sent]
    );
    sim.assert_done();
}

#[test]
fn a_host_stream_asks_ahead_as_far_as_it_was_told() {
    for (mode, prefetch) in MODES
        .into_iter()
        .flat_map(|mode| [None, Some(0), Some(1), Some(3)].map(|prefetch| (mode, prefetch)))
    {
        let sim = Sim::new(mode);
        let items = (0..8).map(|i| sim.upload(&numbers(i * 100, 5))).collect();
        let (items, asked) = given(numbers(0, 5).schema(), items);
        let mut down = items.into_host_stream();
        if let Some(prefetch) = prefetch {
            down = down.with_prefetch(prefetch);
        }
        assert_eq!(
            asked.load(SeqCst),
            0,
            "nothing is asked before the consumer does"
        );
        let ahead = prefetch.unwrap_or(1);
        for taken in 1..=8 {
            let item = loop {
                let (wakes, waker) = Wakes::new();
                if let Poll::Ready(item) = poll_next_with(&mut down, &waker) {
                    break item;
                }
                sim.sim.synchronize().unwrap();
                wakes.wait();
            };
            assert_eq!(item.unwrap().unwrap(), numbers((taken as i64 - 1) * 100, 5));
            // The end is asked for too.
            let wanted = (taken + ahead).min(9);
            assert_eq!(asked.load(SeqCst), wanted, "{taken}, {prefetch:?}");
        }
        assert_eq!(told(down, mode, &[&sim]).0.len(), 0);
        sim.assert_done();
    }
}

#[test]
fn a_device_that_fails_wakes_and_is_an_error() {
    let sim = Sim::new(SimMode::Deferred);
    let batch = numbers(0, 5);
    let mut down = given(batch.schema(), vec![sim.upload(&batch)])
        .0
        .into_host_stream();
    let (wakes, waker) = Wakes::new();
    assert!(poll_next_with(&mut down, &waker).is_pending());
    let queue = sim.default_queue();
    launch(&queue, |_| Err("the kernel failed".into())).unwrap();
    assert!(sim.sim.synchronize().is_err());
    wakes.wait();
    // The copy may have run before the kernel.
    assert_eq!(all(down).len(), 1);
}

#[test]
fn memory_of_the_host_is_given_out_at_once() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let mut batches = counting(3);
    let batches = stream::poll_fn(move |_| {
        count.fetch_add(1, SeqCst);
        Poll::Ready(batches())
    });
    let mut down = adapted(batches).into_host_stream();
    for i in 0..3 {
        let back = ready(poll_next(&mut down)).unwrap().unwrap();
        assert_eq!(back, numbers(i * 100, 5));
        assert_eq!(
            asked.load(SeqCst),
            i as usize + 1,
            "and not asked for ahead"
        );
    }
    assert!(ready(poll_next(&mut down)).is_none());
}

/// Up, across the C structs and down again, without one wait; where batches go out only once they are ready, too.
#[test]
fn the_whole_way_on_one_thread() {
    use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
    for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
        let sim = Sim::new(SimMode::Async);
        let sent: Vec<_> = (0..30).map(|i| numbers(i * 100, 50)).collect();
        let up = uploads(sent.iter().cloned().map(Ok).collect(), &sim);
        let import = options_of(&sim);
        // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
        let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, import) };
        let options = arrow_device::ExportOptions::new(sync);
        let produce = produce(up, handler, options);
        let read = async {
            let down = opening.await.unwrap().into_host_stream();
            down.map(|batch| batch.unwrap()).collect::<Vec<_>>().await
        };
        let (outcome, back) = futures::executor::block_on(futures::future::join(produce, read));
        crate::async_stream::producer::completed(outcome);
        assert_eq!(sim.stats().host_waits, 0);
        assert_eq!(back, sent);
        drop(back);
        sim.assert_done();
    }
}
