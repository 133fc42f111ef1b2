//! Our producer and our consumer, with each other.

use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream};
use arrow_device::device::sim::SimMode;
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatches, Devices, Error, ExportOptions, ImportOptions,
    Result, SyncPolicy,
};
use arrow_schema::{DataType, SchemaRef};
use futures::executor::block_on;
use futures::future::join;
use futures::{Stream, StreamExt, stream};

use crate::async_stream::kit::{LONG, Opening, batch, eventually, number_of, numbers, produce};
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
    let import = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(3, import) };
    let (up, device_type) = (device.clone(), device.id().device_type);
    let batches = stream::iter(sent).map(move |batch| up.upload(&batch));
    let batches = DeviceRecordBatches::from_stream(batches, schema, device_type);
    let options = ExportOptions::new(sync);
    (Box::pin(produce(batches, handler, options)), opening)
}

async fn numbers_of(opening: Opening) -> Vec<i64> {
    let mut stream = opening.await.unwrap();
    let mut found = Vec::new();
    while let Some(item) = stream.next().await {
        found.push(number_of(&item.unwrap()));
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
                    let back = item.unwrap().to_host().unwrap();
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
    let sims = [SimMode::Async, SimMode::Deferred].map(Sim::new);
    let devices = Devices::new();
    for sim in &sims {
        devices.add(sim.device.clone()).unwrap();
    }
    let import = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(3, import) };
    let up = (0..6)
        .zip(sims.iter().cycle())
        .map(|(i, sim)| sim.upload(&numbers(i * 100, 5)));
    let (up, schema) = (stream::iter(up.collect::<Vec<_>>()), numbers(0, 5).schema());
    let batches = DeviceRecordBatches::from_stream(up, schema, sims[0].id().device_type);
    let produce = produce(batches, handler, options());
    let read = async { opening.await.unwrap().collect::<Vec<_>>().await };
    let (outcome, found) = block_on(join(produce, read));
    completed(outcome);
    assert_eq!(found.len(), 6);
    for ((i, sim), item) in (0..).zip(sims.iter().cycle()).zip(found) {
        let batch = item.unwrap();
        assert_eq!((batch.device().id(), number_of(&batch)), (sim.id(), i));
    }
    sims.iter().for_each(Sim::assert_done);
}

#[test]
fn batches_without_columns_come_through() {
    let sent = [0, 1, 1000].map(zero_column_batch).to_vec();
    let cpu = Devices::cpu();
    let (produce, opening) = pipe_on(&cpu, sent[0].schema(), sent, SyncPolicy::Event);
    let read = async {
        let stream = opening.await.unwrap();
        let rows = stream.map(|item| item.unwrap().num_rows());
        rows.collect::<Vec<_>>().await
    };
    let (outcome, rows) = block_on(join(produce, read));
    completed(outcome);
    assert_eq!(rows, [0, 1, 1000]);
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
fn tokio_of_one_and_of_several_threads() {
    let mut builders = [
        tokio::runtime::Builder::new_current_thread(),
        tokio::runtime::Builder::new_multi_thread(),
    ];
    for builder in &mut builders {
        let runtime = builder.worker_threads(4).build().unwrap();
        runtime.block_on(async {
            let pairs = (0..8).map(|_| {
                let (produce, opening) = pipe(some(500), 4);
                (tokio::spawn(produce), tokio::spawn(numbers_of(opening)))
            });
            for (produce, read) in pairs.collect::<Vec<_>>() {
                assert_eq!(read.await.unwrap(), (0..500).collect::<Vec<_>>());
                completed(produce.await.unwrap());
            }
        });
    }
}

/// The reader goes before the producer, or after.
#[test]
fn ends_go_away_in_any_order() {
    for reader_first in [true, false] {
        let (mut produce, opening) = pipe(some(5), 2);
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
        let second = produce(stream, handler, options());
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
                    assert_eq!(number_of(&item?), i as i64);
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
