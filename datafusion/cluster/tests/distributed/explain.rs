//! What `EXPLAIN` shows, and options of a session.

use arrow_device_datafusion::DeviceOptions;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::prelude::SessionContext;
use datafusion_distributed::{DistributedExt, display_plan_ascii};

use crate::cluster::Cluster;
use crate::nodes::Way;
use crate::support::query;

const SQL: &str = "SELECT count(*) FROM lineitem WHERE l_quantity < 24";

async fn shown(session: &SessionContext, sql: &str) -> String {
    let found = query(session, sql).await.unwrap();
    pretty_format_batches(&found).unwrap().to_string()
}

/// The coordinator shows what it inserts, and what the workers have counted there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shows_what_runs() {
    let cluster = Cluster::two(Way::Coordinator).await;
    let session = cluster.session().await;
    let plan = session.sql(SQL).await.unwrap();
    let plan = plan.create_physical_plan().await.unwrap();
    let text = display_plan_ascii(&*plan, false);
    for node in [
        "DeviceToHostExec: device=sim",
        "DeviceFilterExec: device=sim",
        "HostToDeviceExec: device=sim",
    ] {
        assert!(text.contains(node), "{text}");
    }
    let text = shown(&session, &format!("EXPLAIN ANALYZE {SQL}")).await;
    let line = |node: &str| {
        let mut lines = text.lines().filter(|line| line.contains(node));
        lines
            .next()
            .unwrap_or_else(|| panic!("no {node} in\n{text}"))
            .to_owned()
    };
    assert!(
        line("HostToDeviceExec").contains("bytes_to_device="),
        "{text}"
    );
    assert!(
        !line("HostToDeviceExec").contains("bytes_to_device=0"),
        "{text}"
    );
    assert!(
        line("DeviceToHostExec").contains("bytes_to_host="),
        "{text}"
    );
    cluster.assert_clean();
}

/// If the workers insert them, the coordinator shows its own plan, and can analyze it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shows_what_was_planned() {
    let cluster = Cluster::two(Way::Workers).await;
    let session = cluster.session().await;
    let text = shown(&session, &format!("EXPLAIN ANALYZE {SQL}")).await;
    assert!(
        text.contains("FilterExec: l_quantity") && !text.contains("DeviceFilterExec"),
        "{text}"
    );
    assert!(cluster.workers.iter().any(|worker| worker.tasks().1 > 0));
    cluster.assert_clean();
}

/// Batches of the session's size: many small copies instead of few.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_travel() {
    let mut copies = Vec::new();
    for upload_rows in [0, 1 << 20] {
        let cluster = Cluster::two(Way::Workers).await;
        let session = cluster.session_with(|builder| {
            let mut options = DeviceOptions::default();
            options.upload_rows = upload_rows;
            let builder = builder.with_distributed_option_extension(options);
            builder.with_distributed_shuffle_batch_size(1024).unwrap()
        });
        let session = session.await;
        shown(&session, SQL).await;
        let of_workers = cluster
            .workers
            .iter()
            .map(|worker| worker.device.stats().copies);
        copies.push(of_workers.sum::<u64>());
        cluster.assert_clean();
    }
    assert!(copies[0] > 2 * copies[1], "{copies:?}");
}
