//! Our producer and our consumer, with each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, Opening,
    Outcome, ProduceOptions, produce, produce_at,
};
use arrow_device::device::sim::SimMode;
use arrow_device::{
    Device, DeviceRecordBatch, Devices, Error, ExportOptions, ImportOptions, Result, SyncPolicy,
};
use arrow_schema::{DataType, SchemaRef};
use futures::executor::block_on;
use futures::future::join;
use futures::{Stream, StreamExt, stream};

use crate::async_stream::kit::{LONG, batch, eventually, map, number_of, numbers};
use crate::async_stream::producer::{Running, adapted, cancelled, completed, options};
use crate::simkit::{MODES, Sim};
use crate::support::{Nulls, Rng, all_types, assert_same_batch, zero_column_batch};

/// Both ends of a stream of memory of the host.
fn pipe(
    batches: impl Stream<Item = Result<DeviceRecordBatch>> + Send + 'static,
    depth: usize,
) -> (Running, Opening) {
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    let (handler, opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(depth, ImportOptions::default()) };
    let produce = produce(adapted(batches), handler, options());
    (Box::pin(produce), opening)
}

/// Both ends of a stream on `device`, with `sent` uploaded as it is asked for.
fn pipe_on(
    device: &Device,
    schema: SchemaRef,
    sent: Vec<RecordBatch>,
    sync: SyncPolicy,
) -> (Running, Opening) {
    let devices = Devices::new();
    if device.id() != Devices::cpu().id() {
        devices.add(device.clone()).unwrap();
    }
    let import = ImportOptions::default().with_devices(devices);
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(3, import) };
    let (up, device_type) = (device.clone(), device.id().device_type);
    let batches = stream::iter(sent).map(move |batch| up.upload(&batch));
    let batches = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
    let options = ProduceOptions::new(ExportOptions::new(sync));
    (
        Box::pin(produce(batches, handler.into_ffi(), options)),
        opening,
    )
}

async fn numbers_of(opening: Opening) -> Vec<i64> {
    let mut stream = opening.await.unwrap();
    let mut found = Vec::new();
    while let Some(item) = stream.next().await {
        found.push(number_of(&item.unwrap().batch));
    }
    found
}

fn some(n: i64) -> impl Stream<Item = Result<DeviceRecordBatch>> + Send {
    stream::iter((0..n).map(|i| Ok(batch(i))))
}

/// Batches with slices of all kinds of a type.
fn batches_of(data_type: &DataType) -> Vec<RecordBatch> {
    let types = [data_type.clone(), DataType::Int32];
    let whole = crate::support::batch(&types, 40, Nulls::Some, 7);
    let slices = [(0, 40), (3, 5), (0, 0), (7, 11), (40, 0), (39, 1)];
    slices
        .map(|(first, rows)| whole.slice(first, rows))
        .to_vec()
}

#[test]
fn every_type_comes_through() {
    let cpu = Devices::cpu();
    let simulated = MODES.map(|mode| (!cfg!(miri)).then(|| Sim::new(mode)));
    let mut places = vec![&cpu];
    places.extend(simulated.iter().flatten().map(|sim| &sim.device));
    for (name, data_type) in all_types() {
        let sent = batches_of(&data_type);
        for device in &places {
            let (produce, opening) =
                pipe_on(device, sent[0].schema(), sent.clone(), SyncPolicy::Event);
            let read = async {
                let mut stream = opening.await.unwrap();
                assert_eq!(stream.schema(), sent[0].schema());
                let mut n = 0;
                while let Some(item) = stream.next().await {
                    let back = item.unwrap().batch.to_host().unwrap();
                    assert_same_batch(&sent[n], &back, format!("{name} on {device}, {n}"));
                    n += 1;
                }
                n
            };
            let (outcome, n) = block_on(join(produce, read));
            completed(outcome);
            assert_eq!(n, sent.len());
        }
    }
    simulated.iter().flatten().for_each(Sim::assert_done);
}

