//! Several partitions as one stream, and results that are read on threads of the runtime.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use arrow_device::async_stream::DeviceRecordBatchStreamAdapter;
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchStreamReader, Devices, ExportOptions,
    FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy,
};
use arrow_device_datafusion::{
    DeviceExec, DeviceTable, HostToDeviceExec, ScanRequest, SendableDeviceStream,
    execute_on_device, export_plan,
};
use datafusion::arrow::array::RecordBatch;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::physical_plan::union::UnionExec;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::{FutureExt, StreamExt, TryStreamExt};

use crate::kit::*;

pub(crate) type Sent = arrow_device::Result<DeviceRecordBatch>;

/// A table whose partitions give what is sent, and the senders.
pub(crate) fn sent(
    device: &Device,
    partitions: usize,
) -> (Arc<DeviceTable>, Vec<UnboundedSender<Sent>>) {
    let schema = numbers(0, 1).schema();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..partitions).map(|_| unbounded()).unzip();
    let receivers: Vec<_> = receivers.into_iter().map(|r| Mutex::new(Some(r))).collect();
    let of = schema.clone();
    let open = move |request: ScanRequest| {
        let receiver: UnboundedReceiver<Sent> = {
            let mut receiver = receivers[request.partition].lock().unwrap();
            receiver.take().expect("one scan")
        };
        let (schema, device_type) = (of.clone(), request.device.id().device_type);
        async move {
            Ok(DeviceRecordBatchStreamAdapter::new(
                schema,
                device_type,
                receiver,
            ))
        }
    };
    let table = DeviceTable::from_streams(schema, device.clone(), partitions, open);
    (Arc::new(table), senders)
}

/// The next item, which must come without any other's being sent.
async fn next(stream: &mut SendableDeviceStream) -> Option<Sent> {
    let end = Instant::now() + LONG;
    loop {
        if let Some(next) = stream.next().now_or_never() {
            return next;
        }
        assert!(Instant::now() < end, "what was sent never came");
        tokio::task::yield_now().await;
    }
}

/// A partition that ends takes no other's turn: what is there is given, and who has nothing is
/// asked for a wake-up.
#[tokio::test]
async fn a_partition_that_ends_takes_no_others_turn() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    for ends in 0..4 {
        for gives in (0..4).filter(|gives| *gives != ends) {
            let (table, senders) = sent(&sim, 4);
            let mut senders: Vec<_> = senders.into_iter().map(Some).collect();
            let plan = scan(table).await;
            let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
            let send = |senders: &[Option<UnboundedSender<Sent>>]| {
                let sender = senders[gives].as_ref().unwrap();
                sender.unbounded_send(Ok(batch.clone())).unwrap();
            };
            send(&senders);
            let first = next(&mut stream).await;
            assert_eq!(first.unwrap().unwrap().num_rows(), 16);
            // Both at once, after a turn in which all were asked.
            send(&senders);
            senders[ends] = None;
            let second = next(&mut stream).await;
            assert_eq!(second.unwrap().unwrap().num_rows(), 16);
            assert!(stream.next().now_or_never().is_none());
            senders.clear();
            assert!(next(&mut stream).await.is_none());
        }
    }
    drop(batch);
    sim.assert_done();
}

/// A table of these partitions, whose streams do something before each batch.
fn watched_table(
    device: &Device,
    partitions: usize,
    before: impl Fn(usize, usize) + Clone + Send + Sync + 'static,
) -> Arc<DeviceTable> {
    let batch = device.upload(&numbers(0, 16)).unwrap();
    let (schema, device_type) = (batch.schema(), device.id().device_type);
    let of = schema.clone();
    let open = move |request: ScanRequest| {
        let (batch, before, partition) = (batch.clone(), before.clone(), request.partition);
        let batches = futures::stream::iter(0..8).map(move |i| {
            before(partition, i);
            Ok(batch.clone())
        });
        let stream = DeviceRecordBatchStreamAdapter::new(of.clone(), device_type, batches);
        async move { Ok(stream) }
    };
    let table = DeviceTable::from_streams(schema, device.clone(), partitions, open);
    Arc::new(table)
}

