//! Results of plans as device streams.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::Poll;
use std::thread;

use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, Outcome, produce,
};
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, Error, ExportOptions,
    FFI_ArrowDeviceArrayStream, SyncPolicy,
};
use arrow_device_datafusion::{DeviceTable, execute_on_device, export_plan, to_datafusion};
use datafusion::arrow::array::RecordBatch;
use datafusion::common::DataFusionError;
use datafusion::physical_plan::execute_stream;
use futures::{StreamExt, TryStreamExt};

use crate::kit::*;

fn options() -> ExportOptions {
    ExportOptions::new(SyncPolicy::Event)
}

#[track_caller]
fn found(batches: &[DeviceRecordBatch], device: &Device) -> Vec<i64> {
    assert!(batches.iter().all(|batch| batch.device() == device));
    numbers_on(batches)
}

#[tokio::test]
async fn a_host_plan_goes_up() {
    let sim = Sim::new();
    let ctx = over(host_table(&[batches(0, 4)]));
    let plan = plan(&ctx, "SELECT a + 1 AS a FROM t WHERE a >= 16").await;
    let schema = plan.schema();
    let before = sim.stats();
    let stream = execute_on_device(plan, ctx.task_ctx(), &sim).unwrap();
    assert_eq!(stream.schema(), schema);
    assert_eq!(stream.device_type(), sim.id().device_type);
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
    let table = device_table(&sim, &[batches(0, 3)]);
    let addresses = |batches: &[DeviceRecordBatch]| {
        let values = batches.iter().map(|b| b.column(0).unwrap().buffer(1));
        let addresses = values.map(|values| values.unwrap().address());
        addresses.collect::<Vec<_>>()
    };
    let before = sim.stats();
    let plain = scan(table.clone()).await;
    let first = on_device(&plain, &sim).await.unwrap();
    let second = on_device(&plain, &sim).await.unwrap();
    assert_eq!(addresses(&first), addresses(&second));
    let cost = sim.stats().since(&before);
    assert_eq!((cost.copies, cost.allocations), (0, 0));
    assert_eq!(found(&first, &sim), multiples(48, 1));

    // With operators, and with a session's transition at the root.
    let ctx = session_with(1, 2);
    register(&ctx, "t", table);
    let plan = plan(&ctx, "SELECT a FROM t").await;
    assert_eq!(plan.name(), "DeviceToHostExec");
    let before = sim.stats();
    let batches = on_device(&plan, &sim).await.unwrap();
    let cost = sim.stats().since(&before);
    assert_eq!((cost.copies, cost.host_waits), (0, 0));
    assert_eq!(found(&batches, &sim), multiples(48, 4));
    // The nodes that ran are those of the plan.
    assert_eq!(metric(&plan, "MapExec", "output_rows"), Some(96));
    drop((first, second, batches, plan, plain, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn a_device_plan_goes_to_another_device() {
    let (a, b) = (Sim::new(), Sim::new());
    let plan = scan(device_table(&a, &[batches(0, 3)])).await;
    let (before_a, before_b) = (a.stats(), b.stats());
    let batches = on_device(&plan, &b).await.unwrap();
    let (cost_a, cost_b) = (a.stats().since(&before_a), b.stats().since(&before_b));
    assert_eq!((cost_a.bytes_to_host, cost_a.bytes_to_device), (384, 0));
    assert_eq!((cost_b.bytes_to_host, cost_b.bytes_to_device), (0, 384));
    assert_eq!(found(&batches, &b), multiples(48, 1));
    drop((plan, batches));
    b.assert_done();
    a.assert_done();
}

#[tokio::test]
async fn partitions_come_as_they_are_ready() {
    let sim = Sim::new();
    let gate = Arc::new(AtomicBool::new(false));
    let opened = gate.clone();
    let (table, _) = readers_table(&sim, 4, move |partition, i| {
        // The first two wait.
        if partition < 2 {
            eventually("the gate", || opened.load(SeqCst));
        }
        (i < 3).then(|| Ok(numbers((partition * 48 + i * 16) as i64, 16)))
    });
    let plan = scan(table).await;
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
    assert_eq!(sorted(all.clone()), multiples(192, 1));
    // Each partition in its order.
    for partition in 0..4 {
        let of = all.iter().filter(|i| **i / 48 == partition);
        assert!(of.is_sorted(), "{partition}");
    }
    drop(batches);
    sim.assert_done();
}

/// All take their turn. Without any, or without batches, there is nothing to give.
#[tokio::test]
async fn partitions_that_are_always_ready_take_turns() {
    let sim = Sim::new();
    let partitions = [batches(0, 5), batches(1000, 5), batches(2000, 1)];
    let plan = scan(device_table(&sim, &partitions)).await;
    let found = on_device(&plan, &sim).await.unwrap();
    let first_of = |batch: &DeviceRecordBatch| numbers_on(std::slice::from_ref(batch))[0] / 1000;
    let order: Vec<i64> = found.iter().map(first_of).collect();
    assert_eq!(order.len(), 11);
    for partition in 0..3 {
        let at = order.iter().position(|p| *p == partition);
        // Each partition has a place in the channel, and one batch more at hand.
        assert!(at.unwrap() < 6, "{order:?}");
    }
    let none: [Vec<RecordBatch>; 2] = [vec![], vec![]];
    for partitions in [&none[..], &none[..0]] {
        let table = device_table_of(&sim, numbers(0, 1).schema(), partitions);
        let plan = scan(table).await;
        assert_eq!(on_device(&plan, &sim).await.unwrap().len(), 0);
    }
}

/// A consumer that never waits lets others run all the same, as with DataFusion's own streams.
#[tokio::test]
async fn a_result_that_is_always_ready_yields() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let (schema, batches) = (numbers(0, 1).schema(), vec![vec![batch; 1000]]);
    let table = DeviceTable::from_batches(schema, sim.device.clone(), batches).unwrap();
    let plan = scan(Arc::new(table)).await;
    for on_host in [true, false] {
        let ran = Arc::new(AtomicBool::new(false));
        let flag = ran.clone();
        let other = tokio::spawn(async move { flag.store(true, SeqCst) });
        let context = session().task_ctx();
        let batches = if on_host {
            let stream = execute_stream(plan.clone(), context).unwrap();
            stream.map_ok(drop).map_err(drop).boxed()
        } else {
            let stream = execute_on_device(plan.clone(), context, &sim).unwrap();
            stream.map_ok(drop).map_err(drop).boxed()
        };
        assert_eq!(batches.try_collect::<Vec<_>>().await.unwrap().len(), 1000);
        assert!(ran.load(SeqCst), "on the host: {on_host}");
        other.await.unwrap();
    }
}

/// What a consumer on a thread of its own reads, which knows of no runtime.
async fn read(
    stream: FFI_ArrowDeviceArrayStream,
    sim: &Sim,
    most: usize,
) -> Vec<arrow_device::Result<DeviceRecordBatch>> {
    let device = sim.device.clone();
    let consumer = thread::spawn(move || {
        let reader = reader(stream, &device);
        assert_eq!(*reader.schema().field(0).name(), "a");
        reader.take(most).collect()
    });
    let read = tokio::task::spawn_blocking(|| consumer.join().unwrap());
    read.await.unwrap()
}

/// Tasks that the plan starts on the way run in the runtime: the consumer's thread is in it
/// meanwhile.
async fn assert_exports() {
    let sim = Sim::new();
    let partitions = [batches(0, 3), batches(48, 3), batches(96, 4)];
    for (doubles, sql) in [
        (0, "SELECT a FROM t"),
        (2, "SELECT a FROM t"),
        (1, "SELECT a, count(*) FROM t GROUP BY a"),
        (1, "SELECT a FROM t ORDER BY a"),
    ] {
        let ctx = session_with(4, doubles);
        register(&ctx, "t", device_table(&sim, &partitions));
        let stream = export(plan(&ctx, sql).await, ctx.task_ctx(), &sim);
        let batches = read(stream, &sim, MANY).await.into_iter();
        let batches: Vec<_> = batches.map(Result::unwrap).collect();
        let expected = multiples(160, 1 << doubles);
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
fn outside_a_runtime_nothing_runs() {
    let sim = Sim::new();
    let table = device_table(&sim, &[batches(0, 1)]);
    let plan = futures::executor::block_on(scan(table));
    let exported = export_plan(plan.clone(), session().task_ctx(), &sim, options());
    let error = fails(exported, &["Tokio runtime"]);
    assert!(matches!(error, DataFusionError::Execution(_)), "{error:?}");
    let started = execute_on_device(plan, session().task_ctx(), &sim);
    fails(started, &["Tokio runtime"]);
    sim.assert_done();
}

/// A plan whose third batch is an error, or a panic.
async fn failing(sim: &Sim, error: fn() -> DataFusionError) -> Plan {
    let (table, _) = host_stream(move |i| match i {
        0 | 1 => Some(Ok(numbers(i as i64 * 16, 16))),
        _ => Some(Err(error())),
    });
    double(scan(table).await, sim)
}

/// In the stream itself, in the C stream, where one of ours keeps its errno, and in the async one. A panic gets no further.
#[tokio::test]
async fn errors_come_after_the_batches_before_them_with_their_text() {
    let sim = Sim::new();
    type Case = (fn() -> DataFusionError, &'static str, i32);
    let cases: [Case; 3] = [
        (
            || DataFusionError::Execution("no such thing".into()),
            "no such thing",
            5,
        ),
        (
            || {
                to_datafusion(Error::Cancelled {
                    operation: "a scan",
                })
            },
            "a scan",
            125,
        ),
        (|| panic!("the plan is broken"), "the plan is broken", 5),
    ];
    for (error, text, errno) in cases {
        let context = || session().task_ctx();
        let stream = export(failing(&sim, error).await, context(), &sim);
        let over_c = read(stream, &sim, MANY).await;
        let stream = execute_on_device(failing(&sim, error).await, context(), &sim).unwrap();
        // SAFETY: the producer is this crate's.
        let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, imports(&sim)) };
        // SAFETY: the handler is this crate's, and goes to this producer alone.
        let produced = unsafe { produce(stream, handler, options()) };
        let producer = tokio::spawn(produced);
        let over_async: Vec<_> = opening.await.unwrap().collect().await;
        let _ = producer.await.unwrap();
        let stream = execute_on_device(failing(&sim, error).await, context(), &sim).unwrap();
        for (i, mut found) in [stream.collect().await, over_c, over_async]
            .into_iter()
            .enumerate()
        {
            let error = fails(found.pop().unwrap(), &[text]);
            assert!(i != 1 || error.errno() == errno, "{error:?}");
            assert!(
                found.len() <= 2 && found.iter().all(Result::is_ok),
                "{text}"
            );
            assert!(found.len() == 2 || errno == 5, "{text}");
        }
    }
    sim.assert_done();
}

/// A failing kernel is found by who reads: its batch is out before.
#[tokio::test]
async fn a_failing_kernel_is_told_by_its_batch() {
    let sim = Sim::new();
    let host = scan(host_table(&[batches(0, 2)])).await;
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
    let id = sim.id().to_string();
    says(&error.unwrap(), &["the kernel is broken", &id]);
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
    // Before the first batch, and after it, on a thread without a runtime.
    for batches in [0, 1] {
        let (plan, asked) = endless(&sim).await;
        let stream = export(plan, session_with(4, 1).task_ctx(), &sim);
        assert_eq!(read(stream, &sim, batches).await.len(), batches);
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
    register(
        &ctx,
        "t",
        device_table(&sim, &[batches(0, 3), batches(48, 3)]),
    );
    let plan = plan(&ctx, "SELECT a FROM t").await;
    let before = sim.stats();
    let stream = execute_on_device(plan, ctx.task_ctx(), &sim).unwrap();
    // SAFETY: the producer is this crate's.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, imports(&sim)) };
    // SAFETY: the handler is this crate's, and goes to this producer alone.
    let producer = tokio::spawn(unsafe { produce(stream, handler, options()) });
    let batches: Vec<_> = opening.await.unwrap().try_collect().await.unwrap();
    let outcome = producer.await.unwrap().unwrap();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert_eq!(sim.stats().since(&before).copies, 0);
    assert_eq!(sorted(found(&batches, &sim)), multiples(96, 4));
    drop((batches, ctx));
    sim.assert_done();
}