/// The specification lets the batches of a stream be on several devices of its type.
#[test]
fn batches_may_be_on_several_devices() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let sims = [Sim::new(mode), Sim::new(mode)];
        let devices = Devices::new();
        for sim in &sims {
            devices.add(sim.device.clone()).unwrap();
        }
        let import = ImportOptions::default().with_devices(devices);
        let sent: Vec<_> = (0..6).map(|i| numbers(i * 100, 5)).collect();
        let schema = sent[0].schema();
        for staged in [false, true] {
            if staged && mode == SimMode::Deferred {
                // Its copies run only for who waits, which a host stream does not.
                continue;
            }
            // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
            let (handler, opening) =
                unsafe { AsyncDeviceRecordBatchStream::handler(3, import.clone()) };
            let up = sent.iter().zip(sims.iter().cycle());
            let up: Vec<_> = up.map(|(batch, sim)| sim.upload(batch)).collect();
            let device_type = sims[0].id().device_type;
            let batches =
                DeviceRecordBatchStreamAdapter::new(schema.clone(), device_type, stream::iter(up));
            let produce = produce(batches, handler.into_ffi(), options());
            let read = async {
                let stream = opening.await.unwrap();
                if staged {
                    let host = stream.into_host_stream().with_prefetch(2);
                    let host: Vec<RecordBatch> = host.map(|batch| batch.unwrap()).collect().await;
                    assert_eq!(host, sent);
                    return;
                }
                let ids = stream.map(|item| item.unwrap().batch.device().id());
                let ids: Vec<_> = ids.collect().await;
                let expected = sims.iter().map(|sim| sim.id()).cycle().take(6);
                assert_eq!(ids, expected.collect::<Vec<_>>());
            };
            let (outcome, ()) = block_on(join(produce, read));
            completed(outcome);
        }
        sims.iter().for_each(Sim::assert_done);
    }
}

#[test]
fn batches_without_columns_come_through() {
    let sent = [0, 1, 1000].map(zero_column_batch).to_vec();
    let cpu = Devices::cpu();
    let (produce, opening) = pipe_on(&cpu, sent[0].schema(), sent, SyncPolicy::Event);
    let read = async {
        let stream = opening.await.unwrap();
        let rows = stream.map(|item| item.unwrap().batch.num_rows());
        rows.collect::<Vec<_>>().await
    };
    let (outcome, rows) = block_on(join(produce, read));
    completed(outcome);
    assert_eq!(rows, [0, 1, 1000]);
}

/// Where a batch goes out only once it is ready, one thread still serves both ends.
#[test]
fn waiting_for_the_device_holds_up_no_thread() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let sent: Vec<_> = (0..50).map(|i| numbers(i * 100, 5)).collect();
    let before = sim.stats();
    let (produce, opening) = pipe_on(&sim, sent[0].schema(), sent, SyncPolicy::Wait);
    let read = async {
        let mut stream = opening.await.unwrap();
        let mut n = 0;
        while let Some(item) = stream.next().await {
            assert!(item.unwrap().batch.is_ready().unwrap());
            n += 1;
        }
        n
    };
    let (outcome, n) = block_on(join(produce, read));
    completed(outcome);
    assert_eq!((n, sim.stats().since(&before).host_waits), (50, 0));
    sim.assert_done();
}

#[test]
fn one_thread_does_not_deadlock() {
    for depth in [1, 2, 64] {
        let (produce, opening) = pipe(some(100), depth);
        let (outcome, found) = block_on(join(produce, numbers_of(opening)));
        completed(outcome);
        assert_eq!(found, (0..100).collect::<Vec<_>>());
        // The other way round.
        let (produce, opening) = pipe(some(100), depth);
        let (found, outcome) = block_on(join(numbers_of(opening), produce));
        completed(outcome);
        assert_eq!(found.len(), 100);
    }
}

#[test]
fn tokio_current_thread() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (produce, opening) = pipe(some(1000), 4);
        let produce = tokio::spawn(produce);
        let read = tokio::spawn(numbers_of(opening));
        assert_eq!(read.await.unwrap(), (0..1000).collect::<Vec<_>>());
        completed(produce.await.unwrap());
    });
}

