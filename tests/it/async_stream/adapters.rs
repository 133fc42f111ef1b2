//! What brings batches up and down without waiting in a poll.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Poll;

use arrow_array::nonblocking::RecordBatchStream;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::async_stream::{
    DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, HostRecordBatchStream, UploadingStream,
};
use arrow_device::device::Backend;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, Devices, Error, ImportOptions, Result, SyncPolicy,
};
use arrow_schema::{ArrowError, DataType, SchemaRef};
use futures::{Stream, StreamExt, stream};

use crate::async_stream::kit::*;
use crate::async_stream::producer::adapted;
use crate::async_stream::readers::counting;
use crate::simkit::{MODES, Sim, launch};
use crate::support::{Nulls, all_types, assert_same_batch};

// ---- UploadingStream

/// Any stream as one of host batches.
struct Host<S>(S, SchemaRef);

impl<S: Stream<Item = Result<RecordBatch, ArrowError>> + Unpin> Stream for Host<S> {
    type Item = S::Item;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<S::Item>> {
        self.0.poll_next_unpin(context)
    }
}

impl<S: Stream<Item = Result<RecordBatch, ArrowError>> + Unpin> RecordBatchStream for Host<S> {
    fn schema(&self) -> &SchemaRef {
        &self.1
    }
}

fn host(items: Vec<Result<RecordBatch, ArrowError>>) -> impl RecordBatchStream + Send + Unpin {
    let schema = items.iter().flatten().next().unwrap().schema();
    Host(stream::iter(items), schema)
}

#[test]
fn uploads_do_not_wait() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let sent: Vec<_> = (0..10).map(|i| numbers(i * 100, 5)).collect();
    let up = UploadingStream::new(host(sent.iter().cloned().map(Ok).collect()), &sim);
    assert_eq!(
        (up.schema(), up.device_type()),
        (sent[0].schema(), ArrowDeviceType::EXT_DEV)
    );
    let mut up = Box::pin(up);
    for sent in &sent {
        let batch = ready(poll_next(&mut up)).unwrap().unwrap();
        assert!(!batch.is_ready().unwrap());
        assert_eq!(sim.stats().host_waits, 0);
        drop((batch, sent));
    }
    assert!(ready(poll_next(&mut up)).is_none());
    drop(up);
    sim.assert_done();
}

#[test]
fn errors_of_the_host_stream_keep_their_place() {
    let items = vec![
        Ok(numbers(0, 5)),
        Err(ArrowError::ParseError("line 7".into())),
        Ok(numbers(100, 5)),
    ];
    let mut up = Box::pin(UploadingStream::new(host(items), &Devices::cpu()));
    assert_eq!(number_of(&next(&mut up).unwrap().unwrap()), 0);
    assert!(
        next(&mut up)
            .unwrap()
            .unwrap_err()
            .to_string()
            .contains("line 7")
    );
    // An error is the end, whatever the stream would still give.
    assert!(next(&mut up).is_none() && next(&mut up).is_none());
}

#[test]
fn a_failed_upload_is_an_error_and_the_end() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let items = (0..3).map(|i| Ok(numbers(i * 100, 5))).collect();
    let mut up = Box::pin(UploadingStream::new(host(items), &sim));
    assert!(next(&mut up).unwrap().is_ok());
    sim.faults().fail_nth(FaultOp::Allocate, 1);
    assert!(next(&mut up).unwrap().is_err());
    assert!(next(&mut up).is_none() && next(&mut up).is_none());
    drop(up);
    sim.assert_done();
}

#[test]
fn an_adapted_stream_ends_with_an_error() {
    let error = || Err(Error::InvalidArgument("line 7".into()));
    let items = vec![Ok(batch(0)), error(), Ok(batch(1))];
    let mut stream = Box::pin(adapted(stream::iter(items)));
    assert_eq!(stream.size_hint(), (0, Some(3)));
    assert!(next(&mut stream).unwrap().is_ok());
    assert!(next(&mut stream).unwrap().is_err());
    assert_eq!(stream.size_hint(), (0, Some(0)));
    assert!(next(&mut stream).is_none() && next(&mut stream).is_none());
}

