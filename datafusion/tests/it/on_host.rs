//! Operators whose work is done on the host after all: because the session says so, or the device cannot.

use std::sync::Arc;

use arrow_device::device::sim::{FaultOp, SimConfig};
use arrow_device_datafusion::{
    DeviceOptions, DeviceResolver, DeviceSpec, execute_on_device, ran_on_host,
};
use datafusion::common::{DataFusionError, Result};
use datafusion::datasource::listing::ListingTableUrl;
use datafusion::execution::TaskContext;
use datafusion::logical_expr::Operator;
use datafusion::object_store::memory::InMemory;
use datafusion::object_store::path::Path;
use datafusion::object_store::{ObjectStoreExt, PutPayload};
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::physical_expr::expressions::{binary, col, lit};
use datafusion::physical_plan::collect;
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};
use futures::TryStreamExt;

use crate::kit::*;
use crate::nodes::*;
use crate::operator::{or_on_host, starting_with};

/// As `double`, which has no `on_host`.
fn doubled(child: Plan, device: impl Into<DeviceSpec>) -> Plan {
    or_on_host(double(child, device), |mut children| {
        let (child, alias) = (children.remove(0), "a".to_owned());
        let schema = child.schema();
        let twice = binary(
            col("a", &schema).unwrap(),
            Operator::Multiply,
            lit(2i64),
            &schema,
        );
        let expr = twice.unwrap();
        Arc::new(ProjectionExec::try_new([ProjectionExpr { expr, alias }], child).unwrap())
    })
}

fn context(set: impl FnOnce(&mut DeviceOptions), devices: &[&Sim]) -> Arc<TaskContext> {
    let mut options = joined_to(32);
    assert!(!options.fallback, "by default");
    options.fallback = true;
    set(&mut options);
    let devices = devices.iter().map(|sim| sim.device.clone());
    let config = SessionConfig::new().with_option_extension(options);
    let config = config.with_extension(Arc::new(DeviceResolver::of(devices)));
    SessionContext::new_with_config(config).task_ctx()
}

/// Numbers of the host, doubled twice.
async fn twice(device: impl Into<DeviceSpec>) -> Plan {
    let (device, host) = (
        device.into(),
        scan(host_table(&[batches(0, 4), batches(64, 4)])).await,
    );
    let inner = doubled(host, device.clone());
    with_transitions(doubled(inner, device))
}

/// Runs it, which gives the right rows with so many copies on the device; and what it says of why it did not run there.
async fn reasons(
    plan: Plan,
    context: Arc<TaskContext>,
    sim: &Sim,
    copies: bool,
) -> Vec<(String, String)> {
    let before = sim.stats();
    let found = collect(plan.clone(), context).await.unwrap();
    assert_eq!(sorted(numbers_of(&found)), multiples(128, 4));
    assert_eq!(sim.stats().since(&before).copies > 0, copies);
    ran_on_host(&plan).unwrap()
}

fn both(why: &str) -> Vec<(String, String)> {
    vec![("MapExec".to_owned(), why.to_owned()); 1]
}

