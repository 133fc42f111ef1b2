//! A worker with a device beside one without.

use std::time::{Duration, Instant};

use arrow_device_cluster::distributed::{DeviceDistributedExt, DevicePlacement};
use datafusion::error::DataFusionError;
use url::Url;

use crate::cluster::{Cluster, Worker};
use crate::nodes::{SIM, Urls, Way, coordinator};
use crate::support::{assert_same, error, expected, query, sql, tables};

/// Scans and joins with filters on devices, and what is above them.
const QUERIES: [&str; 4] = ["q01", "q03", "q06", "q10"];
const QUICK: Duration = Duration::from_secs(20);

/// Workers that insert the operators themselves need nothing else: the others run their tasks on the host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_insert_them() {
    let workers = vec![Worker::new(Way::Workers), Worker::plain()];
    let cluster = Cluster::start(Way::Workers, workers).await;
    let session = cluster.session().await;
    for name in QUERIES {
        let found = query(&session, sql(name)).await.unwrap();
        assert_same(&found, &expected(sql(name)).await, name);
    }
    let of_each: Vec<_> = cluster.workers.iter().map(Worker::tasks).collect();
    assert!(of_each[0].1 > 0, "{of_each:?}");
    assert!(of_each[1].0 > 0 && of_each[1].1 == 0, "{of_each:?}");
    assert!(cluster.workers[0].device.stats().bytes_to_device > 0);
    cluster.assert_clean();
}

/// Plans with device nodes go where the devices are, and others go everywhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placed() {
    let way = Way::Coordinator;
    let workers = vec![Worker::without_device(way), Worker::new(way)];
    let cluster = Cluster::start(way, workers).await;
    let placement = DevicePlacement::of([(cluster.urls[1].clone(), vec![SIM])]);
    let session = cluster.session_with(|builder| builder.with_device_placement(placement));
    let session = session.await;
    for name in QUERIES.into_iter().chain(["q09"]) {
        let found = query(&session, sql(name)).await.unwrap();
        assert_same(&found, &expected(sql(name)).await, name);
    }
    let of_each: Vec<_> = cluster.workers.iter().map(Worker::tasks).collect();
    assert!(of_each[0].0 > 0 && of_each[0].1 == 0, "{of_each:?}");
    assert!(of_each[1].1 > 0, "{of_each:?}");
    cluster.assert_clean();
}

/// Two of three workers have devices: they share the three tasks of a stage.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placed_in_turn() {
    let way = Way::Coordinator;
    let workers = vec![
        Worker::new(way),
        Worker::without_device(way),
        Worker::new(way),
    ];
    let cluster = Cluster::start(way, workers).await;
    let urls = cluster.urls.clone();
    let placement = DevicePlacement::new(move || {
        let with_device = |at: usize| (urls[at].clone(), vec![SIM]);
        Ok(vec![with_device(0), with_device(2)])
    });
    let session = cluster.session_with(|builder| builder.with_device_placement(placement));
    let session = session.await;
    let found = query(&session, sql("q06")).await.unwrap();
    assert_same(&found, &expected(sql("q06")).await, "q06");
    let of_each: Vec<_> = cluster
        .workers
        .iter()
        .map(|worker| worker.tasks().1)
        .collect();
    assert!(of_each == [2, 0, 1] || of_each == [1, 0, 2], "{of_each:?}");
    cluster.assert_clean();
}

/// Without placement, the worker without a device says what it lacks, at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn not_placed() {
    for way in [Way::Coordinator, Way::Workers] {
        let workers = vec![Worker::new(way), Worker::without_device(way)];
        let cluster = Cluster::start(way, workers).await;
        let session = cluster.session().await;
        let start = Instant::now();
        let e = error(&session, sql("q06")).await;
        assert!(start.elapsed() < QUICK, "{:?}", start.elapsed());
        for part in ["needs a device", "sim", "the session offers []"] {
            assert!(e.contains(part), "{way:?}: {e}");
        }
        // Those that need no device go on.
        let found = query(&session, sql("q09")).await.unwrap();
        assert_same(&found, &expected(sql("q09")).await, "q09");
        cluster.assert_clean();
    }
}

/// A worker that knows no device nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_codec() {
    let workers = vec![Worker::plain(), Worker::plain()];
    let cluster = Cluster::start(Way::Coordinator, workers).await;
    let session = cluster.session().await;
    let e = error(&session, sql("q06")).await;
    assert!(
        e.contains("no codec for the device operator DeviceFilterExec"),
        "{e}"
    );
}

/// Nobody has the device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placed_nowhere() {
    let way = Way::Coordinator;
    let cluster = Cluster::start(way, vec![Worker::new(way), Worker::new(way)]).await;
    let gone = Url::parse("http://localhost:1").unwrap();
    let cuda = || vec!["cuda".parse().unwrap()];
    for (placement, parts) in [
        (
            DevicePlacement::of([]),
            vec!["wants the devices [sim]", "none offers any"],
        ),
        (
            DevicePlacement::of([(cluster.urls[0].clone(), cuda()), (gone, vec![SIM])]),
            vec![
                "offers [cuda]",
                "localhost:1/ offers [sim], which the worker resolver does not return",
            ],
        ),
        (
            DevicePlacement::new(|| Err(DataFusionError::Execution("the list is gone".into()))),
            vec!["the list is gone"],
        ),
    ] {
        let session = cluster.session_with(|builder| builder.with_device_placement(placement));
        let e = error(&session.await, sql("q06")).await;
        assert!(parts.iter().all(|part| e.contains(part)), "{e}");
    }
    let none = coordinator(way, Urls(cluster.urls.clone()), |builder| builder).unwrap();
    crate::data::register(&none, tables()).await.unwrap();
    assert!(query(&none, sql("q06")).await.is_ok());
    cluster.assert_clean();
}
