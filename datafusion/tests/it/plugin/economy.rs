//! What a filter keeps, joins and loads.

use std::sync::Arc;

use arrow_device::device::sim::SimMode;
use arrow_device::{Device, DeviceId, DeviceRecordBatch};
use arrow_device_datafusion::{
    DeviceExec, DeviceResolver, DeviceSpec, DeviceTable, DeviceTransitions, execute_on_device,
};
use datafusion::arrow::array::{Int64Array, RecordBatch, StringArray, StringViewArray};
use datafusion::arrow::compute::concat_batches;
use datafusion::datasource::MemTable;
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use super::kit::*;
use crate::device_filter::PushFilterToDevice;

/// So many rows of a number, a text of 32 bytes and a view of one.
fn wide(first: i64, rows: i64) -> RecordBatch {
    let numbers = first..first + rows;
    let text = |n: i64| format!("text number {n:020}");
    RecordBatch::try_from_iter([
        (
            "n",
            Arc::new(Int64Array::from_iter_values(numbers.clone())) as _,
        ),
        (
            "s",
            Arc::new(StringArray::from_iter_values(numbers.clone().map(text))) as _,
        ),
        (
            "v",
            Arc::new(StringViewArray::from_iter_values(numbers.map(text))) as _,
        ),
    ])
    .unwrap()
}

fn table(device: &Device, batches: &[RecordBatch]) -> SessionContext {
    let up = batches.iter().map(|b| device.upload(b).unwrap()).collect();
    let schema = batches[0].schema();
    let table = DeviceTable::from_batches(schema, device.clone(), vec![up]).unwrap();
    session(Arc::new(table), 1, true)
}

/// The batches of a query, on the device.
async fn on_device(context: &SessionContext, device: &Device, sql: &str) -> Vec<DeviceRecordBatch> {
    let query = plan(context, sql).await;
    let stream = execute_on_device(query, context.task_ctx(), device).unwrap();
    stream.map(Result::unwrap).collect().await
}

/// A result of 20 of 20,000 rows keeps the bytes of 20 rows: nothing of its input, and no larger buffers.
#[tokio::test]
async fn a_result_keeps_its_own_bytes() {
    let (device, sim) = sim(SimMode::Async);
    let context = table(&device, &[wide(0, 20_000)]);
    let found = on_device(
        &context,
        &device,
        "SELECT n, s, v FROM t WHERE n >= 100 AND n < 120",
    )
    .await;
    let rows: usize = found.iter().map(DeviceRecordBatch::num_rows).sum();
    assert_eq!((found.len(), rows), (1, 20));
    let expected = wide(100, 20);
    assert_eq!(found[0].to_host().unwrap(), expected);
    drop(context);
    device.synchronize().unwrap();
    // Numbers; offsets and text; views and what they refer to: each rounded up to 64 bytes.
    let rounded = |bytes: usize| bytes.next_multiple_of(64);
    let kept =
        rounded(20 * 8) + rounded(21 * 4) + rounded(20 * 32) + rounded(20 * 16) + rounded(20 * 32);
    assert_eq!(found[0].get_array_memory_size(), kept);
    assert_eq!(live_bytes(&sim, kept), kept);
    drop(found);
    assert_done(&device, &sim);
}

/// Waits until no more bytes are live than these, for up to 10 seconds. Returns how many are.
fn live_bytes(sim: &arrow_device::device::sim::SimDevice, expected: usize) -> usize {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let live = sim.report().live_bytes;
        if live == expected || std::time::Instant::now() > end {
            return live;
        }
        std::thread::yield_now();
    }
}

