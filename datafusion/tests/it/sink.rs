//! Results of plans as device streams.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::task::Poll;
use std::thread;

use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, Outcome, ProduceOptions, produce,
};
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices,
    Error, ExportOptions, FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy,
};
use arrow_device_datafusion::{
    DeviceTable, ScanRequest, execute_on_device, export_plan, to_datafusion,
};
use datafusion::arrow::array::RecordBatch;
use datafusion::common::DataFusionError;
use datafusion::physical_plan::execute_stream;
use futures::{StreamExt, TryStreamExt};

use crate::kit::*;

fn partition(first: i64, batches: i64) -> Vec<RecordBatch> {
    (0..batches).map(|i| numbers(first + i * 16, 16)).collect()
}

fn options() -> ExportOptions {
    ExportOptions::new(SyncPolicy::Event)
}

/// Imports that know the device.
fn imports(device: &Device) -> ImportOptions {
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    ImportOptions::default().with_devices(devices)
}

async fn on_device(plan: Plan, device: &Device) -> arrow_device::Result<Vec<DeviceRecordBatch>> {
    let stream = execute_on_device(plan, session().task_ctx(), device).unwrap();
    assert_eq!(stream.device_type(), device.id().device_type);
    stream.try_collect().await
}

#[track_caller]
fn found(batches: &[DeviceRecordBatch], device: &Device) -> Vec<i64> {
    assert!(batches.iter().all(|batch| batch.device() == device));
    let host = batches.iter().map(|batch| batch.to_host().unwrap());
    numbers_of(&host.collect::<Vec<_>>())
}

#[tokio::test]
async fn a_host_plan_goes_up() {
    let sim = Sim::new();
    let ctx = over(host_table(&[partition(0, 4)]));
    let plan = plan(&ctx, "SELECT a + 1 AS a FROM t WHERE a >= 16").await;
    let schema = plan.schema();
    let before = sim.stats();
    let stream = execute_on_device(plan, ctx.task_ctx(), &sim).unwrap();
    assert_eq!(stream.schema(), schema);
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    let cost = sim.stats().since(&before);
    assert_eq!((cost.bytes_to_device, cost.bytes_to_host), (3 * 128, 0));
    assert_eq!(cost.host_waits, 0);
    assert_eq!(found(&batches, &sim), (17..65).collect::<Vec<_>>());
    drop(batches);
    sim.assert_done();
}

