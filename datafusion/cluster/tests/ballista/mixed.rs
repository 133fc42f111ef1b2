//! Executors that differ, in one cluster.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use arrow_device::device::sim::SimConfig;
use arrow_device_cluster::ballista::{ClientPool, DeviceEngine, OnDeviceError};
use ballista::prelude::SessionConfigExt;
use ballista_core::JobId;
use ballista_core::client_pool::BallistaClientPool;
use ballista_core::config::TaskSchedulingPolicy;
use ballista_executor::execution_engine::{
    DefaultExecutionEngine, ExecutionEngine, QueryStageExecutor,
};
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionConfig;

use crate::cluster::*;
use crate::data::QUERIES;

/// Queries of one and of many stages, all with filters for devices.
pub(crate) fn few() -> impl Iterator<Item = (&'static str, &'static str)> {
    let few = ["q01", "q03", "q06", "q11", "q20"];
    QUERIES
        .into_iter()
        .filter(move |(name, _)| few.contains(name))
}

/// Ballista's own engine, which counts its tasks.
struct Counts(DefaultExecutionEngine, Arc<AtomicUsize>);

impl ExecutionEngine for Counts {
    fn create_query_stage_exec(
        &self,
        job_id: JobId,
        stage_id: usize,
        task_id: usize,
        global_output_partition_ids: Vec<usize>,
        plan: Arc<dyn ExecutionPlan>,
        work_dir: &str,
        config: &SessionConfig,
    ) -> Result<Arc<dyn QueryStageExecutor>> {
        self.1.fetch_add(1, SeqCst);
        self.0.create_query_stage_exec(
            job_id,
            stage_id,
            task_id,
            global_output_partition_ids,
            plan,
            work_dir,
            config,
        )
    }
}

/// Both run tasks of the same stages. The scheduler compares what they send.
async fn beside_one_without(policy: TaskSchedulingPolicy, adaptive: bool) {
    let tasks = Arc::new(AtomicUsize::new(0));
    let without = Worker::plain().running(Counts(DefaultExecutionEngine::new(), tasks.clone()));
    let cluster = Cluster::start(policy, vec![Worker::new(), without]).await;
    let client = cluster.client(adaptive).await;
    let mut on_devices = 0;
    // One stage, whose rows are the result: what the scheduler forgets is missing.
    let rows = (
        "rows",
        "SELECT l_orderkey, l_comment FROM lineitem WHERE l_quantity < 2",
    );
    for (name, sql) in [rows].into_iter().chain(few()) {
        let what = format!("{name}, {policy:?}, adaptive: {adaptive}");
        let found = query(&client, sql).await;
        let found = found.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_same(&found, &expected(sql).await, &what);
        on_devices += cluster.seen().iter().filter(|task| task.on_device).count();
    }
    assert!(on_devices > 0);
    assert!(tasks.load(SeqCst) > 0);
    cluster.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_with_a_device_beside_one_without_pushed() {
    beside_one_without(PUSH, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_with_a_device_beside_one_without_pulled() {
    beside_one_without(PULL, false).await;
}

/// It has the plugin, and that inserts operators that it cannot run.
#[tokio::test(flavor = "multi_thread")]
async fn an_executor_whose_device_is_missing_says_so() {
    let cluster = Cluster::start(PUSH, vec![Worker::without_device()]).await;
    let client = cluster.client(true).await;
    let (_, sql) = few().next().unwrap();
    let error = error(&client, sql).await;
    for word in [
        "DeviceFilterExec",
        "partition",
        "sim",
        "the session offers []",
    ] {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
    // Queries without such operators go on.
    let sql = "SELECT count(*) FROM region";
    let found = query(&client, sql).await.unwrap();
    assert_same(&found, &expected(sql).await, sql);
}

/// The rule of each executor is its own: here only large scans are worth the way to the second one's device.
#[tokio::test(flavor = "multi_thread")]
async fn thresholds_are_of_each_executor() {
    let device = arrow_device_datafusion::DeviceSpec::any(arrow_device::ArrowDeviceType::EXT_DEV);
    let rule = plugin().with_uploads(device, usize::MAX);
    let never = Worker::with(SimConfig::default(), rule, OnDeviceError::Fail);
    let cluster = Cluster::start(PUSH, vec![Worker::new(), never]).await;
    let client = cluster.client(true).await;
    for (name, sql) in few() {
        let found = query(&client, sql).await.unwrap();
        assert_same(&found, &expected(sql).await, name);
    }
    let on_devices = |worker: usize| {
        let seen = cluster.workers[worker].seen();
        (
            seen.iter().filter(|task| task.on_device).count(),
            seen.len(),
        )
    };
    let (all, none) = (on_devices(0), on_devices(1));
    assert!(all.0 > 0 && none.0 == 0 && none.1 > 0, "{all:?} {none:?}");
    cluster.assert_clean();
}

/// What the scheduler shows of a query: its own plan, with the bytes that moved for each node.
#[tokio::test(flavor = "multi_thread")]
async fn the_scheduler_gets_counts_of_bytes() {
    let cluster = Cluster::start(PUSH, vec![Worker::new(), Worker::new()]).await;
    let client = cluster.client(true).await;
    let (_, sql) = few().next().unwrap();
    let sql = format!("EXPLAIN ANALYZE {sql}");
    let found = query(&client, &sql).await.unwrap();
    let text = datafusion::arrow::util::pretty::pretty_format_batches(&found).unwrap();
    let text = text.to_string();
    let filter = text.lines().find(|line| line.contains("FilterExec"));
    let filter = filter.unwrap_or_else(|| panic!("{text}"));
    for word in ["output_rows", "bytes_to_device", "bytes_to_host", "copies"] {
        assert!(filter.contains(word), "no {word} in {filter}\n{text}");
    }
}

/// Executors read shuffles of each other through connections that they keep.
#[tokio::test(flavor = "multi_thread")]
async fn connections_are_kept_until_they_are_old() {
    let pools = [(); 2].map(|()| ClientPool::new(Duration::from_secs(2)));
    let worker = |pool: &ClientPool| {
        let inner = DefaultExecutionEngine::with_client_pool(Arc::new(pool.clone()));
        Worker::new().running(DeviceEngine::over(Arc::new(inner), plugin()))
    };
    let cluster = Cluster::start(PUSH, pools.iter().map(worker).collect()).await;
    let config = SessionConfig::new_with_ballista().with_target_partitions(4);
    let config = config.with_ballista_shuffle_reader_force_remote_read(true);
    let client = cluster.client_with(config).await;
    let (name, sql) = few().nth(1).unwrap();
    let found = query(&client, sql).await.unwrap();
    assert_same(&found, &expected(sql).await, name);
    let idle = |pools: &[ClientPool]| pools.iter().map(ClientPool::idle).sum::<usize>();
    assert!(idle(&pools) > 0);
    tokio::time::sleep(Duration::from_secs(3)).await;
    for pool in &pools {
        pool.evict_idle().await;
    }
    assert_eq!(idle(&pools), 0);
}

/// An engine without plugins is Ballista's own.
#[tokio::test(flavor = "multi_thread")]
async fn no_plugins_change_nothing() {
    let engine = DeviceEngine::new(arrow_device_datafusion::DeviceRule::default());
    let cluster = Cluster::start(PULL, vec![Worker::plain().running(engine)]).await;
    let client = cluster.client(true).await;
    for (name, sql) in few() {
        let found = query(&client, sql).await.unwrap();
        assert_same(&found, &expected(sql).await, name);
    }
}
