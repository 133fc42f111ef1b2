//! The queries of TPC-H on two executors with devices: with Ballista's adaptive planner and without, with tasks that executors ask for
//! and that they are sent.

use std::time::Instant;

use crate::cluster::*;
use crate::data::QUERIES;
use crate::support::ON_DEVICES;

/// Scans, joins, subqueries, and one without device operators.
const FEW: [&str; 5] = ["q01", "q03", "q09", "q11", "q20"];

async fn check(policy: ballista_core::config::TaskSchedulingPolicy, adaptive: bool, few: bool) {
    let cluster = Cluster::start(policy, vec![Worker::new(), Worker::new()]).await;
    let client = cluster.client(adaptive).await;
    let mut of_workers = [0, 0];
    for (name, sql) in QUERIES {
        if few && !FEW.contains(&name) {
            continue;
        }
        let what = format!("{name}, {policy:?}, adaptive: {adaptive}");
        let expected = expected(sql).await;
        let start = Instant::now();
        let found = query(&client, sql).await;
        let found = found.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_same(&found, &expected, &what);
        let mut on_devices = 0;
        let mut tasks = 0;
        for (worker, of_worker) in cluster.workers.iter().zip(&mut of_workers) {
            let seen = worker.seen();
            tasks += seen.len();
            for task in seen.iter().filter(|task| task.on_device) {
                on_devices += 1;
                *of_worker += 1;
                // A task over no rows moves nothing. What passes a filter is less than what it reads.
                assert!(task.bytes_down <= task.bytes_up, "{what}: {task:?}");
            }
            let idle = seen.iter().filter(|task| !task.on_device);
            assert_eq!(idle.map(|task| task.bytes_up).sum::<usize>(), 0, "{what}");
        }
        let took = start.elapsed();
        println!("{what}: {on_devices} of {tasks} tasks with device operators, {took:.1?}");
        assert_eq!(on_devices > 0, ON_DEVICES.contains(&name), "{what}");
    }
    assert!(of_workers.iter().all(|tasks| *tasks > 0), "{of_workers:?}");
    cluster.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn pushed_and_adaptive() {
    check(PUSH, true, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pulled_and_static() {
    check(PULL, false, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pushed_and_static() {
    check(PUSH, false, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pulled_and_adaptive() {
    check(PULL, true, true).await;
}
