//! Several partitions as one stream, and results that are read on threads of the runtime.

use std::sync::{Arc, Mutex};

use arrow_device::async_stream::DeviceRecordBatchStreamAdapter;
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchStreamReader, Devices, ExportOptions,
    FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy,
};
use arrow_device_datafusion::{DeviceTable, OpenPartition, execute_on_device, export_plan};
use datafusion::arrow::array::RecordBatch;
use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::{FutureExt, StreamExt};

use crate::kit::*;

type Sent = arrow_device::Result<DeviceRecordBatch>;

/// A table whose partitions give what is sent, and the senders.
fn sent(device: &Device, partitions: usize) -> (Arc<DeviceTable>, Vec<UnboundedSender<Sent>>) {
    let schema = numbers(0, 1).schema();
    let open = |receiver: UnboundedReceiver<Sent>| -> OpenPartition {
        let (receiver, schema) = (Mutex::new(Some(receiver)), schema.clone());
        let device_type = device.id().device_type;
        Arc::new(move |_| {
            let receiver = receiver.lock().unwrap().take().expect("one scan");
            let schema = schema.clone();
            Ok(Box::pin(DeviceRecordBatchStreamAdapter::new(
                schema,
                device_type,
                receiver,
            )))
        })
    };
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..partitions).map(|_| unbounded()).unzip();
    let partitions = receivers.into_iter().map(open).collect();
    let table = DeviceTable::new(schema.clone(), device.clone(), partitions);
    (Arc::new(table), senders)
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
            let first = stream.next().now_or_never().flatten();
            assert_eq!(first.unwrap().unwrap().num_rows(), 16);
            // Both at once, after a turn in which all were asked.
            send(&senders);
            senders[ends] = None;
            let next = stream.next().now_or_never();
            let next = next.unwrap_or_else(|| panic!("{ends} ends, {gives} was not asked"));
            assert_eq!(next.unwrap().unwrap().num_rows(), 16);
            assert!(stream.next().now_or_never().is_none());
            senders.clear();
            assert!(stream.next().await.is_none());
        }
    }
    drop(batch);
    sim.assert_done();
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
