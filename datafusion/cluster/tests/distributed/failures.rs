//! Devices that fail, plugins that panic, clients that go.

use std::sync::Arc;
use std::time::Duration;

use arrow_device::device::sim::SimConfig;
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DevicePools, DeviceRule, DeviceSpec, Verdict,
};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;
use futures::StreamExt;

use crate::cluster::{Cluster, Worker};
use crate::nodes::{SIM, Way};
use crate::support::{LONG, assert_same, error, expected, query, sql};

/// Both workers filter, in one stage.
const SQL: &str = "SELECT count(*), sum(l_quantity) FROM lineitem WHERE l_quantity < 24 AND l_shipdate > DATE '1995-01-01'";
const WAYS: [Way; 2] = [Way::Workers, Way::Coordinator];

/// Any operation of one worker's device: allocations, copies, kernels, events, waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_fails_fails_the_query_and_no_other() {
    for way in WAYS {
        let cluster = Cluster::two(way).await;
        let session = cluster.session().await;
        let mut failed = 0;
        for n in [1, 2, 5, 10, 20, 40, 80] {
            let worker = &cluster.workers[n as usize % 2];
            let faults = worker.sim.faults();
            faults.clear();
            faults.fail_nth(None, n);
            match query(&session, SQL).await {
                Ok(found) => assert_same(&found, &expected(SQL).await, "with a fault"),
                Err(e) => {
                    let (e, id) = (e.to_string(), worker.device.id().to_string());
                    assert!(e.contains(&id), "the error does not name {id}: {e}");
                    assert_eq!(faults.fired(), 1, "{e}");
                    failed += 1;
                }
            }
            faults.clear();
            let found = query(&session, SQL).await.unwrap();
            assert_same(&found, &expected(SQL).await, "after a fault");
            cluster.assert_clean();
        }
        assert!(failed > 0, "{way:?}");
    }
}

/// The device of one worker has less memory than one batch needs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_runs_out_of_memory_is_an_error() {
    for way in WAYS {
        let small = SimConfig {
            capacity_bytes: 64 << 10,
            ..SimConfig::default()
        };
        let workers = vec![Worker::with(way, small.clone()), Worker::with(way, small)];
        let cluster = Cluster::start(way, workers).await;
        let session = cluster.session().await;
        let e = error(&session, SQL).await;
        assert!(e.to_lowercase().contains("out of memory"), "{way:?}: {e}");
        let found = query(&session, sql("q09")).await.unwrap();
        assert_same(&found, &expected(sql("q09")).await, "after it");
        cluster.assert_clean();
    }
}

/// The worker's pool for its device is smaller than one batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_pool_that_is_exhausted_is_an_error() {
    let small = |mut builder: SessionStateBuilder| {
        let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(64 << 10));
        let pools = DevicePools::new(move |_| pool.clone());
        let config = builder.config().get_or_insert_default();
        config.set_extension(Arc::new(pools));
        builder
    };
    for way in WAYS {
        let mut workers = vec![Worker::new(way), Worker::new(way)];
        for worker in &mut workers {
            worker.parts.extend = Arc::new(small);
        }
        let cluster = Cluster::start(way, workers).await;
        let session = cluster.session().await;
        let e = error(&session, SQL).await;
        assert!(
            e.contains("HostToDeviceExec[") && e.contains("Resources exhausted"),
            "{way:?}: {e}"
        );
        cluster.assert_clean();
    }
}

#[derive(Debug)]
struct Panics;

impl DevicePlugin for Panics {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
        assert!(!node.is::<FilterExec>(), "a mistake of the plugin");
        Verdict::Unknown
    }

    fn replace(&self, _: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        unreachable!("it runs nothing")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_that_panics_is_an_error() {
    let mut worker = Worker::new(Way::Workers);
    let rule = DeviceRule::default().with_plugin(Arc::new(Panics));
    worker.parts.rule = rule.with_uploads(SIM, 0);
    let workers = vec![worker, Worker::new(Way::Workers)];
    let cluster = Cluster::start(Way::Workers, workers).await;
    let session = cluster.session().await;
    let e = error(&session, SQL).await;
    assert!(
        e.contains("a plugin panicked") && e.contains("a mistake of the plugin"),
        "{e}"
    );
    // It goes on.
    let all = "SELECT count(*) FROM lineitem";
    assert_same(
        &query(&session, all).await.unwrap(),
        &expected(all).await,
        "after it",
    );
    cluster.assert_clean();
}

/// Clients that go after the first batch, and before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_query_leaves_nothing() {
    let rows = "SELECT l_orderkey, l_comment FROM lineitem WHERE l_quantity < 49";
    for way in WAYS {
        let slow = || SimConfig {
            bytes_per_second: Some(20 << 20),
            ..SimConfig::default()
        };
        let workers = vec![Worker::with(way, slow()), Worker::with(way, slow())];
        let cluster = Cluster::start(way, workers).await;
        let session = cluster.session().await;
        let mut stream = session
            .sql(rows)
            .await
            .unwrap()
            .execute_stream()
            .await
            .unwrap();
        let first = tokio::time::timeout(LONG, stream.next()).await;
        assert!(first.expect("no first batch").unwrap().unwrap().num_rows() > 0);
        drop(stream);
        let begun = async {
            let query = session.sql(SQL).await?.collect();
            tokio::time::timeout(Duration::from_millis(300), query)
                .await
                .ok();
            Ok::<_, DataFusionError>(())
        };
        begun.await.unwrap();
        cluster.assert_clean();
        let found = query(&session, SQL).await.unwrap();
        assert_same(&found, &expected(SQL).await, "after it");
        cluster.assert_clean();
    }
}