#[test]
fn tokio_multi_thread() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .build()
        .unwrap();
    runtime.block_on(async {
        let pairs = (0..8).map(|_| {
            let (produce, opening) = pipe(some(500), 4);
            (tokio::spawn(produce), tokio::spawn(numbers_of(opening)))
        });
        let pairs: Vec<_> = pairs.collect();
        for (produce, read) in pairs {
            assert_eq!(read.await.unwrap(), (0..500).collect::<Vec<_>>());
            completed(produce.await.unwrap());
        }
    });
}

#[test]
fn ten_thousand_batches() {
    let (produce, opening) = pipe(some(10_000), 16);
    let produce = std::thread::spawn(move || block_on(produce));
    let found = block_on(numbers_of(opening));
    assert_eq!(found, (0..10_000).collect::<Vec<_>>());
    completed(produce.join().unwrap());
}

#[test]
fn a_slow_consumer_bounds_what_lives() {
    for depth in [1, 4] {
        let made = Arc::new(AtomicUsize::new(0));
        let count = made.clone();
        let batches = some(200).inspect(move |_| {
            count.fetch_add(1, SeqCst);
        });
        let (produce, opening) = pipe(batches, depth);
        let produce = std::thread::spawn(move || block_on(produce));
        block_on(async {
            let mut stream = opening.await.unwrap();
            let mut taken = 0;
            while let Some(item) = stream.next().await {
                drop(item.unwrap());
                taken += 1;
                if taken % 10 == 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let live = made.load(SeqCst) - taken;
                assert!(live <= depth + 2, "{live} beside the consumer's");
            }
            assert_eq!(taken, 200);
        });
        completed(produce.join().unwrap());
    }
}

#[test]
fn errors_come_across_after_the_batches_before_them() {
    let error = Error::AsyncProducer {
        errno: 28,
        message: "the disk is full".into(),
        metadata: map(&[("disk", "3")]),
    };
    let items = stream::iter([Ok(batch(0)), Ok(batch(1)), Err(error), Ok(batch(2))]);
    let (produce, opening) = pipe(items, 8);
    let read = async { opening.await.unwrap().collect::<Vec<_>>().await };
    let (outcome, items) = block_on(join(produce, read));
    assert_eq!(outcome.unwrap_err().errno(), 28);
    let [Ok(_), Ok(_), Err(e)] = items.as_slice() else {
        panic!("{items:?}");
    };
    let Error::AsyncProducer {
        errno,
        message,
        metadata,
    } = e
    else {
        panic!("{e:?}");
    };
    assert_eq!((*errno, metadata), (28, &map(&[("disk", "3")])));
    assert!(message.contains("the disk is full"), "{message}");
}

#[test]
fn a_reader_that_stops_cancels_the_producer() {
    for taken in [0, 1, 5] {
        let (produce, opening) = pipe(some(i64::MAX), 3);
        let read = async {
            let mut stream = opening.await.unwrap();
            for i in 0..taken {
                assert_eq!(number_of(&stream.next().await.unwrap().unwrap().batch), i);
            }
        };
        let (outcome, ()) = block_on(join(produce, read));
        cancelled(outcome);
    }
    let (produce, opening) = pipe(some(5), 3);
    drop(opening);
    let outcome = block_on(produce);
    assert!(
        matches!(
            outcome,
            Ok(Outcome::Refused {
                errno: libc::ECANCELED
            })
        ),
        "{outcome:?}"
    );
}

#[test]
fn a_producer_that_is_dropped_is_an_error_of_the_reader() {
    // Never polled.
    let (produce, opening) = pipe(some(5), 3);
    drop(produce);
    let e = block_on(opening).map(|_| ()).unwrap_err();
    assert_eq!(e.errno(), libc::ECANCELED, "{e}");
    // In the middle.
    let (mut produce, opening) = pipe(some(5), 3);
    assert!(crate::async_stream::kit::poll(&mut produce).is_pending());
    drop(produce);
    let items = block_on(async { opening.await.unwrap().collect::<Vec<_>>().await });
    let good = items.iter().filter(|item| item.is_ok()).count();
    assert_eq!((good, items.len()), (3, 4));
    let e = items.into_iter().next_back().unwrap().unwrap_err();
    assert_eq!(e.errno(), libc::ECANCELED, "{e}");
}

