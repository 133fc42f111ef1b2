//! Tables on the workers' devices, by name.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device_cluster::codec::DeviceTables;
use arrow_device_cluster::distributed::DeviceDistributedExt;
use arrow_device_datafusion::{DeviceResolver, DeviceTable};
use datafusion::arrow::array::{Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::MemTable;
use datafusion::prelude::SessionContext;

use crate::cluster::{Cluster, Worker};
use crate::data;
use crate::nodes::{SIM, Urls, Way, coordinator};
use crate::support::{assert_same, error, query, tables};

const QUERIES: [&str; 4] = [
    "SELECT name FROM parts WHERE price > 500 AND id < 90",
    "SELECT count(*), sum(price), min(name) FROM parts",
    "SELECT p.name, count(*), sum(l.l_quantity) FROM parts p JOIN lineitem l ON p.id = l.l_partkey \
     WHERE p.price < 300 AND l.l_quantity < 24 GROUP BY p.name",
    "SELECT id FROM parts WHERE id < 5 UNION ALL SELECT p_partkey FROM part WHERE p_size = 1",
];

fn batch(number: i64) -> RecordBatch {
    let ids = number * 100..(number + 1) * 100;
    let names = StringArray::from_iter_values(ids.clone().map(|id| format!("part {}", id % 31)));
    RecordBatch::try_from_iter([
        (
            "id",
            Arc::new(Int64Array::from_iter_values(ids.clone())) as _,
        ),
        (
            "price",
            Arc::new(Int64Array::from_iter_values(ids.map(|id| id * 7919 % 1000))) as _,
        ),
        ("name", Arc::new(names) as _),
    ])
    .unwrap()
}

fn schema() -> SchemaRef {
    batch(0).schema()
}

/// The table on the device of a worker.
fn with_table(mut worker: Worker) -> Worker {
    let up = |number| vec![worker.device.upload(&batch(number)).unwrap()];
    let batches = vec![up(0), up(1), up(2)];
    let table = DeviceTable::from_batches(schema(), worker.device.clone(), batches).unwrap();
    let tables = DeviceTables::of([("parts", table)]);
    worker.parts.extend = Arc::new(move |builder| builder.with_device_tables(tables.clone()));
    worker
}

/// What the coordinator knows of the table: it has no device, and no rows.
fn declared(partitions: usize) -> Arc<DeviceTable> {
    Arc::new(DeviceTable::declared("parts", schema(), SIM, partitions))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn are_read_by_the_workers() {
    let host = SessionContext::new();
    data::register(&host, tables()).await.unwrap();
    let rows = (0..3).map(|number| vec![batch(number)]).collect();
    let rows = MemTable::try_new(schema(), rows).unwrap();
    host.register_table("parts", Arc::new(rows)).unwrap();
    let way = Way::Coordinator;
    let workers = vec![with_table(Worker::new(way)), with_table(Worker::new(way))];
    let cluster = Cluster::start(way, workers).await;
    let session = cluster.session().await;
    session.register_table("parts", declared(3)).unwrap();
    for sql in QUERIES {
        let found = query(&session, sql).await.unwrap();
        assert_same(&found, &query(&host, sql).await.unwrap(), sql);
        let tasks = cluster.workers.iter().map(|worker| worker.tasks().1);
        let tasks: Vec<_> = tasks.collect();
        // Each has read a part.
        assert!(tasks.iter().all(|tasks| *tasks > 0), "{sql}: {tasks:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn that_are_not_there_say_so() {
    let way = Way::Coordinator;
    let cluster = Cluster::two(way).await;
    let session = cluster.session().await;
    let mine = DeviceTable::from_streams(schema(), SIM, 3, |request| async move {
        Ok(request.stream(futures::stream::empty()))
    });
    session.register_table("parts", declared(3)).unwrap();
    session.register_table("single", declared(1)).unwrap();
    session.register_table("mine", Arc::new(mine)).unwrap();
    let e = error(&session, QUERIES[2]).await;
    assert!(
        e.contains("\"parts\"") && e.contains("no DeviceTables"),
        "{e}"
    );
    let e = error(&session, &QUERIES[2].replace("parts", "mine")).await;
    assert!(e.contains("cannot be sent to another process"), "{e}");
    assert!(e.contains("DeviceTable::with_name"), "{e}");
    // The engine runs a query of one task here. There is no device, and would be no table.
    let single = "SELECT count(*) FROM single WHERE id > 7";
    let e = error(&session, single).await;
    assert!(e.contains("the session offers []"), "{e}");
    let device = Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap();
    let here = coordinator(way, Urls(cluster.urls.clone()), |builder| {
        builder.with_device_resolver(DeviceResolver::of([device]))
    });
    let here = here.unwrap();
    here.register_table("single", declared(1)).unwrap();
    let e = error(&here, single).await;
    assert!(e.contains("has only declared the table \"parts\""), "{e}");
    cluster.assert_clean();
}