/// Of 40 batches a few rows each pass: 16 results become one, without a copy more. Large results are not joined.
#[tokio::test]
async fn small_results_are_joined() {
    let (device, _) = sim(SimMode::Async);
    let batches: Vec<_> = (0..40).map(|i| wide(i * 1000, 1000)).collect();
    let context = table(&device, &batches);
    let schema = batches[0].schema();
    let host = MemTable::try_new(schema.clone(), vec![batches]).unwrap();
    let host = session(Arc::new(host), 1, false);
    for (sql, sizes) in [
        (
            "SELECT s, v, n FROM t WHERE s <> 'x' AND n <> 500 AND n >= 990",
            vec![9010, 9000, 9000, 9000, 3000],
        ),
        (
            "SELECT n, v, s FROM t WHERE s = 'text number 00000000000000017500'",
            vec![1],
        ),
        ("SELECT n FROM t WHERE n < 15007", vec![9000, 6007]),
        ("SELECT n, s FROM t WHERE n >= 38990", vec![1010]),
    ] {
        let before = device.stats();
        let found = on_device(&context, &device, sql).await;
        let moved = device.stats().since(&before);
        assert_eq!(moved.host_waits, 0, "{sql}");
        assert!(moved.bytes_on_device == 0, "{sql}: {moved:?}");
        let rows: Vec<_> = found.iter().map(DeviceRecordBatch::num_rows).collect();
        assert_eq!(rows, sizes, "{sql}");
        let found: Vec<_> = found.iter().map(|b| b.to_host().unwrap()).collect();
        let found = concat_batches(&found[0].schema(), &found).unwrap();
        let expected = super::kit::rows(&host, plan(&host, sql).await).await;
        assert_eq!(found, expected[0], "{sql}");
    }
    // One row of each batch: the batches of at most 16 inputs wait for each other.
    let each = (0..40).map(|i| wide(i * 1000, 1000));
    let each: Vec<_> = each
        .enumerate()
        .map(|(i, batch)| {
            let numbers = (0..1000).map(|n| if n == 7 * i { -1 } else { n as i64 });
            let mut columns = batch.columns().to_vec();
            columns[0] = Arc::new(Int64Array::from_iter_values(numbers));
            RecordBatch::try_new(batch.schema(), columns).unwrap()
        })
        .collect();
    let context = table(&device, &each);
    let found = on_device(&context, &device, "SELECT n, s FROM t WHERE n = -1").await;
    let rows: Vec<_> = found.iter().map(DeviceRecordBatch::num_rows).collect();
    assert_eq!(rows, [16, 16, 8]);
    drop((context, host, found));
}

/// A session with the rule, which uploads to `spec`, and with these devices.
fn with_rule(
    rule: &Arc<PushFilterToDevice>,
    spec: DeviceSpec,
    devices: &[Device],
) -> SessionContext {
    let resolver = DeviceResolver::of(devices.iter().cloned());
    let config = SessionConfig::new()
        .with_target_partitions(PARTITIONS)
        .with_extension(Arc::new(resolver));
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(PushFilterToDevice::uploads(spec)))
        .with_physical_optimizer_rule(rule.clone())
        .with_physical_optimizer_rule(Arc::new(DeviceTransitions));
    let context = SessionContext::new_with_state(state.build());
    let partition = |p: i64| vec![batch(2 * p), batch(2 * p + 1)];
    let partitions = (0..PARTITIONS as i64).map(partition).collect();
    let table = MemTable::try_new(batch(0).schema(), partitions).unwrap();
    context.register_table("t", Arc::new(table)).unwrap();
    context
}

/// Plans are made without any device. Kernels are loaded by a device's first filter, and go with the device.
#[tokio::test]
async fn kernels_are_loaded_once_per_device() {
    let (first, _sim) = sim(SimMode::Async);
    let spec = DeviceSpec::any(first.id().device_type);
    let rule = Arc::new(PushFilterToDevice::default());
    let with_rule = |devices: &[Device]| with_rule(&rule, spec.clone(), devices);
    let sql = "SELECT id, s FROM t WHERE a > 3";
    let absent = with_rule(&[]);
    let query = plan(&absent, sql).await;
    assert!(
        text(&query).contains("DeviceFilterExec"),
        "{}",
        text(&query)
    );
    assert_eq!(rule.kernels().loads(), 0, "nothing was opened to plan");
    let error = datafusion::physical_plan::collect(query, absent.task_ctx()).await;
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("sim") && error.contains("the session offers []"),
        "{error}"
    );

    let context = with_rule(std::slice::from_ref(&first));
    let all = rows(&context, plan(&context, sql).await).await;
    for _ in 0..3 {
        assert_eq!(rows(&context, plan(&context, sql).await).await, all);
    }
    let other = "SELECT n, id FROM t WHERE s = 'row 7' OR false";
    rows(&context, plan(&context, other).await).await;
    assert_eq!(
        rule.kernels().loads(),
        1,
        "for all partitions, queries and filters"
    );

    // Partitions on two devices.
    let (second, second_sim) = sim(SimMode::Async);
    let both = with_rule(&[first.clone(), second.clone()]);
    assert_eq!(rows(&both, plan(&both, sql).await).await, all);
    assert_eq!((rule.kernels().loads(), rule.kernels().len()), (2, 2));
    drop(both);
    assert_done(&second, &second_sim);
    drop(second);
    assert_eq!(rows(&context, plan(&context, sql).await).await, all);
    assert_eq!((rule.kernels().loads(), rule.kernels().len()), (2, 1));

    // A device that is described by its number.
    let numbered = DeviceSpec::from(DeviceId::new(first.id().device_type, first.id().id));
    let context = self::with_rule(&rule, numbered.clone(), &[first]);
    let query = plan(&context, sql).await;
    let node = query.children()[0];
    assert_eq!(DeviceExec::of(node).unwrap().device(), &numbered);
    assert_eq!(rows(&context, query).await, all);
}