/// Two partitions, of which neither gives a batch before the other is about to: in one task,
/// this would take for ever. A worker that waits leaves its other tasks to another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_run_at_the_same_time() {
    let sim = Sim::new();
    let (met, both) = (Arc::new(Barrier::new(2)), Arc::new(AtomicUsize::new(0)));
    let meets = both.clone();
    let table = watched_table(&sim, 2, move |_, _| {
        tokio::task::block_in_place(|| met.wait());
        meets.fetch_add(1, SeqCst);
    });
    let plan = scan(table).await;
    let stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    assert_eq!((batches.len(), both.load(SeqCst)), (16, 16));
    drop(batches);
    sim.assert_done();
}

/// A fast partition beside seven that have nothing yet has no more room than its own.
#[tokio::test]
async fn tasks_are_one_batch_ahead() {
    let sim = Sim::new();
    let made = Arc::new(AtomicUsize::new(0));
    let counts = made.clone();
    let fast = watched_table(&sim, 1, move |_, _| {
        counts.fetch_add(1, SeqCst);
    });
    let (slow, senders) = sent(&sim, 7);
    let plan = UnionExec::try_new(vec![scan(fast).await, scan(slow).await]).unwrap();
    let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    for read in 0..8 {
        // All tasks run until they can no more.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(made.load(SeqCst), read + 1, "after {read} batches");
        next(&mut stream).await.unwrap().unwrap();
    }
    drop(senders);
    assert!(next(&mut stream).await.is_none());
    drop(stream);
    sim.assert_done();
}

/// What waits to be taken is reserved, and no more than that.
#[tokio::test]
async fn a_batch_that_waits_for_the_reader_is_reserved() {
    let sim = Sim::new();
    let pool = Arc::new(GreedyMemoryPool::new(1 << 20));
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool.clone());
    let config = SessionConfig::new().with_batch_size(16);
    let context = SessionContext::new_with_config_rt(config, runtime.build_arc().unwrap());
    let partition = || (0..4).map(|i| numbers(i * 16, 16)).collect::<Vec<_>>();
    let plan = scan(host_table(&[partition(), partition()])).await;
    let upload = HostToDeviceExec::new(plan, &sim).with_target(0, 0);
    let plan: Plan = Arc::new(DeviceExec::new(Arc::new(upload)));
    let mut stream = execute_on_device(plan, context.task_ctx(), &sim).unwrap();
    for _ in 0..8 {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        // 16 numbers of 8 bytes for each partition that has not ended.
        assert!([128, 256].contains(&pool.reserved()), "{}", pool.reserved());
        next(&mut stream).await.unwrap().unwrap();
    }
    assert!(next(&mut stream).await.is_none());
    assert_eq!(pool.reserved(), 0);
}

/// A panic is told at once, though another partition never ends, and with its text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_one_partition_ends_the_result() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 1);
    let panics = watched_table(&sim, 1, |_, _| panic!("a defect of the source"));
    let plan = UnionExec::try_new(vec![scan(table).await, scan(panics).await]).unwrap();
    let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    let error = next(&mut stream).await.unwrap().unwrap_err();
    assert!(
        error.to_string().contains("a defect of the source"),
        "{error}"
    );
    assert!(stream.next().await.is_none());
    // The other partition's task was aborted, which drops what it reads.
    eventually("the other partition ended", || senders[0].is_closed());
}

/// Dropping the result ends every partition, those that wait and those that are busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_result_ends_every_partition() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 4);
    let plan = scan(table).await;
    let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    senders[1].unbounded_send(Ok(batch.clone())).unwrap();
    next(&mut stream).await.unwrap().unwrap();
    // Partition 2 has more than the channel holds.
    for _ in 0..10 {
        senders[2].unbounded_send(Ok(batch.clone())).unwrap();
    }
    drop((stream, batch));
    eventually("all ended", || {
        senders.iter().all(|sender| sender.is_closed())
    });
    drop(senders);
    sim.assert_done();
}