/// A stream that is faster than its device is held up by `Pending`, not by a wait.
#[test]
fn uploads_ahead_are_bounded_without_a_wait() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let columns = (0..10).map(|i| {
        let values = Int64Array::from_iter_values(0..(1 << 17) - 8);
        (format!("c{i}"), Arc::new(values) as ArrayRef)
    });
    let large = RecordBatch::try_from_iter(columns).unwrap();
    let items = (0..40).map(|_| Ok(large.clone())).collect();
    let mut up = Box::pin(UploadingStream::new(host(items), &sim));
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

// ---- HostRecordBatchStream

/// Out and in again: what only the device knows is unknown.
pub(crate) fn forgotten(batch: &DeviceRecordBatch, options: &ImportOptions) -> DeviceRecordBatch {
    let (array, schema) = batch.export(SyncPolicy::Event).unwrap();
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type
    // is the exported one.
    unsafe { DeviceRecordBatch::import_with(array, &schema, options) }.unwrap()
}

/// Items that go up when they are asked for, each behind what tells of waits.
fn on_device(
    sim: &Sim,
    items: Vec<Result<RecordBatch>>,
    mut asked: impl FnMut() + Unpin + Send + 'static,
) -> impl DeviceRecordBatchStream<Batch = DeviceRecordBatch> + Unpin + Send + 'static {
    let (options, device) = (options_of(sim), sim.device.clone());
    let schema = items.iter().flatten().next().unwrap().schema();
    let mut items = items.into_iter();
    let up = stream::poll_fn(move |_| {
        asked();
        let up = items.next().map(|item| {
            forbid_waits(&device);
            Ok(forgotten(&device.upload(&item?)?, &options))
        });
        Poll::Ready(up)
    });
    DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::EXT_DEV, up)
}

/// Reads a stream on a device whose work runs only when told. How often it had to be told.
#[track_caller]
pub(crate) fn told<S: DeviceRecordBatchStream + Unpin>(
    mut stream: HostRecordBatchStream<S>,
    sim: &Sim,
) -> (Vec<Result<RecordBatch, ArrowError>>, usize) {
    let (mut items, mut pauses) = (Vec::new(), 0);
    let before = sim.stats();
    loop {
        let (wakes, waker) = Wakes::new();
        assert_eq!(sim.stats().since(&before).host_waits, 0);
        match in_poll(|| poll_next_with(&mut stream, &waker)) {
            Poll::Ready(None) => return (items, pauses),
            Poll::Ready(Some(item)) => items.push(item),
            Poll::Pending => {
                pauses += 1;
                assert!(pauses < 1000, "gets nowhere");
                let _ = sim.sim.synchronize();
                wakes.wait();
            }
        }
    }
}

/// A poll that waits would be seen.
#[test]
fn the_kernels_see_waits() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let mut items = on_device(&sim, vec![Ok(numbers(0, 5))], || ());
    let up = ready(poll_next(&mut items)).unwrap().unwrap();
    assert!(in_poll(|| up.to_host()).is_err());
}

#[test]
fn a_download_is_pending_until_the_device_is_done() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let sent = numbers(0, 5);
    let mut down = on_device(&sim, vec![Ok(sent.clone())], || ()).into_host_stream();
    assert_eq!(*down.schema(), sent.schema());
    let before = sim.stats();
    let (wakes, waker) = Wakes::new();
    for _ in 0..3 {
        assert!(poll_next_with(&mut down, &waker).is_pending());
    }
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    std::thread::sleep(SHORT);
    assert_eq!(wakes.count(), 0, "nothing has happened");
    let (items, _) = told(down, &sim);
    assert_eq!(
        items.into_iter().map(|b| b.unwrap()).collect::<Vec<_>>(),
        [sent]
    );
    sim.assert_done();
}

#[test]
fn every_type_comes_down_without_a_wait() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        for (name, data_type) in all_types() {
            let sim = Sim::new(mode);
            let types = [data_type.clone(), DataType::Int32];
            let whole = crate::support::batch(&types, 40, Nulls::Some, 5);
            let slices = [(0, 40), (3, 5), (0, 0), (7, 11), (39, 1)];
            let sent = slices.map(|(first, rows)| whole.slice(first, rows));
            let items = sent.iter().cloned().map(Ok).collect();
            let down = on_device(&sim, items, || ());
            let (items, pauses) = told(down.into_host_stream(), &sim);
            assert_eq!(items.len(), sent.len(), "{name}, {mode:?}");
            if mode == SimMode::Deferred {
                assert!(
                    pauses > 0,
                    "{name} came down with nobody to tell the device"
                );
            }
            for (sent, back) in sent.iter().zip(items) {
                assert_same_batch(sent, &back.unwrap(), &name);
            }
            sim.assert_done();
        }
    }
}

