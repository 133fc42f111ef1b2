//! The queries of TPC-H on two workers with devices: with device operators that the workers insert, and that the coordinator inserts.

use std::time::{Duration, Instant};

use datafusion_distributed::DistributedExt;

use crate::cluster::{Cluster, Worker};
use crate::data::QUERIES;
use crate::nodes::Way;
use crate::support::{ON_DEVICES, assert_same, error, expected, query};

/// Scans, joins, subqueries, and one without device operators.
const FEW: [&str; 5] = ["q01", "q03", "q09", "q11", "q20"];

async fn check(way: Way, dynamic: bool) {
    let cluster = Cluster::two(way).await;
    let session = cluster.session_with(|builder| {
        let builder = builder.with_distributed_dynamic_task_count(dynamic);
        builder.unwrap()
    });
    let session = session.await;
    let mut of_workers = [0, 0];
    for (name, sql) in QUERIES {
        if dynamic && !FEW.contains(&name) {
            continue;
        }
        let what = format!("{name}, {way:?}, dynamic: {dynamic}");
        let expected = expected(sql).await;
        let before: Vec<_> = cluster.workers.iter().map(|w| w.device.stats()).collect();
        let start = Instant::now();
        let found = query(&session, sql).await;
        let took = start.elapsed();
        let found = found.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_same(&found, &expected, &what);
        let (mut tasks, mut on_devices, mut bytes_up) = (0, 0, 0);
        let workers = cluster.workers.iter().zip(before).zip(&mut of_workers);
        for ((worker, before), of_worker) in workers {
            let (all, with_device) = worker.tasks();
            tasks += all;
            on_devices += with_device;
            *of_worker += with_device;
            let moved = worker.device.stats().since(&before);
            // What passes a filter is less than what it reads.
            assert!(
                moved.bytes_to_host <= moved.bytes_to_device,
                "{what}: {moved:?}"
            );
            // A task over no rows moves nothing.
            assert!(with_device > 0 || moved.copies == 0, "{what}: {moved:?}");
            bytes_up += moved.bytes_to_device;
        }
        println!("{what}: {on_devices} of {tasks} tasks with device operators, {took:.1?}");
        assert!(tasks > 0, "{what}: it ran on the coordinator");
        assert_eq!(on_devices > 0, ON_DEVICES.contains(&name), "{what}");
        assert_eq!(bytes_up > 0, on_devices > 0, "{what}");
    }
    assert!(of_workers.iter().all(|tasks| *tasks > 0), "{of_workers:?}");
    if dynamic {
        // A worker keeps the batches by which a task was counted, until its cache of tasks is cleaned, which other tasks bring about.
        let of_workers = |worker: &Worker| worker.sim.report().is_clean();
        for _ in 0..50 {
            if cluster.workers.iter().all(of_workers) {
                break;
            }
            let other = "SELECT l_linestatus, count(*) FROM lineitem GROUP BY l_linestatus";
            query(&session, other).await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            cluster
                .workers
                .iter()
                .for_each(|worker| worker.device.trim());
        }
    }
    cluster.assert_clean();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers() {
    check(Way::Workers, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coordinator() {
    check(Way::Coordinator, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_and_dynamic() {
    check(Way::Workers, true).await;
}

/// There are no stages yet when the coordinator plans the query.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coordinator_and_dynamic() {
    let cluster = Cluster::two(Way::Coordinator).await;
    let session = cluster.session_with(|builder| {
        let builder = builder.with_distributed_dynamic_task_count(true);
        builder.unwrap()
    });
    let e = error(&session.await, QUERIES[0].1).await;
    assert!(
        e.contains("set distributed.dynamic_task_count to false"),
        "{e}"
    );
}
