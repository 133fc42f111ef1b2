//! [`DeviceToHostExec`]: the download.

use std::fmt;
use std::sync::Arc;

use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{Result, Statistics, internal_datafusion_err, internal_err};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_expr::PhysicalExpr;
use datafusion_physical_plan::execution_plan::{CardinalityEffect, SchedulingType};
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion_physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion_physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};

use crate::exec::DeviceExec;
use crate::plugin::DeviceOperator;
use crate::spec::DeviceSpec;

/// The node that downloads a device operator's batches, one ahead of its parent.
///
/// It keeps the order and the partitions of the rows, so DataFusion may push sorts and limits below
/// it. They run on the host and read host batches of the device operator; above them, this node
/// passes batches on and counts nothing. [`DeviceRule`](crate::DeviceRule) moves it
/// back to the device operator.
#[derive(Clone, Debug)]
pub struct DeviceToHostExec {
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
    /// Which nodes of the plan below plugins have declined, and why, for `EXPLAIN`.
    pub(crate) declined: Vec<String>,
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceToHostExec {
    /// Makes a node above `input`, which is a [`DeviceExec`] or a node on the host.
    pub fn new(input: Arc<dyn ExecutionPlan>) -> Self {
        let mut properties = input.properties().clone();
        // With the same properties, the nodes above need not compute theirs again.
        let cooperates = properties.scheduling_type == SchedulingType::Cooperative;
        if DeviceExec::of(&input).is_some() && !cooperates {
            let own = PlanProperties::clone(&properties);
            properties = Arc::new(own.with_scheduling_type(SchedulingType::Cooperative));
        }
        Self {
            input,
            properties,
            declined: Vec::new(),
            metrics: ExecutionPlanMetricsSet::new(),
        }
    }

    /// The node at the top of a plan, some of whose nodes plugins have declined.
    pub(crate) fn noting(
        plan: Arc<dyn ExecutionPlan>,
        declined: Vec<String>,
    ) -> Arc<dyn ExecutionPlan> {
        let own = plan.downcast_ref::<Self>().cloned();
        let own = own.unwrap_or_else(|| Self::new(plan));
        Arc::new(Self { declined, ..own })
    }

    /// Returns the node below.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

/// A node whose operator returns the rows of `input`, as the download does, on a device.
pub(crate) fn passing(
    input: Arc<dyn ExecutionPlan>,
    device: impl Into<DeviceSpec>,
    operator: impl DeviceOperator,
) -> DeviceExec {
    let node = Arc::new(DeviceToHostExec::new(input));
    let mut node = DeviceExec::new(node, device, Arc::new(operator));
    node.passes_on = true;
    node
}

impl DisplayAs for DeviceToHostExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = DeviceExec::of(&self.input).map(DeviceExec::device);
        match (t, device) {
            (DisplayFormatType::TreeRender, Some(id)) => writeln!(f, "device={id}"),
            (DisplayFormatType::TreeRender, None) => Ok(()),
            (_, Some(id)) => write!(f, "DeviceToHostExec: device={id}"),
            (_, None) => write!(f, "DeviceToHostExec"),
        }?;
        let declined = self.declined.join("; ");
        match t {
            _ if declined.is_empty() => Ok(()),
            DisplayFormatType::TreeRender => writeln!(f, "declined={declined}"),
            _ => write!(f, ", declined=[{declined}]"),
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

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let Ok([input]) = <[_; 1]>::try_from(children) else {
            return internal_err!("DeviceToHostExec has one child");
        };
        let declined = self.declined.clone();
        let own = Self::new(input);
        Ok(Arc::new(Self { declined, ..own }))
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let Some(input) = DeviceExec::of(&self.input) else {
            return self.input.execute(partition, context);
        };
        input.execute_down(partition, context, self.name(), &self.metrics)
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
        let input = input_stats.first().cloned();
        input.ok_or_else(|| internal_datafusion_err!("no statistics of the child"))
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Equal
    }
}
