//! Device operators that read all rows of a child keep their stage in one task.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device_cluster::distributed::DeviceDistributedExt;
use arrow_device_datafusion::{DeviceForm, DeviceResolver, DeviceToHostExec};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::{ExecutionPlan, replace_children_if_necessary};
use datafusion_distributed::display_plan_ascii;

use crate::cluster::Cluster;
use crate::data;
use crate::nodes::{SIM, Urls, Way, codec, coordinator, rule};
use crate::support::{query, tables};

/// Puts the exchange above a download on the device, which `DeviceRule::rewrite` does not do.
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

/// The plugin, in the plan before it is divided.
fn before(builder: SessionStateBuilder) -> SessionStateBuilder {
    let device = Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap();
    builder
        .with_physical_optimizer_rule(Arc::new(rule()))
        .with_physical_optimizer_rule(Arc::new(Exchanges))
        .with_device_plans(None, codec())
        // The engine may run a stage of one task here.
        .with_device_resolver(DeviceResolver::of([device]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_one_task() {
    let cluster = Cluster::two(Way::Coordinator).await;
    let session = coordinator(Way::Workers, Urls(cluster.urls.clone()), before).unwrap();
    data::register(&session, tables()).await.unwrap();
    let sql = "SELECT sum(n) FROM (SELECT l_suppkey % 3 AS s, count(*) AS n FROM \
               (SELECT l_suppkey FROM lineitem WHERE l_quantity > 25 LIMIT 700) GROUP BY s)";
    let plan = session.sql(sql).await.unwrap();
    let plan = plan.create_physical_plan().await.unwrap();
    let shown = display_plan_ascii(&*plan, false);
    assert!(shown.contains("DeviceCoalescePartitionsExec"), "{shown}");
    let found = query(&session, sql).await.unwrap();
    let found = pretty_format_batches(&found).unwrap().to_string();
    assert!(found.contains("| 700 "), "{found}\n{shown}");
    cluster.assert_clean();
}
