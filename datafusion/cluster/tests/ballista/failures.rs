//! Devices that fail, clients that go, executors that are ended.

use std::time::{Duration, Instant};

use arrow_device::device::sim::{FaultOp, SimConfig};
use arrow_device_cluster::ballista::OnDeviceError;

use crate::cluster::*;

/// Both executors filter, in one stage.
const SQL: &str = "SELECT count(*), sum(l_quantity) FROM lineitem WHERE l_quantity < 24 AND l_shipdate > DATE '1995-01-01'";

fn with(policy: OnDeviceError) -> Worker {
    Worker::with(SimConfig::default(), plugin(), policy)
}

/// Any operation of one executor's device: allocations, copies, kernels, events, waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_fails_fails_the_query_and_no_other() {
    let workers = vec![with(OnDeviceError::Fail), with(OnDeviceError::Fail)];
    let cluster = Cluster::start(PUSH, workers).await;
    let client = cluster.client(true).await;
    let expected = expected(SQL).await;
    let faults = cluster.workers[0].sim.faults();
    let mut failed = 0;
    for n in [1, 2, 5, 10, 20, 40, 80, 160] {
        faults.clear();
        faults.fail_nth(None, n);
        match query(&client, SQL).await {
            Ok(found) => assert_same(&found, &expected, "with a fault"),
            Err(e) => {
                let e = e.to_string();
                let id = cluster.workers[0].device.id().to_string();
                assert!(e.contains(&id), "the error does not name {id}: {e}");
                assert_eq!(faults.fired(), 1, "{e}");
                failed += 1;
            }
        }
        faults.clear();
        let found = query(&client, SQL).await.unwrap();
        assert_same(&found, &expected, "after a fault");
        cluster.assert_clean();
    }
    assert!(failed > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_can_be_tried_again() {
    for (policy, adaptive) in [(PUSH, true), (PULL, false)] {
        let workers = vec![with(OnDeviceError::Retry), with(OnDeviceError::Retry)];
        let cluster = Cluster::start(policy, workers).await;
        let client = cluster.client(adaptive).await;
        let mut fired = 0;
        for n in [1, 3, 10] {
            for worker in &cluster.workers {
                worker.sim.faults().fail_nth(FaultOp::Allocate, n);
            }
            let found = query(&client, SQL).await.unwrap();
            assert_same(&found, &expected(SQL).await, "tried again");
            for worker in &cluster.workers {
                fired += worker.sim.faults().fired();
                worker.sim.faults().clear();
            }
        }
        assert!(fired > 0);
        cluster.assert_clean();
    }
}

/// The device has less memory than one batch needs.
#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_runs_out_of_memory_is_an_error() {
    let small = |policy| {
        let config = SimConfig {
            capacity_bytes: 64 << 10,
            ..SimConfig::default()
        };
        Worker::with(config, plugin(), policy)
    };
    // Too often for the scheduler's patience, with both policies.
    for policy in [OnDeviceError::Fail, OnDeviceError::Retry] {
        let cluster = Cluster::start(PUSH, vec![small(policy), small(policy)]).await;
        let client = cluster.client(true).await;
        let error = error(&client, SQL).await;
        assert!(error.contains("out of memory on sim:"), "{error}");
        cluster.assert_clean();
        // What needs no device goes on.
        let sql = "SELECT count(*) FROM lineitem";
        let found = query(&client, sql).await.unwrap();
        assert_same(&found, &expected(sql).await, sql);
    }
    // One of two: the other may do its work.
    let workers = vec![small(OnDeviceError::Retry), with(OnDeviceError::Retry)];
    let cluster = Cluster::start(PUSH, workers).await;
    let client = cluster.client(true).await;
    match query(&client, SQL).await {
        Ok(found) => assert_same(&found, &expected(SQL).await, "the other one"),
        Err(e) => assert!(e.to_string().contains("out of memory on sim:"), "{e}"),
    }
    cluster.assert_clean();
}

/// Devices so slow that a query takes seconds.
fn slow() -> Worker {
    let config = SimConfig {
        bytes_per_second: Some(4 << 20),
        ..SimConfig::default()
    };
    Worker::with(config, plugin(), OnDeviceError::Fail)
}

/// Waits until both devices have work.
async fn until_at_work(cluster: &Cluster) {
    let start = Instant::now();
    let at_work = |worker: &Worker| worker.device.stats().bytes_to_device > 0;
    while !cluster.workers.iter().all(at_work) {
        assert!(start.elapsed() < Duration::from_secs(60), "nobody works");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_query_leaves_nothing() {
    let cluster = Cluster::start(PUSH, vec![slow(), slow()]).await;
    let client = cluster.client(true).await;
    let running = client.clone();
    let task = tokio::spawn(async move { query(&running, SQL).await });
    until_at_work(&cluster).await;
    cluster.cancel_all().await;
    let error = task.await.unwrap().unwrap_err().to_string();
    assert!(error.to_lowercase().contains("cancel"), "{error}");
    cluster.assert_clean();

    // A client that goes without a word.
    let running = client.clone();
    let task = tokio::spawn(async move { query(&running, SQL).await });
    until_at_work(&cluster).await;
    task.abort();
    let _ = task.await;
    cluster.cancel_all().await;
    cluster.assert_clean();
    let found = query(&client, SQL).await.unwrap();
    assert_same(&found, &expected(SQL).await, "after both");
    cluster.assert_clean();
}

/// The tasks of the one that ends run on the other, or the query fails with an error.
#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_ends_in_a_query() {
    for (policy, adaptive) in [(PUSH, true), (PULL, false)] {
        let mut cluster = Cluster::start(policy, vec![slow(), slow()]).await;
        let client = cluster.client(adaptive).await;
        let running = client.clone();
        let start = Instant::now();
        let task = tokio::spawn(async move { query(&running, SQL).await });
        until_at_work(&cluster).await;
        let mut ended = cluster.workers.remove(0);
        ended.kill();
        let result = task.await.unwrap();
        let verdict = match &result {
            Ok(_) => "a result".to_owned(),
            Err(e) => e.to_string(),
        };
        println!("{policy:?}: {verdict} after {:?}", start.elapsed());
        match result {
            Ok(found) => assert_same(&found, &expected(SQL).await, "of the other"),
            Err(_) => assert!(!verdict.contains("no end after"), "{verdict}"),
        }
        cluster.assert_clean();
        let found = query(&client, SQL).await.unwrap();
        assert_same(&found, &expected(SQL).await, "of the one that is left");
        cluster.assert_clean();
    }
}
