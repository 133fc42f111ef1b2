//! Window functions over several partitions: Ballista measures the rows of a stage, and finds its own nodes in the plan.

use ballista::prelude::SessionConfigExt;
use datafusion::prelude::SessionConfig;

use crate::cluster::*;

const QUERIES: [&str; 2] = [
    // Rows of a range around each one.
    "SELECT o_orderkey, sum(o_shippriority + 1) OVER (ORDER BY o_orderkey RANGE BETWEEN 100 PRECEDING AND 100 FOLLOWING) AS s \
     FROM orders WHERE o_orderdate < DATE '1995-01-01'",
    // All rows before each one.
    "SELECT o_orderkey, sum(o_custkey) OVER (ORDER BY o_orderkey ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS s \
     FROM orders WHERE o_orderdate < DATE '1995-01-01'",
];

#[tokio::test(flavor = "multi_thread")]
async fn windows_over_filters_on_devices() {
    let cluster = Cluster::start(PUSH, vec![Worker::new(), Worker::new()]).await;
    for adaptive in [true, false] {
        let config = SessionConfig::new_with_ballista()
            .with_target_partitions(4)
            .with_ballista_adaptive_query_planner(adaptive)
            .set_bool("ballista.planner.parallel_window.enabled", true);
        let client = cluster.client_with(config).await;
        for sql in QUERIES {
            let found = query(&client, sql).await.unwrap();
            assert_same(&found, &expected(sql).await, sql);
            let seen = cluster.seen();
            let on_devices = seen.iter().filter(|task| task.on_device).count();
            println!("adaptive: {adaptive}: {on_devices} of {}", seen.len());
            assert!(on_devices > 0, "{sql}");
        }
    }
    cluster.assert_clean();
}
