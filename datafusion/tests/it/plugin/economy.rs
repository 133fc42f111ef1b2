//! What a filter keeps, joins and loads.

use std::sync::Arc;
use std::time::Duration;

use arrow_device::{Device, DeviceId, DeviceRecordBatch, TransferStats};
use arrow_device_datafusion::{
    DeviceExec, DeviceResolver, DeviceRule, DeviceSpec, DeviceTable, execute_on_device,
};
use datafusion::arrow::array::{
    ArrayRef, Date32Array, Decimal128Array, Int64Array, RecordBatch, StringArray, StringViewArray,
};
use datafusion::arrow::compute::concat_batches;
use datafusion::datasource::MemTable;
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::{FutureExt, StreamExt};

use super::kit::*;
use crate::device_filter::FilterPlugin;

/// So many rows of a number, a text of 32 bytes and a view of one.
fn wide(first: i64, rows: i64) -> RecordBatch {
    let numbers = first..first + rows;
    let text = |n: i64| format!("text number {n:020}");
    let texts = || numbers.clone().map(text);
    let columns: [(_, ArrayRef); 3] = [
        ("n", Arc::new(Int64Array::from_iter_values(numbers.clone()))),
        ("s", Arc::new(StringArray::from_iter_values(texts()))),
        ("v", Arc::new(StringViewArray::from_iter_values(texts()))),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
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
    let sim = Sim::new();
    let context = table(&sim, &[wide(0, 20_000)]);
    let sql = "SELECT n, s, v FROM t WHERE n >= 100 AND n < 120";
    let found = on_device(&context, &sim, sql).await;
    let rows: usize = found.iter().map(DeviceRecordBatch::num_rows).sum();
    assert_eq!((found.len(), rows), (1, 20));
    let expected = wide(100, 20);
    assert_eq!(found[0].to_host().unwrap(), expected);
    drop(context);
    sim.synchronize().unwrap();
    // Numbers; offsets and text; views and what they refer to: each rounded up to 64 bytes.
    let rounded = |bytes: usize| bytes.next_multiple_of(64);
    let kept =
        rounded(20 * 8) + rounded(21 * 4) + rounded(20 * 32) + rounded(20 * 16) + rounded(20 * 32);
    assert_eq!(found[0].get_array_memory_size(), kept);
    crate::kit::eventually("nothing else is left", || {
        sim.sim.report().live_bytes == kept
    });
    drop(found);
    sim.assert_done();
}

/// Of 40 batches some rows each pass: those of 16 become one batch, without a copy more.
#[tokio::test]
async fn small_results_are_joined() {
    let sim = Sim::new();
    let batches: Vec<_> = (0..40).map(|i| wide(i * 1000, 1000)).collect();
    let context = table(&sim, &batches);
    let schema = batches[0].schema();
    let host = MemTable::try_new(schema, vec![batches]).unwrap();
    let host = session(Arc::new(host), 1, false);
    let all = "SELECT s, v, n FROM t WHERE s <> 'x' AND n <> 500 AND n >= 990";
    for (sql, sizes) in [
        (all, vec![15_010, 16_000, 8000]),
        ("SELECT n FROM t WHERE n < 15007", vec![15_007]),
        ("SELECT n, s FROM t WHERE n >= 38990", vec![1010]),
    ] {
        let before = sim.stats();
        let found = on_device(&context, &sim, sql).await;
        let moved = sim.stats().since(&before);
        assert_eq!((moved.host_waits, moved.bytes_on_device), (0, 0), "{sql}");
        let rows: Vec<_> = found.iter().map(DeviceRecordBatch::num_rows).collect();
        assert_eq!(rows, sizes, "{sql}");
        let found = crate::kit::to_host(&found);
        let found = concat_batches(&found[0].schema(), &found).unwrap();
        let expected = super::kit::rows(&host, plan(&host, sql).await).await;
        assert_eq!(found, expected[0], "{sql}");
    }
    // One row of each batch: the batches of at most 16 inputs wait for each other.
    let each: Vec<_> = (0..40).map(|_| wide(0, 100)).collect();
    let context = table(&sim, &each);
    let found = on_device(&context, &sim, "SELECT n, s FROM t WHERE n = 7").await;
    let rows: Vec<_> = found.iter().map(DeviceRecordBatch::num_rows).collect();
    assert_eq!(rows, [16, 16, 8]);
}

/// So many rows of a part of TPC-H's `lineitem`. Some columns have nulls.
fn line_items(first: i64, rows: i64) -> RecordBatch {
    let of = |n: i64, most: i64| (first + n) * 7919 % most;
    let decimals = |most: i64, nulls: i64| -> ArrayRef {
        let values = (0..rows).map(|n| (n % nulls != 3).then(|| i128::from(of(n, most))));
        let values: Decimal128Array = values.collect();
        Arc::new(values.with_precision_and_scale(15, 2).unwrap())
    };
    let shipped = Date32Array::from_iter_values((0..rows).map(|n| 8000 + of(n, 2500) as i32));
    RecordBatch::try_from_iter([
        ("quantity", decimals(5000, 11)),
        ("price", decimals(9_000_000, 17)),
        ("discount", decimals(11, 1000)),
        ("shipped", Arc::new(shipped)),
    ])
    .unwrap()
}

/// The rows of a query, what it cost until the last one, and the waits of this test, without which nothing runs on a deferred device. They
/// begin after so many waits of queues.
async fn cost(
    (context, sim): (&SessionContext, &Sim),
    sql: &str,
    queue_waits: u64,
) -> (RecordBatch, TransferStats, u64) {
    let query = plan(context, sql).await;
    let (schema, before) = (query.schema(), sim.stats());
    let stream = execute_on_device(query, context.task_ctx(), sim).unwrap();
    let mut found = Box::pin(stream.map(Result::unwrap).collect::<Vec<_>>());
    let (mut polls, mut waits) = (0, 0);
    let found = loop {
        if let Some(found) = (&mut found).now_or_never() {
            break found;
        }
        if sim.stats().since(&before).queue_waits >= queue_waits {
            sim.synchronize().unwrap();
            waits += 1;
        }
        polls += 1;
        assert!(polls < 20_000, "no progress");
        // Whoever wakes the task does so from another thread.
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    let cost = sim.stats().since(&before);
    let found = concat_batches(&schema, &crate::kit::to_host(&found)).unwrap();
    (found, cost, waits)
}

/// However many buffers a batch has, the queue of an operator waits for it once, and not at all if its memory is ready. The host waits for
/// none.
#[tokio::test]
async fn a_batch_is_waited_for_once() {
    const BATCHES: i64 = 16;
    let batches: Vec<_> = (0..BATCHES).map(|i| line_items(i * 1000, 1000)).collect();
    let host = MemTable::try_new(batches[0].schema(), vec![batches.clone()]).unwrap();
    let host = session(Arc::new(host), 1, false);
    let of = "FROM t WHERE shipped >= DATE '1994-01-01' AND shipped < DATE '1995-01-01' \
              AND discount BETWEEN 0.05 AND 0.07 AND quantity < 24";
    let filter = format!("SELECT price, discount, shipped {of}");
    // TPC-H 6.
    let aggregate = format!("SELECT sum(price * discount) {of}");
    // The filter's events are of the counts, of their download, of the result, and of the end of all loans.
    for (sql, operator, most_events, copies) in [
        (&filter, "DeviceFilterExec", 4, 1),
        (&aggregate, "DeviceAggregateExec", 13, 3),
    ] {
        // Of a deferred device the uploads have not begun either.
        for (sim, waits) in [(Sim::new(), 0), (Sim::deferred(), BATCHES as u64)] {
            let context = table(&sim, &batches);
            if waits == 0 {
                sim.synchronize().unwrap();
            }
            let shown = crate::kit::text(&plan(&context, sql).await, &[]);
            says(&shown, &["DeviceFilterExec", operator]);
            let (found, cost, own_waits) = cost((&context, &sim), sql, waits).await;
            let expected = rows(&host, plan(&host, sql).await).await;
            assert_eq!(found, expected[0], "{sql}");
            assert_eq!(cost.host_waits, own_waits, "{sql}: {cost:?}");
            // The aggregate waits for the filter's batch.
            let most = waits + u64::from(operator != "DeviceFilterExec");
            assert!(
                (waits..=most).contains(&cost.queue_waits),
                "{sql}: {cost:?}"
            );
            assert!(cost.events <= most_events, "{sql}: {cost:?}");
            // The counts of all batches come in one.
            assert_eq!((cost.copies, cost.bytes_on_device), (copies, 0), "{sql}");
            drop((context, found));
            sim.assert_done();
        }
    }
}

/// A session with the rule, which uploads to `spec`, and with these devices.
fn with_rule(plugin: &Arc<FilterPlugin>, spec: DeviceSpec, devices: &[Device]) -> SessionContext {
    let resolver = DeviceResolver::of(devices.iter().cloned());
    let rule = DeviceRule::default().with_plugin(plugin.clone());
    let config = SessionConfig::new()
        .with_target_partitions(PARTITIONS)
        .with_extension(Arc::new(resolver));
    let state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(rule.with_uploads(spec, 0)));
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
    let first = Sim::new();
    let spec = DeviceSpec::any(first.id().device_type);
    let plugin = Arc::new(FilterPlugin::default());
    let with_rule = |devices: &[Device]| with_rule(&plugin, spec.clone(), devices);
    let sql = "SELECT id, s FROM t WHERE a > 3";
    let absent = with_rule(&[]);
    let query = plan(&absent, sql).await;
    assert!(is_on_device(&query));
    assert_eq!(plugin.kernels().loads(), 0, "nothing was opened to plan");
    let found = datafusion::physical_plan::collect(query, absent.task_ctx()).await;
    says(&found.unwrap_err(), &["sim", "the session offers []"]);

    let context = with_rule(std::slice::from_ref(&first.device));
    let all = rows(&context, plan(&context, sql).await).await;
    for _ in 0..3 {
        assert_eq!(rows(&context, plan(&context, sql).await).await, all);
    }
    let other = "SELECT n, id FROM t WHERE s = 'row 7' OR false";
    rows(&context, plan(&context, other).await).await;
    // For all partitions, queries and filters.
    assert_eq!(plugin.kernels().loads(), 1);

    // Partitions on two devices.
    let second = Sim::new();
    let both = with_rule(&[first.device.clone(), second.device.clone()]);
    assert_eq!(rows(&both, plan(&both, sql).await).await, all);
    assert_eq!((plugin.kernels().loads(), plugin.kernels().len()), (2, 2));
    drop(both);
    second.assert_done();
    drop(second);
    assert_eq!(rows(&context, plan(&context, sql).await).await, all);
    assert_eq!((plugin.kernels().loads(), plugin.kernels().len()), (2, 1));

    // A device that is described by its number.
    let numbered = DeviceSpec::from(DeviceId::new(first.id().device_type, first.id().id));
    let context = self::with_rule(
        &plugin,
        numbered.clone(),
        std::slice::from_ref(&first.device),
    );
    let query = plan(&context, sql).await;
    let node = query.children()[0];
    assert_eq!(DeviceExec::of(node).unwrap().device(), &numbered);
    assert_eq!(rows(&context, query).await, all);
}