#[test]
fn a_host_stream_asks_ahead_as_far_as_it_was_told() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        for prefetch in [None, Some(0), Some(1), Some(3)] {
            let sim = Sim::new(mode);
            let asked = Arc::new(AtomicUsize::new(0));
            let count = asked.clone();
            let items = (0..8).map(|i| Ok(numbers(i * 100, 5))).collect();
            let counted = on_device(&sim, items, move || {
                count.fetch_add(1, SeqCst);
            });
            let mut down = counted.into_host_stream();
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
            assert_eq!(told(down, &sim).0.len(), 0);
            sim.assert_done();
        }
    }
}

#[test]
fn errors_come_down_after_the_batches_before_them() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let error = ArrowError::ParseError("line 7".into());
    let other = numbers(0, 5).project(&[]).unwrap();
    for (text, bad) in [("line 7", Err(error.into())), ("schema differs", Ok(other))] {
        let items = vec![
            Ok(numbers(0, 5)),
            Ok(numbers(100, 5)),
            bad,
            Ok(numbers(200, 5)),
        ];
        let down = on_device(&sim, items, || ())
            .into_host_stream()
            .with_prefetch(3);
        let (mut items, _) = told(down, &sim);
        assert_eq!(items.len(), 3, "ends with the error");
        let e = items.pop().unwrap().unwrap_err();
        assert!(e.to_string().contains(text), "{e}");
        assert!(items.iter().all(|item| item.is_ok()));
    }
    sim.assert_done();
}

#[test]
fn failed_copies_are_errors_and_the_end() {
    if cfg!(miri) {
        return;
    }
    for op in [FaultOp::Copy, FaultOp::Record, FaultOp::NewQueue] {
        let sim = Sim::new(SimMode::Deferred);
        let items = (0..4).map(|i| Ok(numbers(i * 100, 5))).collect();
        let down = on_device(&sim, items, || ()).into_host_stream();
        sim.faults().fail_nth(op, 1);
        let (items, _) = told(down, &sim);
        assert_eq!((items.len(), sim.faults().fired()), (1, 1), "{op:?}");
        let e = Error::from(items.into_iter().next().unwrap().unwrap_err());
        assert!(matches!(e, Error::Device { code: 1, .. }), "{op:?}: {e:?}");
        sim.faults().clear();
        sim.assert_done();
    }
}

#[test]
fn a_device_that_fails_wakes_and_is_an_error() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let mut down = on_device(&sim, vec![Ok(numbers(0, 5))], || ()).into_host_stream();
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
fn a_host_stream_dropped_in_the_middle_leaves_nothing() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        for polls in 0..4 {
            let sim = Sim::new(mode);
            let items = (0..5).map(|i| Ok(numbers(i * 100, 5))).collect();
            let mut down = on_device(&sim, items, || ())
                .into_host_stream()
                .with_prefetch(2);
            for _ in 0..polls {
                drop(poll_next(&mut down));
            }
            drop(down);
            sim.assert_done();
        }
    }
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

/// Up, across the C structs and down again, without one wait.
#[test]
fn the_whole_way_on_one_thread() {
    use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, ProduceOptions, produce};
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let sent: Vec<_> = (0..30).map(|i| numbers(i * 100, 50)).collect();
    let up = UploadingStream::new(host(sent.iter().cloned().map(Ok).collect()), &sim);
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, options_of(&sim)) };
    let options = ProduceOptions::new(arrow_device::ExportOptions::new(SyncPolicy::Event));
    let produce = produce(up, handler.into_ffi(), options);
    let read = async {
        let down = opening.await.unwrap().into_batches().into_host_stream();
        down.map(|batch| batch.unwrap()).collect::<Vec<_>>().await
    };
    let (outcome, back) = futures::executor::block_on(futures::future::join(produce, read));
    crate::async_stream::producer::completed(outcome);
    assert_eq!(sim.stats().host_waits, 0);
    assert_eq!(back, sent);
    drop(back);
    sim.assert_done();
}
