//! Clients of Ballista that send plans with device nodes in them.

use std::sync::Arc;
use std::time::Duration;

use arrow_device_cluster::codec::{DeviceCodec, DeviceTableCodec, DeviceTables};
use arrow_device_datafusion::{
    DeviceForm, DeviceResolver, DeviceRule, DeviceToHostExec, HostToDeviceExec,
};
use ballista_core::config::BallistaConfig;
use ballista_core::execution_plans::execute_physical_plan;
use ballista_core::extension::{SessionConfigExt, SessionStateExt};
use ballista_core::serde::BallistaLogicalExtensionCodec;
use ballista_core::serde::protobuf::scheduler_grpc_client::SchedulerGrpcClient;
use datafusion::arrow::array::RecordBatch;
use datafusion::dataframe::DataFrameWriteOptions;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SessionState, SessionStateBuilder};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlan, collect, common};
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};
use datafusion_proto::protobuf::PhysicalPlanNode;

use crate::device_filter::FilterPlugin;
use crate::filter_codec::FilterCodec;
use crate::kit::{SIM, batch, host_rows, scan, sim, t, text};

const LIMIT: Duration = Duration::from_secs(30);

fn codec() -> DeviceCodec {
    let filters = Arc::new(FilterCodec::default());
    DeviceCodec::new().with_plan(filters).for_ballista()
}

/// The state of a session of the client, the scheduler and the executor: a device, the table "t" of so many partitions, and the plugin.
fn state(partitions: usize) -> SessionState {
    let others = Arc::new(BallistaLogicalExtensionCodec::default());
    let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
    let config = SessionConfig::new_with_ballista()
        .with_target_partitions(3)
        .with_ballista_adaptive_query_planner(false)
        .with_ballista_physical_extension_codec(Arc::new(codec()))
        .with_ballista_logical_extension_codec(Arc::new(DeviceTableCodec::new(others)))
        .with_extension(Arc::new(DeviceResolver::of([sim()])))
        .with_extension(Arc::new(DeviceTables::of([("t", t(partitions))])));
    SessionStateBuilder::new()
        .with_default_features()
        .with_config(config)
        .with_physical_optimizer_rule(Arc::new(rule.with_uploads(SIM, 0)))
        .build()
}

/// A scheduler and an executor on localhost.
async fn cluster(state: &SessionState) -> String {
    let address = ballista_scheduler::standalone::new_standalone_scheduler_from_state(state);
    let url = format!("http://localhost:{}", address.await.unwrap().port());
    let scheduler = SchedulerGrpcClient::connect(url.clone()).await.unwrap();
    let executor = ballista_executor::new_standalone_executor_from_state(scheduler, 1, state);
    executor.await.unwrap();
    url
}

/// Sends a plan, and returns its rows, in their order of text.
async fn send(plan: Arc<dyn ExecutionPlan>, url: &str) -> Result<Vec<String>> {
    let state = state(1);
    let (settings, codec) = (BallistaConfig::default(), codec());
    let sent = async {
        let rows = execute_physical_plan::<PhysicalPlanNode>(
            url.to_owned(),
            &settings,
            plan,
            &codec,
            state.session_id().to_owned(),
            state.config().clone(),
        );
        common::collect(rows.await?).await
    };
    let sent = tokio::time::timeout(LIMIT, sent).await;
    sent.expect("it hangs").map(|rows| texts(&rows))
}

fn texts(batches: &[RecordBatch]) -> Vec<String> {
    let mut texts = Vec::new();
    for batch in batches {
        let options = Default::default();
        let columns = batch.columns().iter();
        let columns =
            columns.map(|c| datafusion::arrow::util::display::ArrayFormatter::try_new(c, &options));
        let columns: Vec<_> = columns.collect::<Result<_, _>>().unwrap();
        for row in 0..batch.num_rows() {
            let row: Vec<_> = columns.iter().map(|c| c.value(row).to_string()).collect();
            texts.push(row.join("|"));
        }
    }
    texts.sort();
    texts
}

async fn here(plan: Arc<dyn ExecutionPlan>) -> Vec<String> {
    let context = SessionContext::new_with_state(state(1));
    texts(&collect(plan, context.task_ctx()).await.unwrap())
}

fn down(plan: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
    Arc::new(DeviceToHostExec::new(plan))
}

fn up(partitions: usize) -> Arc<dyn ExecutionPlan> {
    HostToDeviceExec::default().above(host_rows(partitions), SIM)
}

