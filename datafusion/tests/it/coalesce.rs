//! How far small host batches are joined, and who says so.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use arrow_device::Devices;
use arrow_device_datafusion::{DeviceExec, DeviceToHostExec, HostToDeviceExec};
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

fn session_of(rows: Option<usize>) -> SessionContext {
    let config = SessionConfig::new();
    SessionContext::new_with_config(match rows {
        Some(rows) => config.with_option_extension(joined_to(rows)),
        None => config,
    })
}

/// Sums a metric of the uploads, one partition or all.
fn of_uploads(plan: &Plan, name: &str, partition: Option<usize>) -> usize {
    let upload = plan.children()[0].children()[0].clone();
    assert_eq!(upload.name(), "HostToDeviceExec");
    let metrics = upload.metrics().unwrap();
    let of = |m: &datafusion::physical_plan::metrics::Metric| {
        m.value().name() == name && (partition.is_none() || m.partition() == partition)
    };
    metrics.sum(of).map_or(0, |value| value.as_usize())
}

/// The case that matters: a repartition cuts batches into many small ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_a_hash_repartition_are_joined() {
    const ROWS: usize = 100_000;
    let batches: Vec<_> = (0..8).map(|i| numbers(i * ROWS as i64, ROWS)).collect();
    for (target, uploads) in [
        (Some(8192), 96..=108),
        (None, 8..=8),
        (Some(40_000), 20..=24),
    ] {
        let sim = Sim::new();
        let host = scan(host_table(std::slice::from_ref(&batches))).await;
        let by = Partitioning::Hash(vec![col("a", &host.schema()).unwrap()], 4);
        let host = Arc::new(RepartitionExec::try_new(host, by).unwrap());
        let plan = with_transitions(double(host, &sim));
        let before = sim.stats();
        let found = collect(plan.clone(), session_of(target).task_ctx())
            .await
            .unwrap();
        let cost = sim.stats().since(&before);
        let found = sorted(numbers_of(&found));
        assert!(
            found
                .iter()
                .copied()
                .eq((0..8 * ROWS as i64).map(|a| a * 2))
        );
        let batches = of_uploads(&plan, "output_batches", None);
        assert!(uploads.contains(&batches), "{batches} uploads, {target:?}");
        let padding = cost.bytes_to_device - 8 * 8 * ROWS as u64;
        assert!(padding < 64 * batches as u64, "{padding}");
        if target.is_none() {
            for partition in 0..4 {
                let rows = of_uploads(&plan, "output_rows", Some(partition));
                let batches = of_uploads(&plan, "output_batches", Some(partition));
                assert_eq!(batches, rows.div_ceil(131_072), "{rows} rows");
            }
        }
    }
}

/// The sizes of what comes up in a session.
async fn sizes(ctx: &SessionContext, node: HostToDeviceExec) -> Vec<usize> {
    let plan: Plan = Arc::new(DeviceExec::new(Arc::new(node)));
    let plan = Arc::new(DeviceToHostExec::new(plan));
    let batches = collect(plan, ctx.task_ctx()).await.unwrap();
    batches.iter().map(RecordBatch::num_rows).collect()
}

/// A node over `n` batches of 16 rows.
async fn upload(n: i64, sim: &Sim) -> HostToDeviceExec {
    let batches = (0..n).map(|i| numbers(i * 16, 16)).collect();
    HostToDeviceExec::new(scan(host_table(&[batches])).await, sim)
}

#[tokio::test]
async fn the_session_says_how_far_and_so_does_sql() {
    let sim = Sim::new();
    let ctx = session_of(None);
    assert_eq!(
        sizes(&ctx, upload(10, &sim).await).await,
        [160],
        "the defaults"
    );
    let ctx = session_of(Some(64));
    assert_eq!(sizes(&ctx, upload(10, &sim).await).await, [64, 64, 32]);
    ctx.sql("SET device.upload_rows = 48").await.unwrap();
    assert_eq!(sizes(&ctx, upload(5, &sim).await).await, [48, 32]);
    ctx.sql("SET device.upload_rows = 0").await.unwrap();
    assert_eq!(sizes(&ctx, upload(3, &sim).await).await, [16, 16, 16]);
    ctx.sql("SET device.upload_rows = 1000").await.unwrap();
    // Seven batches of 128 bytes.
    ctx.sql("SET device.upload_bytes = 1000").await.unwrap();
    assert_eq!(sizes(&ctx, upload(10, &sim).await).await, [112, 48]);
    // Half of it is not small.
    ctx.sql("SET device.upload_bytes = 256").await.unwrap();
    assert_eq!(sizes(&ctx, upload(2, &sim).await).await, [16, 16]);
    assert!(ctx.sql("SET device.upload_rows = many").await.is_err());
    assert!(ctx.sql("SET device.download_rows = 1").await.is_err());
}

