//! [`DevicePlanner`]: device operators in the stages of a coordinator's plan.

use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceInsertExec, DeviceRule, DeviceToHostExec};
use async_trait::async_trait;
use datafusion::catalog::Session;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::context::QueryPlanner;
use datafusion::logical_expr::LogicalPlan;
use datafusion::physical_plan::{ExecutionPlan, replace_children_if_necessary};
use datafusion_distributed::{
    DistributedConfig, DistributedExec, DistributedLeafExec, NetworkBoundaryExt,
};
use datafusion_proto::physical_plan::{DefaultPhysicalProtoConverter, PhysicalExtensionCodec};

use super::stage::rewrite_stage;
use crate::codec::DeviceCodec;

/// Plans as another planner, which distributes its plans, and then applies a rule to what the workers run of them. What runs on the
/// coordinator stays on the host.
pub(super) struct DevicePlanner {
    pub(super) distributed: Arc<dyn QueryPlanner + Send + Sync>,
    pub(super) rule: Option<DeviceRule>,
    pub(super) codec: DeviceCodec,
}

#[async_trait]
impl QueryPlanner for DevicePlanner {
    async fn create_physical_plan(
        &self,
        logical_plan: &LogicalPlan,
        session: &dyn Session,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let plan = self.distributed.create_physical_plan(logical_plan, session);
        let (plan, options) = (plan.await?, session.config().options());
        let dynamic = DistributedConfig::from_config_options(options)?.dynamic_task_count;
        if dynamic && self.rule.is_some() && plan.exists(|node| Ok(node.is::<DistributedExec>()))? {
            return Err(DataFusionError::Plan(
                "with_device_plans inserts device operators into the stages of a plan, but with dynamic task counts there are none \
                 before the query runs: set distributed.dynamic_task_count to false, or let the workers insert device operators \
                 (with_device_rule)"
                    .to_owned(),
            ));
        }
        let plan = self.on_workers(plan, options)?;
        self.check(&plan)?;
        Ok(plan)
    }
}

impl DevicePlanner {
    /// The plan with device operators in the stages that workers run.
    fn on_workers(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let stages = plan.is_network_boundary();
        let children = plan.children().into_iter().cloned();
        let children = children.map(|child| match stages {
            true => self.in_stages(child, options),
            false => self.on_workers(child, options),
        });
        let children = children.collect::<Result<_>>()?;
        replace_children_if_necessary(plan, children)
    }

    /// A stage, and those below it, with device operators. Rules see the scans of tables on devices, which have been divided among
    /// tasks.
    fn in_stages(
        &self,
        stage: Arc<dyn ExecutionPlan>,
        options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mut divided: Vec<Arc<dyn ExecutionPlan>> = Vec::new();
        let whole = stage.transform_up(|node| {
            let original = node.downcast_ref().map(DistributedLeafExec::original);
            match original.filter(|original| DeviceExec::of(original).is_some()) {
                Some(original) => {
                    let original = original.clone();
                    divided.push(node);
                    Ok(Transformed::yes(original))
                }
                None => Ok(Transformed::no(node)),
            }
        })?;
        let stage = match &self.rule {
            Some(rule) => rewrite_stage(whole.data, rule, options)?,
            None => rewrite_stage(whole.data, &DeviceRule::default(), options)?,
        };
        let mut found = 0;
        let stage = stage.transform_up(|node| {
            let is = |leaf: &&Arc<dyn ExecutionPlan>| {
                let original = leaf.downcast_ref().map(DistributedLeafExec::original);
                original.is_some_and(|original| Arc::ptr_eq(original, &node))
            };
            match divided.iter().find(is) {
                Some(leaf) => {
                    found += 1;
                    Ok(Transformed::yes(leaf.clone()))
                }
                None => Ok(Transformed::no(node)),
            }
        })?;
        match found == divided.len() {
            true => Ok(stage.data),
            // Each task would read all of the table.
            false => Err(DataFusionError::Plan(
                "a plugin has replaced the scan of a DeviceTable, which the tasks of a stage divide among themselves; plugins of \
                 with_device_plans must leave scans as they are"
                    .to_owned(),
            )),
        }
    }

    /// Checks that all device nodes can travel. While the query runs, an error would come late, since workers would wait for the plan.
    fn check(&self, plan: &Arc<dyn ExecutionPlan>) -> Result<()> {
        plan.apply(|node| {
            let part = node.downcast_ref().map(DistributedLeafExec::variants);
            let node = part.and_then(<[_]>::first).unwrap_or(node);
            let own = DeviceExec::of(node).is_some()
                || node.is::<DeviceToHostExec>()
                || node.is::<DeviceInsertExec>();
            if own {
                let converter = DefaultPhysicalProtoConverter {};
                self.codec
                    .try_encode(node.clone(), &mut Vec::new(), &converter)?;
            }
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok(())
    }
}

impl fmt::Debug for DevicePlanner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePlanner")
            .field("distributed", &self.distributed)
            .field("rule", &self.rule)
            .finish_non_exhaustive()
    }
}
