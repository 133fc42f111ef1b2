//! How far small host batches are joined, and who says so.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use arrow_device::Devices;
use arrow_device_datafusion::DeviceOptions;
use datafusion::arrow::array::{Array, RecordBatch};
use datafusion::common::config::ConfigOptions;
use datafusion::physical_expr::{Partitioning, expressions::col};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::limit_pushdown::LimitPushdown;
use datafusion::physical_plan::collect;
use datafusion::physical_plan::limit::GlobalLimitExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::kit::*;
use crate::nodes::*;

/// Rows wait as long as it takes, however busy the machine is.
fn session_of(rows: Option<usize>) -> SessionContext {
    let rows = rows.unwrap_or(DeviceOptions::default().upload_rows);
    let config = SessionConfig::new().with_option_extension(joined_to(rows));
    SessionContext::new_with_config(config)
}

/// The case that matters: a repartition cuts batches into many small ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_a_hash_repartition_are_joined() {
    const ROWS: usize = 25_000;
    let batches: Vec<_> = (0..8).map(|i| numbers(i * ROWS as i64, ROWS)).collect();
    // Of 200,000 rows in four partitions.
    // On a slow machine, rows that have waited for a while go up without the rest.
    for (target, uploads) in [
        (Some(8192), 24..=32),
        (Some(40_000), 8..=20),
        (None, 4..=16),
    ] {
        let sim = Sim::new();
        let host = scan(host_table(std::slice::from_ref(&batches))).await;
        let by = Partitioning::Hash(vec![col("a", &host.schema()).unwrap()], 4);
        let host = Arc::new(RepartitionExec::try_new(host, by).unwrap());
        let plan = with_transitions(double(host, &sim));
        let before = sim.stats();
        let found = collect(plan.clone(), session_of(target).task_ctx()).await;
        let cost = sim.stats().since(&before);
        let found = sorted(numbers_of(&found.unwrap()));
        assert!(found == multiples(8 * ROWS as i64, 2));
        let batches = metric(&plan, "HostToDeviceExec", "output_batches").unwrap();
        assert!(uploads.contains(&batches), "{batches} uploads, {target:?}");
        let padding = cost.bytes_to_device - 8 * 8 * ROWS as u64;
        assert!(padding < 64 * batches as u64, "{padding}");
    }
}

/// The sizes of what comes up in a session.
async fn sizes(ctx: &SessionContext, node: Plan) -> Vec<usize> {
    let batches = collect(down(node), ctx.task_ctx()).await.unwrap();
    batches.iter().map(RecordBatch::num_rows).collect()
}

/// A node over `n` batches of 16 rows.
async fn upload(n: i64, sim: &Sim) -> Plan {
    up(scan(host_table(&[batches(0, n)])).await, sim)
}

#[tokio::test]
async fn the_session_says_how_far_and_so_does_sql() {
    let sim = Sim::new();
    let found = sizes(&session_of(None), upload(10, &sim).await).await;
    assert_eq!(found, [160], "the defaults");
    let ctx = session_of(Some(64));
    let sizes = async |n| sizes(&ctx, upload(n, &sim).await).await;
    assert_eq!(sizes(10).await, [64, 64, 32]);
    ctx.sql("SET device.upload_rows = 48").await.unwrap();
    assert_eq!(sizes(5).await, [48, 32]);
    ctx.sql("SET device.upload_rows = 0").await.unwrap();
    assert_eq!(sizes(3).await, [16, 16, 16]);
    ctx.sql("SET device.upload_rows = 1000").await.unwrap();
    // Seven batches of 128 bytes.
    ctx.sql("SET device.upload_bytes = 1000").await.unwrap();
    assert_eq!(sizes(10).await, [112, 48]);
    // Half of it is not small.
    ctx.sql("SET device.upload_bytes = 256").await.unwrap();
    assert_eq!(sizes(2).await, [16, 16]);
    assert!(ctx.sql("SET device.upload_rows = many").await.is_err());
    assert!(ctx.sql("SET device.download_rows = 1").await.is_err());
}

/// A slice of a large array is as large as its rows.
#[tokio::test]
async fn slices_count_with_their_rows_only() {
    let sim = Sim::new();
    let all = numbers(0, 1 << 20);
    let slices = (0..8).map(|i| all.slice(i * 100_000, 1000)).collect();
    let node = up(scan(host_table(&[slices])).await, &sim);
    assert_eq!(sizes(&session_of(None), node).await, [8000]);
}

/// A limit goes below the upload, so that no rows are waited for that nobody needs.
#[tokio::test]
async fn a_limit_is_pushed_below_the_upload() {
    let sim = Sim::new();
    let (table, asked) = host_stream(|i| (i < MANY).then(|| Ok(numbers(i as i64 * 16, 16))));
    let plan = down(up(scan(table).await, &sim));
    let plan = Arc::new(GlobalLimitExec::new(plan, 0, Some(20)));
    let plan = LimitPushdown::new().optimize(plan, &ConfigOptions::default());
    let batches = collect(plan.unwrap(), session_of(None).task_ctx()).await;
    assert_eq!(numbers_of(&batches.unwrap()), multiples(20, 1));
    let asked = asked.load(SeqCst);
    assert!(asked <= 3, "{asked} batches");
    assert_eq!(sim.stats().bytes_to_device, 192, "20 rows");
}

/// To the CPU nothing is copied, not even to join it.
#[tokio::test]
async fn batches_for_the_cpu_are_not_joined() {
    let parts = batches(0, 4);
    let host = scan(host_table(std::slice::from_ref(&parts))).await;
    let plan = down(up(host, &Devices::cpu()));
    let found = collect(plan, session_of(None).task_ctx()).await.unwrap();
    assert_eq!(found, parts);
    for (batch, part) in found.iter().zip(&parts) {
        let address = |batch: &RecordBatch| batch.column(0).to_data().buffers()[0].as_ptr();
        assert_eq!(address(batch), address(part));
    }
}
