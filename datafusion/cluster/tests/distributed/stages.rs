//! Device operators that read all rows of a child keep their stage in one task.

use std::sync::Arc;

use arrow_device_cluster::distributed::DeviceDistributedExt;
use arrow_device_datafusion::{DeviceExec, DeviceForm, DeviceToHostExec};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::{ExecutionPlan, replace_children_if_necessary};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;

use crate::cluster::{Cluster, Worker};
use crate::nodes::{SIM, Urls, Way, codec, coordinator, rules};
use crate::support::{query, tables};

/// Puts the exchange above a download on the device, which `rewrite` does not do.
#[derive(Debug)]
struct Exchanges;

impl PhysicalOptimizerRule for Exchanges {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let lift = |node: Arc<dyn ExecutionPlan>| {
            let below = node.downcast_ref().map(CoalescePartitionsExec::input);
            let down = below.and_then(|below| below.downcast_ref::<DeviceToHostExec>());
            let Some(down) = down else {
                return Ok(Transformed::no(node));
            };
            let node = replace_children_if_necessary(node.clone(), vec![down.input().clone()])?;
            let form = DeviceForm::of(node, SIM)?.unwrap();
            let form = Arc::new(DeviceExec::new(Arc::new(form)));
            Ok(Transformed::yes(Arc::new(DeviceToHostExec::new(form)) as _))
        };
        Ok(plan.transform_up(lift)?.data)
    }

    fn name(&self) -> &str {
        "Exchanges"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_one_task() {
    let way = Way::Coordinator;
    let cluster = Cluster::start(way, vec![Worker::new(way), Worker::new(way)]).await;
    let mut with_exchanges = rules();
    with_exchanges.push(Arc::new(arrow_device_datafusion::DeviceTransitions));
    with_exchanges.push(Arc::new(Exchanges));
    let plans = |builder: datafusion::execution::SessionStateBuilder| {
        builder.with_device_plans(with_exchanges, codec())
    };
    // Not the way of the other tests: these rules instead of theirs.
    let session = coordinator(Way::Workers, Urls(cluster.urls.clone()), plans).unwrap();
    crate::data::register(&session, tables()).await.unwrap();
    let limited = "SELECT l_suppkey % 3 AS s, count(*) AS n FROM \
                   (SELECT l_suppkey FROM lineitem WHERE l_quantity > 25 LIMIT 700) GROUP BY s";
    let sql = format!("SELECT sum(n) FROM ({limited})");
    let plan = session
        .sql(&sql)
        .await
        .unwrap()
        .create_physical_plan()
        .await
        .unwrap();
    let shown = datafusion_distributed::display_plan_ascii(&*plan, false);
    assert!(shown.contains("DeviceCoalescePartitionsExec"), "{shown}");
    let found = query(&session, &sql).await.unwrap();
    let found = datafusion::arrow::util::pretty::pretty_format_batches(&found)
        .unwrap()
        .to_string();
    assert!(found.contains("700"), "{found}\n{shown}");
    cluster.assert_clean();
}
