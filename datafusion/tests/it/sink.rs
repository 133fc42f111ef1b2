//! Results of plans as device streams.

use std::future::poll_fn;

use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, Outcome, produce,
};

use crate::kit::*;
use crate::nodes::*;
use crate::transfers::moved;

fn options() -> ExportOptions {
    ExportOptions::new(SyncPolicy::Event)
}

#[track_caller]
fn found(batches: &[DeviceRecordBatch], device: &Device) -> Vec<i64> {
    assert!(batches.iter().all(|batch| batch.device() == device));
    numbers_on(batches)
}

/// Rows of the host go up, those of a device stay there, or move to the device where they are wanted.
#[tokio::test]
async fn a_result_comes_to_the_device_where_it_is_wanted() {
    let (a, b) = (Sim::new(), Sim::new());
    let there = planned("Numbers A 2 1", &[&a], &[]);
    for (line, to, factor, on_a, on_b) in [
        ("Numbers 3", &a, 1, [384, 0, 0, 3, 0], [0; 5]),
        ("There", &a, 1, [0; 5], [0; 5]),
        (
            "CoalescePartitions < Projection a < Down < There",
            &a,
            1,
            [0; 5],
            [0; 5],
        ),
        ("Down < Map A < Map A < There", &a, 4, [0; 5], [0; 5]),
        ("There", &b, 1, [0, 384, 0, 3, 0], [384, 0, 0, 3, 0]),
    ] {
        let plan = planned(line, &[&a, &b], &[("There", &there)]);
        let before = [a.stats(), b.stats()];
        let stream = started_on(&plan, to);
        assert_eq!(stream.schema(), plan.schema());
        assert_eq!(stream.device_type(), to.id().device_type);
        let batches: Vec<_> = stream.try_collect().await.unwrap();
        let cost = [a.stats().since(&before[0]), b.stats().since(&before[1])];
        assert_eq!(cost.each_ref().map(moved), [on_a, on_b], "{line}");
        assert_eq!(sorted(found(&batches, to)), multiples(48, factor), "{line}");
        if factor == 1 && on_b == [0; 5] {
            let made = cost[0].allocations;
            assert_eq!(made, on_a[3], "the table's own memory comes out");
        }
        // The nodes that ran are those of the plan.
        let rows = metric(&plan, "MapExec", "output_rows");
        assert_eq!(rows, (factor == 4).then_some(96), "{line}");
    }
    drop(there);
    b.assert_done();
    a.assert_done();
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

/// What a consumer of the async device stream gets, in another task, and how that ended.
async fn read_async(
    stream: SendableDeviceStream,
    sim: &Sim,
) -> (
    Vec<arrow_device::Result<DeviceRecordBatch>>,
    Option<Outcome>,
) {
    // SAFETY: the handler goes to one producer, which keeps to the interface: this crate's.
    let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(2, imports(sim)) };
    // SAFETY: the handler is this crate's, and goes to this producer alone.
    let producer = tokio::spawn(unsafe { produce(stream, handler, options()) });
    let found = opening.await.unwrap().collect().await;
    (found, producer.await.unwrap().ok())
}

/// As the C stream and as the async one. Tasks that the plan starts on the way run in the runtime: the consumer's thread is in it meanwhile.
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
        let over_c = read(stream, &sim, MANY).await;
        let stream = execute_on_device(plan(&ctx, sql).await, ctx.task_ctx(), &sim);
        let before = sim.stats();
        let (over_async, outcome) = read_async(stream.unwrap(), &sim).await;
        assert!(matches!(outcome, Some(Outcome::Completed)), "{outcome:?}");
        if sql == "SELECT a FROM t" {
            assert_eq!(sim.stats().since(&before).copies, 0);
        }
        for batches in [over_c, over_async] {
            let batches: Vec<_> = batches.into_iter().map(Result::unwrap).collect();
            let mut numbers = found(&batches, &sim);
            if !sql.contains("ORDER BY") {
                numbers = sorted(numbers);
            }
            assert_eq!(numbers, multiples(160, 1 << doubles), "{sql}");
        }
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
    let plan = planned("Down < Scan A", &[&sim], &[]);
    let exported = export_plan(plan.clone(), session().task_ctx(), &sim, options());
    let error = fails(exported, &["Tokio runtime"]);
    assert!(matches!(error, DataFusionError::Execution(_)), "{error:?}");
    let started = execute_on_device(plan, session().task_ctx(), &sim);
    fails(started, &["Tokio runtime"]);
    sim.assert_done();
}

/// In the stream itself, in the C stream, where one of ours keeps its errno, and in the async one. A panic gets no further.
#[tokio::test]
async fn errors_come_after_the_batches_before_them_with_their_text() {
    let sim = Sim::new();
    type Case = (fn() -> DataFusionError, &'static str, i32);
    let cancelled = || {
        to_datafusion(Error::Cancelled {
            operation: "a scan",
        })
    };
    let cases: [Case; 3] = [
        (
            || DataFusionError::Execution("no such thing".into()),
            "no such thing",
            5,
        ),
        (cancelled, "a scan", 125),
        (|| panic!("the plan is broken"), "the plan is broken", 5),
    ];
    for (error, text, errno) in cases {
        let failing = async || double(broken(2, error).await, &sim);
        let exported = export(failing().await, session().task_ctx(), &sim);
        let over_c = read(exported, &sim, MANY).await;
        let start = async || started_on(&failing().await, &sim);
        let (over_async, _) = read_async(start().await, &sim).await;
        let own: Vec<_> = start().await.collect().await;
        for (i, mut found) in [own, over_c, over_async].into_iter().enumerate() {
            let error = fails(found.pop().unwrap(), &[text]);
            assert!(i != 1 || error.errno() == errno, "{error:?}");
            let good = found.iter().all(Result::is_ok);
            assert!(found.len() <= 2 && good, "{text}");
            assert!(found.len() == 2 || errno == 5, "{text}");
        }
    }
    sim.assert_done();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_may_stop_early() {
    let sim = Sim::new();
    let context = || session_with(4, 1).task_ctx();
    // Before the first batch, and after it: the stream itself, and on a thread without a runtime.
    for (over_c, most) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let (table, asked, _) = watched(&sim);
        let plan = double(scan(table).await, &sim);
        if over_c {
            let stream = export(plan, context(), &sim);
            assert_eq!(read(stream, &sim, most).await.len(), most);
        } else {
            let stream = execute_on_device(plan, context(), &sim).unwrap();
            assert_eq!(stream.take(most).count().await, most);
        }
        sim.assert_done();
        assert!(asked.load(SeqCst) <= 5);
    }
    // With tasks of its own that are under way.
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