fn union(plans: Vec<Arc<dyn ExecutionPlan>>) -> Arc<dyn ExecutionPlan> {
    UnionExec::try_new(plans).unwrap()
}

/// Plans that were made by the client, of one stage and of several.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn physical_plans() {
    let url = cluster(&state(1)).await;
    for (plan, count) in [
        (down(up(3)), 300),
        (down(scan(1)), 100),
        (Arc::new(CoalescePartitionsExec::new(down(up(3)))), 300),
        (union(vec![down(up(2)), host_rows(3), down(up(1))]), 600),
        (union(vec![host_rows(3), down(scan(1)), host_rows(3)]), 700),
        (union(vec![host_rows(9), down(scan(1)), host_rows(9)]), 1900),
        (
            union(vec![down(scan(1)), down(scan(1)), down(scan(1))]),
            300,
        ),
    ] {
        let found = send(plan.clone(), &url).await.unwrap();
        assert_eq!(found.len(), count);
        assert_eq!(found, here(plan).await);
    }
}

/// What the scheduler would get wrong is refused where the client sends it.
#[tokio::test]
async fn what_the_scheduler_does_not_know() {
    let form = |plan| DeviceForm::of(plan, SIM).unwrap().unwrap();
    let coalesced = Arc::new(CoalescePartitionsExec::new(up(2)));
    for (plan, why) in [
        (scan(2), "a scan of a DeviceTable of 2 partitions"),
        (form(union(vec![up(1), up(2)])), "knows only UnionExec"),
        (form(coalesced), "knows only CoalescePartitionsExec"),
    ] {
        let name = plan.name().to_owned();
        let e = send(down(plan), "http://localhost:1").await.unwrap_err();
        let e = e.to_string();
        assert!(
            e.contains(why) && e.contains(&format!("{name} on sim")),
            "{e}"
        );
    }
}

/// Queries that the scheduler plans, with the plugin's rules, over a file and a table on a device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logical_plans() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().to_str().unwrap();
    let files = SessionContext::new().read_batches((0..4).map(batch))?;
    let options = DataFrameWriteOptions::new();
    files.write_parquet(path, options, None).await?;
    let session = async |partitions, url: Option<String>| {
        let mut state = state(partitions);
        if let Some(url) = url {
            state = state.upgrade_for_ballista(url)?;
        }
        let context = SessionContext::new_with_state(state);
        context.register_table("t", Arc::new(t(partitions)))?;
        let options = ParquetReadOptions::default();
        context.register_parquet("files", path, options).await?;
        Ok::<_, DataFusionError>(context)
    };
    let url = cluster(&state(1)).await;
    let (local, remote) = (session(1, None).await?, session(1, Some(url)).await?);
    for sql in [
        "SELECT s, id FROM files WHERE id > 150",
        "SELECT n, count(*), min(s) FROM files WHERE id <> 7 GROUP BY n",
        "SELECT s FROM t WHERE n = 5",
        "SELECT t.s, files.n FROM t JOIN files ON t.id = files.id WHERE files.n < 9 AND t.n > 2",
        "SELECT id FROM t WHERE id < 10 UNION ALL SELECT id FROM files WHERE id > 390",
    ] {
        let plan = local.sql(sql).await?.create_physical_plan().await?;
        let shown = text(&plan);
        assert!(shown.contains("DeviceFilterExec"), "{shown}");
        let expected = texts(&local.sql(sql).await?.collect().await?);
        let found = remote.sql(sql).await?.collect();
        let found = tokio::time::timeout(LIMIT, found).await;
        assert_eq!(texts(&found.expect("it hangs")?), expected, "{sql}");
    }
    // The scheduler refuses it once it has planned it, and goes on.
    let url = cluster(&state(2)).await;
    let remote = session(2, Some(url)).await?;
    let found = remote.sql("SELECT s FROM t WHERE n = 5").await?.collect();
    let found = tokio::time::timeout(LIMIT, found).await;
    let e = found.expect("it hangs").unwrap_err().to_string();
    assert!(e.contains("a scan of a DeviceTable of 2 partitions"), "{e}");
    let found = remote
        .sql("SELECT id FROM files WHERE id > 150")
        .await?
        .collect();
    let found = tokio::time::timeout(LIMIT, found).await;
    assert_eq!(texts(&found.expect("it hangs")?).len(), 249);
    Ok(())
}
