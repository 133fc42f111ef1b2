//! What DataFusion asks of a [`DeviceToHostExec`].

use std::fmt;
use std::sync::Arc;

use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{Result, Statistics};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_expr::PhysicalExpr;
use datafusion_physical_plan::execution_plan::{CardinalityEffect, ReplaceChildrenOptions};
use datafusion_physical_plan::metrics::MetricsSet;
use datafusion_physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion_physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};

use super::to_host::DeviceToHostExec;
use crate::children::{only, the_same};
use crate::exec::DeviceExec;

impl DisplayAs for DeviceToHostExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = DeviceExec::of(&self.input).map(DeviceExec::device);
        match (t, device) {
            (DisplayFormatType::TreeRender, Some(id)) => writeln!(f, "device={id}"),
            (DisplayFormatType::TreeRender, None) => Ok(()),
            (_, Some(id)) => write!(f, "DeviceToHostExec: device={id}"),
            (_, None) => write!(f, "DeviceToHostExec"),
        }
    }
}

impl ExecutionPlan for DeviceToHostExec {
    fn name(&self) -> &str {
        "DeviceToHostExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(Self::new(only(self.name(), children)?)))
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(Self::new(only(self.name(), children)?)))
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let Some(input) = DeviceExec::of(&self.input) else {
            return self.input.execute(partition, context);
        };
        input.execute_down(partition, context, self.name(), Some(&self.metrics))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        vec![ChildStats::At(partition)]
    }

    fn statistics_from_inputs(
        &self,
        input_stats: &[Arc<Statistics>],
        _: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        the_same(input_stats)
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Equal
    }
}