/// The table's own memory comes out.
#[tokio::test]
async fn a_device_plan_stays_where_it_is() {
    let sim = Sim::new();
    let table = device_table(&sim, &[partition(0, 3)]);
    let addresses = |batches: &[DeviceRecordBatch]| {
        let values = batches
            .iter()
            .map(|b| b.column(0).unwrap().buffer(1).unwrap());
        values.map(|values| values.address()).collect::<Vec<_>>()
    };
    let before = sim.stats();
    let first = on_device(scan(table.clone()).await, &sim).await.unwrap();
    let second = on_device(scan(table.clone()).await, &sim).await.unwrap();
    assert_eq!(addresses(&first), addresses(&second));
    let cost = sim.stats().since(&before);
    assert_eq!((cost.copies, cost.allocations), (0, 0));
    assert_eq!(found(&first, &sim), (0..48).collect::<Vec<_>>());

    // With operators, and with a session's transition at the root.
    let ctx = session_with(1, 2);
    register(&ctx, "t", table);
    let plan = plan(&ctx, "SELECT a FROM t").await;
    assert_eq!(plan.name(), "DeviceToHostExec");
    let before = sim.stats();
    let batches = on_device(plan.clone(), &sim).await.unwrap();
    let cost = sim.stats().since(&before);
    assert_eq!((cost.copies, cost.host_waits), (0, 0));
    let expected: Vec<i64> = (0..48).map(|i| i * 4).collect();
    assert_eq!(found(&batches, &sim), expected);
    // The nodes that ran are those of the plan.
    assert_eq!(metric(&plan, "MapExec", "output_rows"), Some(96));
    drop((first, second, batches, plan, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn a_device_plan_goes_to_another_device() {
    let (a, b) = (Sim::new(), Sim::new());
    let table = device_table(&a, &[partition(0, 3)]);
    let (before_a, before_b) = (a.stats(), b.stats());
    let batches = on_device(scan(table).await, &b).await.unwrap();
    let (cost_a, cost_b) = (a.stats().since(&before_a), b.stats().since(&before_b));
    assert_eq!((cost_a.bytes_to_host, cost_a.bytes_to_device), (384, 0));
    assert_eq!((cost_b.bytes_to_host, cost_b.bytes_to_device), (0, 384));
    assert_eq!(found(&batches, &b), (0..48).collect::<Vec<_>>());
    drop(batches);
    b.assert_done();
    a.assert_done();
}

/// A plan that no session's rule has seen.
#[tokio::test]
async fn transitions_are_put_in() {
    let sim = Sim::new();
    let host = scan(host_table(&[partition(0, 2)])).await;
    let batches = on_device(double(host, &sim), &sim).await.unwrap();
    let expected: Vec<i64> = (0..32).map(|i| i * 2).collect();
    assert_eq!(found(&batches, &sim), expected);
}

#[tokio::test]
async fn partitions_come_as_they_are_ready() {
    let sim = Sim::new();
    let (device, gate) = (sim.device.clone(), Arc::new(AtomicBool::new(false)));
    let opened = gate.clone();
    let open = move |request: ScanRequest| {
        let partition = request.partition;
        let opened = opened.clone();
        let next = move |i| {
            // The first two wait.
            if partition < 2 {
                eventually("the gate", || opened.load(SeqCst));
            }
            (i < 3).then(|| Ok(numbers((partition * 48 + i * 16) as i64, 16)))
        };
        Ok(Reader::new(&device, numbers(0, 1).schema(), next))
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 4, open);
    let plan = scan(Arc::new(table)).await;
    let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    let mut batches = Vec::new();
    for _ in 0..6 {
        batches.push(stream.next().await.unwrap().unwrap());
    }
    let first = found(&batches, &sim);
    assert_eq!(sorted(first), (96..192).collect::<Vec<_>>());
    gate.store(true, SeqCst);
    batches.extend(stream.try_collect::<Vec<_>>().await.unwrap());
    let all = found(&batches, &sim);
    assert_eq!(sorted(all.clone()), (0..192).collect::<Vec<_>>());
    // Each partition in its order.
    for partition in 0..4 {
        let of = all.iter().filter(|i| **i / 48 == partition);
        assert!(of.is_sorted(), "{partition}");
    }
    drop(batches);
    sim.assert_done();
}

/// All take their turn.
#[tokio::test]
async fn partitions_that_are_always_ready_take_turns() {
    let sim = Sim::new();
    let table = device_table(
        &sim,
        &[partition(0, 5), partition(1000, 5), partition(2000, 1)],
    );
    let batches = on_device(scan(table).await, &sim).await.unwrap();
    let first_of = |batch: &DeviceRecordBatch| found(std::slice::from_ref(batch), &sim)[0] / 1000;
    let order: Vec<i64> = batches.iter().map(first_of).collect();
    assert_eq!(order.len(), 11);
    for partition in 0..3 {
        let at = order.iter().position(|p| *p == partition);
        // Each partition has a place in the channel, and one batch more at hand.
        assert!(at.unwrap() < 6, "{order:?}");
    }
}

/// A consumer that never waits lets others run all the same, as with DataFusion's own streams.
#[tokio::test]
async fn a_result_that_is_always_ready_yields() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let batches = vec![vec![batch; 1000]];
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_batches(schema, sim.device.clone(), batches).unwrap();
    let plan = scan(Arc::new(table)).await;
    for on_host in [true, false] {
        let ran = Arc::new(AtomicBool::new(false));
        let flag = ran.clone();
        let other = tokio::spawn(async move { flag.store(true, SeqCst) });
        if on_host {
            let mut stream = execute_stream(plan.clone(), session().task_ctx()).unwrap();
            while let Some(batch) = stream.next().await {
                batch.unwrap();
            }
        } else {
            let mut stream = execute_on_device(plan.clone(), session().task_ctx(), &sim).unwrap();
            while let Some(batch) = stream.next().await {
                batch.unwrap();
            }
        }
        assert!(ran.load(SeqCst), "on the host: {on_host}");
        other.await.unwrap();
    }
}

#[tokio::test]
async fn nothing_to_give() {
    let sim = Sim::new();
    let (none, empty): (&[Vec<RecordBatch>], _) = (&[], [vec![], vec![]]);
    for partitions in [none, &empty] {
        let schema = numbers(0, 1).schema();
        let uploaded = partitions.iter().map(|_| Vec::new()).collect();
        let table = DeviceTable::from_batches(schema, sim.device.clone(), uploaded).unwrap();
        let plan = scan(Arc::new(table)).await;
        assert_eq!(on_device(plan, &sim).await.unwrap().len(), 0);
    }
}

/// What a consumer on a thread of its own reads, which knows of no runtime.
fn read(
    stream: FFI_ArrowDeviceArrayStream,
    device: &Device,
) -> thread::JoinHandle<Vec<arrow_device::Result<DeviceRecordBatch>>> {
    let options = imports(device);
    thread::spawn(move || {
        // SAFETY: the stream is this crate's.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options) }.unwrap();
        assert_eq!(*reader.schema().field(0).name(), "a");
        reader.collect()
    })
}

async fn joined<T: Send + 'static>(thread: thread::JoinHandle<T>) -> T {
    tokio::task::spawn_blocking(|| thread.join().unwrap())
        .await
        .unwrap()
}

/// Tasks that the plan starts on the way run in the runtime: the consumer's thread is in it
/// meanwhile.
async fn assert_exports() {
    let sim = Sim::new();
    let partitions = [partition(0, 3), partition(48, 3), partition(96, 4)];
    for (doubles, sql) in [
        (0, "SELECT a FROM t"),
        (2, "SELECT a FROM t"),
        (1, "SELECT a, count(*) FROM t GROUP BY a"),
        (1, "SELECT a FROM t ORDER BY a"),
    ] {
        let ctx = session_with(4, doubles);
        register(&ctx, "t", device_table(&sim, &partitions));
        let plan = plan(&ctx, sql).await;
        let stream = export_plan(plan, ctx.task_ctx(), &sim, options()).unwrap();
        let batches = joined(read(stream, &sim)).await;
        let batches: Vec<_> = batches.into_iter().map(Result::unwrap).collect();
        let expected: Vec<i64> = (0..160).map(|i| i << doubles).collect();
        assert_eq!(sorted(found(&batches, &sim)), expected, "{sql}");
    }
    sim.assert_done();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exported_plan_is_read_on_another_thread() {
    assert_exports().await;
}

#[tokio::test]
async fn an_exported_plan_runs_in_a_runtime_of_one_thread() {
    assert_exports().await;
}

#[test]
fn outside_a_runtime_nothing_is_exported() {
    let sim = Sim::new();
    let table = device_table(&sim, &[partition(0, 1)]);
    let plan = futures::executor::block_on(scan(table));
    let error = export_plan(plan, session().task_ctx(), &sim, options()).unwrap_err();
    assert!(matches!(error, DataFusionError::Execution(_)), "{error:?}");
    assert!(error.to_string().contains("Tokio runtime"), "{error}");
    sim.assert_done();
}

/// A plan whose third batch is an error.
async fn failing(sim: &Sim, error: fn() -> DataFusionError) -> Plan {
    let (table, _) = host_stream(move |i| match i {
        0 | 1 => Some(Ok(numbers(i as i64 * 16, 16))),
        _ => Some(Err(error())),
    });
    double(scan(table).await, sim)
}

#[tokio::test]
async fn errors_come_in_the_stream() {
    let sim = Sim::new();
    let plan = failing(&sim, || DataFusionError::Execution("no such thing".into())).await;
    let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    for _ in 0..2 {
        stream.next().await.unwrap().unwrap();
    }
    let error = stream.next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("no such thing"), "{error}");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn errors_cross_the_c_interface_with_their_text() {
    let sim = Sim::new();
    let export = async |error| {
        let plan = failing(&sim, error).await;
        let stream = export_plan(plan, session().task_ctx(), &sim, options()).unwrap();
        let mut batches = joined(read(stream, &sim)).await;
        assert_eq!(batches.len(), 3);
        batches.pop().unwrap().unwrap_err()
    };
    let error = export(|| DataFusionError::Execution("no such thing".into())).await;
    assert!(error.to_string().contains("no such thing"), "{error}");
    assert_eq!(error.errno(), 5);
    // One of ours keeps its errno as well.
    let error = export(|| {
        to_datafusion(Error::Cancelled {
            operation: "the scan",
        })
    })
    .await;
    assert!(error.to_string().contains("the scan"), "{error}");
    assert_eq!(error.errno(), 125);
    sim.assert_done();
}

/// A failing kernel is found by who reads: its batch is out before.
#[tokio::test]
async fn a_failing_kernel_is_told_by_its_batch() {
    let sim = Sim::new();
    let host = scan(host_table(&[partition(0, 2)])).await;
    let plan = map(vec![host], &sim, |n| match n {
        20.. => Err("the kernel is broken".into()),
        n => Ok(n),
    });
    let stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    let results: Vec<_> = stream.collect().await;
    let error = results.into_iter().find_map(|batch| match batch {
        Ok(batch) => batch.to_host().err(),
        Err(e) => Some(e),
    });
    let error = error.unwrap().to_string();
    assert!(error.contains("the kernel is broken"), "{error}");
    assert!(error.contains(&sim.id().to_string()), "{error}");
}

/// A panic of the plan does not get past the C interface.
#[tokio::test]
async fn a_panic_crosses_as_an_error() {
    let sim = Sim::new();
    let (table, _) = host_stream(|i| match i {
        0 => Some(Ok(numbers(0, 16))),
        _ => panic!("the plan is broken"),
    });
    let plan = double(scan(table).await, &sim);
    let stream = export_plan(plan, session().task_ctx(), &sim, options()).unwrap();
    let mut batches = joined(read(stream, &sim)).await;
    let error = batches.pop().unwrap().unwrap_err();
    assert!(error.to_string().contains("the plan is broken"), "{error}");
    drop(batches);
    sim.assert_done();
}

async fn endless(sim: &Sim) -> (Plan, Arc<AtomicUsize>) {
    let next = |i| (i < MANY).then(|| Ok(numbers(i as i64 * 16, 16)));
    let (table, asked) = reader_table(sim, next);
    (double(scan(table).await, sim), asked)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_may_stop_early() {
    let sim = Sim::new();
    // The stream itself.
    let (plan, asked) = endless(&sim).await;
    let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    sim.assert_done();
    assert!(asked.load(SeqCst) <= 5);
    // Before the first batch, and after it, on a thread without a runtime; with tasks that the plan
    // has started.
    for batches in [0, 1] {
        let (plan, asked) = endless(&sim).await;
        let ctx = session_with(4, 1);
        let stream = export_plan(plan, ctx.task_ctx(), &sim, options()).unwrap();
        let imports = imports(&sim);
        let consumer = thread::spawn(move || {
            // SAFETY: the stream is this crate's.
            let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, imports) };
            for batch in reader.unwrap().take(batches) {
                batch.unwrap();
            }
        });
        joined(consumer).await;
        sim.assert_done();
        assert!(asked.load(SeqCst) <= 5);
    }
}

/// With tasks of its own that are under way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_may_stop_while_tasks_run() {
    let sim = Sim::new();
    let ctx = session_with(4, 1);
    let (table, asked, gone) = watched(&sim);
    register(&ctx, "t", table);
    let plan = plan(&ctx, "SELECT a, count(*) FROM t GROUP BY a").await;
    let mut stream = execute_on_device(plan, ctx.task_ctx(), &sim).unwrap();
    poll_fn(|cx| {
        assert!(stream.poll_next_unpin(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    eventually("it is under way", || asked.load(SeqCst) > 10);
    drop(stream);
    eventually("the reader goes", || gone.load(SeqCst));
    sim.assert_done();
}

/// The plan as the async device stream, to a consumer in another task.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_async_device_stream_of_a_plan() {
    let sim = Sim::new();
    let ctx = session_with(4, 2);
    let partitions = [partition(0, 3), partition(48, 3)];
    register(&ctx, "t", device_table(&sim, &partitions));
    let plan = plan(&ctx, "SELECT a FROM t").await;
    let before = sim.stats();
    let stream = execute_on_device(plan, ctx.task_ctx(), &sim).unwrap();
    // SAFETY: the producer is this crate's.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, imports(&sim)) };
    let handler = handler.into_ffi();
    let producer = tokio::spawn(produce(stream, handler, ProduceOptions::new(options())));
    let batches: Vec<_> = opening.await.unwrap().try_collect().await.unwrap();
    let outcome = producer.await.unwrap().unwrap();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert_eq!(sim.stats().since(&before).copies, 0);
    let batches: Vec<_> = batches.into_iter().map(|batch| batch.batch).collect();
    let expected: Vec<i64> = (0..96).map(|i| i * 4).collect();
    assert_eq!(sorted(found(&batches, &sim)), expected);
    drop((batches, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn errors_cross_the_async_device_stream_with_their_text() {
    let sim = Sim::new();
    let plan = failing(&sim, || DataFusionError::Execution("no such thing".into())).await;
    let stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    // SAFETY: the producer is this crate's.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, imports(&sim)) };
    let produced = produce(stream, handler.into_ffi(), ProduceOptions::new(options()));
    let producer = tokio::spawn(produced);
    let mut results: Vec<_> = opening.await.unwrap().collect().await;
    let error = results.pop().unwrap().unwrap_err();
    assert_eq!(results.len(), 2);
    assert!(error.to_string().contains("no such thing"), "{error}");
    let _ = producer.await.unwrap();
    drop(results);
    sim.assert_done();
}