#[tokio::test]
async fn a_node_says_it_for_itself_and_shows_it() {
    let sim = Sim::new();
    let ctx = session_of(Some(48));
    let node = upload(4, &sim).await.with_target(64, 1 << 20);
    assert_eq!(sizes(&ctx, node.clone()).await, [64]);
    let plan: Plan = Arc::new(DeviceExec::new(Arc::new(node)));
    let expected = "HostToDeviceExec: device=A, upload_rows=64, upload_bytes=1048576";
    assert!(
        text(&plan, &[&sim]).starts_with(expected),
        "{}",
        text(&plan, &[&sim])
    );
    let children = plan.children().into_iter().cloned().collect();
    let plan = DeviceExec::of(&plan).unwrap().plan();
    let plan: Plan = Arc::new(DeviceExec::new(plan.with_children(children).unwrap()));
    assert!(text(&plan, &[&sim]).starts_with(expected));
    let default: Plan = Arc::new(DeviceExec::new(Arc::new(upload(1, &sim).await)));
    let line = text(&default, &[&sim]);
    assert_eq!(line.lines().next(), Some("HostToDeviceExec: device=A"));
}

/// A slice of a large array is as large as its rows.
#[tokio::test]
async fn slices_count_with_their_rows_only() {
    let sim = Sim::new();
    let all = numbers(0, 1 << 20);
    let slices = (0..8).map(|i| all.slice(i * 100_000, 1000)).collect();
    let node = HostToDeviceExec::new(scan(host_table(&[slices])).await, &sim);
    assert_eq!(sizes(&session_of(None), node).await, [8000]);
}

/// A limit goes below the upload, so that no rows are waited for that nobody needs.
#[tokio::test]
async fn a_limit_is_pushed_below_the_upload() {
    let sim = Sim::new();
    let (table, asked) = host_stream(|i| (i < MANY).then(|| Ok(numbers(i as i64 * 16, 16))));
    let up = HostToDeviceExec::new(scan(table).await, &sim);
    let up: Plan = Arc::new(DeviceExec::new(Arc::new(up)));
    let down = Arc::new(DeviceToHostExec::new(up));
    let plan: Plan = Arc::new(GlobalLimitExec::new(down, 0, Some(20)));
    let plan = LimitPushdown::new()
        .optimize(plan, &ConfigOptions::default())
        .unwrap();
    let batches = collect(plan, session_of(None).task_ctx()).await.unwrap();
    assert_eq!(numbers_of(&batches), (0..20).collect::<Vec<i64>>());
    let asked = asked.load(SeqCst);
    assert!(asked <= 3, "{asked} batches");
    assert_eq!(sim.stats().bytes_to_device, 192, "20 rows");
}

/// To the CPU nothing is copied, not even to join it.
#[tokio::test]
async fn batches_for_the_cpu_are_not_joined() {
    let parts: Vec<_> = (0..4).map(|i| numbers(i * 16, 16)).collect();
    let host = scan(host_table(std::slice::from_ref(&parts))).await;
    let node = HostToDeviceExec::new(host, Devices::cpu());
    let plan = Arc::new(DeviceToHostExec::new(Arc::new(DeviceExec::new(Arc::new(
        node,
    )))));
    let batches = collect(plan, session_of(None).task_ctx()).await.unwrap();
    assert_eq!(batches, parts);
    for (batch, part) in batches.iter().zip(&parts) {
        let address = |batch: &RecordBatch| batch.column(0).to_data().buffers()[0].as_ptr();
        assert_eq!(address(batch), address(part));
    }
}