#[tokio::test]
async fn a_session_keeps_operators_on_the_host() {
    let sim = Sim::new();
    for (set, why) in [
        ((|_| ()) as fn(&mut DeviceOptions), None),
        (
            |options| options.enable = false,
            Some("device.enable is false"),
        ),
        (
            |options| options.disable = "FilterExec, MapExec".into(),
            Some("device.disable has MapExec"),
        ),
        (|options| options.disable = "OtherExec".into(), None),
    ] {
        let found = reasons(twice(&sim).await, context(set, &[]), &sim, why.is_none()).await;
        assert_eq!(found, why.map_or(vec![], both));
    }
    // Also below what starts it on a device that is not its own.
    let plan = twice(&sim).await;
    let context = context(|options| options.enable = false, &[]);
    let stream = execute_on_device(plan.clone(), context, &sim).unwrap();
    let found: Vec<_> = stream.try_collect().await.unwrap();
    assert_eq!(sorted(numbers_on(&found)), multiples(128, 4));
    assert_eq!(ran_on_host(&plan).unwrap(), both("device.enable is false"));
    drop((found, plan));
    // In SQL as well; and a table on the device is read there.
    let ctx = session_with(1, 2);
    register(&ctx, "t", device_table(&sim, &[batches(0, 2)]));
    query(&ctx, "SET device.enable = false").await.unwrap();
    let found = query(&ctx, "SELECT a FROM t LIMIT 20").await.unwrap();
    assert_eq!(row_count(&found), 20);
    drop((found, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn a_device_that_is_not_there_is_replaced() {
    let sim = Sim::new();
    let fallback = |fallback| move |options: &mut DeviceOptions| options.fallback = fallback;
    let absent: DeviceSpec = "cuda:7".parse().unwrap();
    let found = reasons(
        twice(absent.clone()).await,
        context(fallback(true), &[]),
        &sim,
        false,
    )
    .await;
    assert_eq!(found.len(), 2, "{found:?}");
    for (partition, (node, why)) in found.iter().enumerate() {
        assert_eq!(node, "MapExec");
        says(why, &["cuda:7", &format!("partition {partition}")]);
    }
    // Only if that is wanted.
    let refused = collect(twice(absent).await, context(fallback(false), &[])).await;
    fails(refused, &["cuda:7"]);
}

#[tokio::test]
async fn too_little_memory_for_a_first_batch() {
    let sim = Sim::new();
    let small = |options: &mut DeviceOptions| options.memory = "100".parse().unwrap();
    let found = reasons(twice(&sim).await, context(small, &[]), &sim, false).await;
    says(
        &found[0].1,
        &["Resources exhausted", "HostToDeviceExec, partition 0"],
    );
    // When a partition starts.
    let plan = starting_with(
        doubled(scan(host_table(&[batches(0, 8)])).await, &sim),
        1000,
    );
    let plan = with_transitions(plan);
    let found = collect(plan.clone(), context(small, &[])).await.unwrap();
    assert_eq!(numbers_of(&found), multiples(128, 2));
    let why = &ran_on_host(&plan).unwrap()[0].1;
    says(why, &["Resources exhausted", "1000 bytes"]);
    // The device's own: the first batch of each partition, and a later one, after which nothing can be taken back.
    for (nth, fits) in [(1, true), (2, true), (7, false)] {
        sim.sim.faults().clear();
        sim.sim.faults().fail_nth(FaultOp::Allocate, nth);
        let plan = with_transitions(doubled(scan(host_table(&[batches(0, 8)])).await, &sim));
        let found = collect(plan.clone(), context(|_| (), &[])).await;
        assert_eq!(found.is_ok(), fits, "{nth}");
        assert_eq!(
            ran_on_host(&plan).unwrap().len(),
            usize::from(fits),
            "{nth}"
        );
        if let Ok(found) = found {
            assert_eq!(numbers_of(&found), multiples(128, 2));
        }
    }
    sim.sim.faults().clear();
    // What has been read may not be there any more.
    let tiny = Sim::with(SimConfig {
        capacity_bytes: 100,
        ..SimConfig::default()
    });
    let host = sort(scan(host_table(&[batches(0, 2)])).await);
    let error = collect(with_transitions(doubled(host, &tiny)), context(|_| (), &[])).await;
    let error = error.unwrap_err();
    assert!(
        matches!(error, DataFusionError::ResourcesExhausted(_)),
        "{error:?}"
    );
}

/// Partitions take files from a queue of the scan, where they are not again.
#[tokio::test]
async fn files_are_read_again_only_if_all_rows_are_there() {
    let sim = Sim::new();
    let mut file = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut file, numbers(0, 1).schema(), None).unwrap();
    writer.write(&numbers(0, 128)).unwrap();
    writer.close().unwrap();
    let store = Arc::new(InMemory::new());
    let path = Path::from("t/0.parquet");
    let put = store.put(&path, PutPayload::from(file));
    put.await.unwrap();
    for (queue, fits) in [(true, false), (false, true)] {
        let mut options = joined_to(32);
        options.fallback = true;
        options.memory = "100".parse().unwrap();
        let config = SessionConfig::new().with_target_partitions(1);
        let mut config = config.with_option_extension(options);
        let execution = &mut config.options_mut().execution;
        execution.enable_file_stream_work_stealing = queue;
        let ctx = SessionContext::new_with_config(config);
        let url = ListingTableUrl::parse("memory:///").unwrap().object_store();
        ctx.register_object_store(url.as_ref(), store.clone());
        let options = ParquetReadOptions::default();
        let table = ctx.register_parquet("t", "memory:///t/", options).await;
        table.unwrap();
        let file = plan(&ctx, "SELECT a FROM t").await;
        let found = collect(with_transitions(doubled(file, &sim)), ctx.task_ctx()).await;
        match (found, fits) {
            (Ok(found), true) => assert_eq!(numbers_of(&found), multiples(128, 2)),
            (Err(DataFusionError::ResourcesExhausted(_)), false) => (),
            (found, _) => panic!("{found:?}"),
        }
    }
}

#[tokio::test]
async fn explain_analyze_says_why() -> Result<()> {
    let sim = Sim::new();
    let ctx = session_with(1, 0);
    query(&ctx, "SET device.enable = false").await?;
    let plan = twice(&sim).await;
    collect(plan.clone(), ctx.task_ctx()).await?;
    let shown = datafusion::physical_plan::display::DisplayableExecutionPlan::with_metrics(&*plan);
    says(
        &shown.indent(false).to_string(),
        &["on_host (device.enable is false)=2"],
    );
    Ok(())
}