/// Memory of the handler's own, used where it is; the reader goes before the producer, or after.
#[test]
fn a_handler_of_into_raw_in_place() {
    for reader_first in [true, false] {
        // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
        let (handler, opening) =
            unsafe { AsyncDeviceRecordBatchStream::handler(2, ImportOptions::default()) };
        // SAFETY: `into_raw` keeps the handler where it is until its release.
        let produce = unsafe { produce_at(adapted(some(5)), handler.into_raw(), options()) };
        let mut produce: Running = Box::pin(produce);
        assert!(crate::async_stream::kit::poll(&mut produce).is_pending());
        if reader_first {
            drop(opening);
            cancelled(block_on(produce));
        } else {
            let (outcome, found) = block_on(join(produce, numbers_of(opening)));
            completed(outcome);
            assert_eq!(found.len(), 5);
        }
    }
}

/// A stream of ours that goes on to another consumer of ours.
#[test]
fn a_relay_of_two_streams() {
    let (first, opening) = pipe(some(200), 4);
    let relay = async {
        let stream = opening.await.unwrap();
        let (_, schema) = (stream.device_type(), stream.schema());
        assert_eq!(schema, numbers(0, 1).schema());
        // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
        let (handler, opening) =
            unsafe { AsyncDeviceRecordBatchStream::handler(2, ImportOptions::default()) };
        let second = produce(stream.into_batches(), handler.into_ffi(), options());
        join(second, numbers_of(opening)).await
    };
    let (outcome, (relayed, found)) = block_on(join(first, relay));
    completed(outcome);
    completed(relayed);
    assert_eq!(found, (0..200).collect::<Vec<_>>());
}

/// Ends that go away at any time, on any thread, on a device that counts what is left.
#[test]
fn ends_go_away_at_any_time() {
    let sim = (!cfg!(miri)).then(|| Sim::new(SimMode::Async));
    let cpu = Devices::cpu();
    let device = sim.as_ref().map_or(&cpu, |sim| &sim.device);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(3)
        .enable_time()
        .build()
        .unwrap();
    let end = Instant::now() + Duration::from_millis(1000);
    let mut rng = Rng::new(11);
    let mut rounds = 0;
    // Enough on a slow machine, and under a sanitizer, too.
    while Instant::now() < end || rounds <= 20 {
        rounds += 1;
        let (n, stop) = (rng.below(30), rng.below(40));
        let (pause, abort) = (rng.below(300) as u64, rng.one_in(3));
        let sync = [SyncPolicy::Event, SyncPolicy::Wait][rng.below(2)];
        let sent: Vec<_> = (0..n).map(|i| numbers(i as i64 * 100, 5)).collect();
        let (produce, opening) = pipe_on(device, numbers(0, 1).schema(), sent, sync);
        runtime.block_on(async {
            let produce = tokio::spawn(produce);
            let read = tokio::spawn(async move {
                let mut stream = opening.await?;
                let mut i = 0;
                while let Some(item) = stream.next().await {
                    assert_eq!(number_of(&item?.batch), i as i64);
                    i += 1;
                    if i == stop {
                        break;
                    }
                }
                Ok::<_, Error>(i)
            });
            if abort {
                tokio::time::sleep(Duration::from_micros(pause)).await;
                produce.abort();
            }
            let read = tokio::time::timeout(LONG, read).await;
            match read.expect("the reader hangs").unwrap() {
                Ok(i) => assert_eq!(i, if stop == 0 { n } else { n.min(stop) }),
                Err(e) => assert!(abort && e.errno() == libc::ECANCELED, "{e:?}"),
            }
            let outcome = tokio::time::timeout(LONG, produce).await;
            let outcome = outcome.expect("the producer hangs");
            assert!(matches!(&outcome, Err(_) | Ok(Ok(_))), "{outcome:?}");
        });
    }
    drop(runtime);
    if let Some(sim) = &sim {
        eventually("all memory comes back", || {
            sim.synchronize().unwrap();
            sim.sim.report().live_allocations == 0
        });
        sim.assert_done();
    }
}