/// A query's order is that of its result.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordered_query_comes_in_its_order() {
    let sim = Sim::new();
    let ctx = session_with(4, 1);
    let partition = |p: i64| (0..8).map(|i| numbers((i * 4 + p) * 16, 16)).collect();
    let partitions: Vec<Vec<RecordBatch>> = (0..4).map(partition).collect();
    register(&ctx, "t", device_table(&sim, &partitions));
    let plan = plan(&ctx, "SELECT a FROM t ORDER BY a DESC").await;
    let stream = execute_on_device(plan, ctx.task_ctx(), &sim).unwrap();
    let batches: Vec<DeviceRecordBatch> = stream.try_collect().await.unwrap();
    let host: Vec<_> = batches.iter().map(|b| b.to_host().unwrap()).collect();
    let expected: Vec<i64> = (0..512).rev().map(|i| i * 2).collect();
    assert_eq!(numbers_of(&host), expected);
}

fn read(stream: FFI_ArrowDeviceArrayStream, device: &Device) -> usize {
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let options = ImportOptions::default().with_devices(devices);
    // SAFETY: the stream is this crate's.
    let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options) }.unwrap();
    reader.map(|batch| batch.unwrap().num_rows()).sum()
}

const BATCHES: i64 = 400;

async fn exported(sim: &Sim) -> FFI_ArrowDeviceArrayStream {
    let partition = || -> Vec<RecordBatch> { (0..BATCHES).map(|i| numbers(i * 16, 16)).collect() };
    let ctx = session_with(4, 0);
    register(&ctx, "t", host_table(&[partition(), partition()]));
    // With tasks that are spawned while the result is read.
    let plan = plan(&ctx, "SELECT a, count(*) AS a2 FROM t GROUP BY a").await;
    let options = ExportOptions::new(SyncPolicy::Event);
    export_plan(plan, ctx.task_ctx(), sim, options).unwrap()
}

/// More batches than a task may take without giving its thread back, read in a task.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_may_be_read_on_a_worker_of_its_runtime() {
    let sim = Sim::new();
    let stream = exported(&sim).await;
    let device = sim.device.clone();
    let rows = tokio::spawn(async move { read(stream, &device) });
    assert_eq!(rows.await.unwrap(), 6400);
    let stream = exported(&sim).await;
    assert_eq!(read(stream, &sim), 6400);
    sim.assert_done();
}

/// A plan that gives many batches one by one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_batches_may_be_read_on_a_worker() {
    let sim = Sim::new();
    let batches: Vec<_> = (0..BATCHES).map(|i| numbers(i * 16, 16)).collect();
    let plan = scan(host_table(&[batches])).await;
    let options = ExportOptions::new(SyncPolicy::Event);
    let stream = export_plan(plan, session().task_ctx(), &sim, options).unwrap();
    let device = sim.device.clone();
    let rows = tokio::spawn(async move { read(stream, &device) });
    assert_eq!(rows.await.unwrap(), 6400);
    sim.assert_done();
}

/// Nobody could run the plan's tasks: an error, not a wait for ever.
#[tokio::test(flavor = "current_thread")]
async fn on_the_only_thread_of_its_runtime_it_is_an_error() {
    let sim = Sim::new();
    let stream = exported(&sim).await;
    let devices = Devices::new();
    devices.add(sim.device.clone()).unwrap();
    let options = ImportOptions::default().with_devices(devices);
    // SAFETY: the stream is this crate's.
    let mut reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options) }.unwrap();
    let e = reader.next().unwrap().unwrap_err();
    assert!(e.to_string().contains("runtime"), "{e}");
}

/// Outside a runtime there is nothing to run a plan.
#[test]
fn outside_a_runtime_it_is_an_error() {
    let sim = Sim::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let plan = runtime.block_on(scan(host_table(&[vec![numbers(0, 16)]])));
    let e = execute_on_device(plan, session().task_ctx(), &sim)
        .err()
        .unwrap();
    assert!(e.to_string().contains("Tokio"), "{e}");
}
