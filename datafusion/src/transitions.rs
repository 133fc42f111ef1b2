//! Uploads and downloads in plans.

use std::fmt;
use std::sync::Arc;

use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{DataFusionError, Result, Statistics};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_expr::PhysicalExpr;
use datafusion_physical_plan::execution_plan::SchedulingType;
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion_physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion_physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
};

use super::metrics::{DeviceMetrics, to_datafusion};
use super::plan::{DeviceExec, DevicePlan};
use super::stream::{SendableDeviceStream, host_stream};
use super::upload::ToUpload;
use arrow_device::Device;
use arrow_device::async_stream::UploadingStream;

/// The node that downloads a device operator's batches, one ahead of its parent.
///
/// It keeps the order and the partitions of the rows, so DataFusion may push sorts and limits below
/// it. They run on the host and read host batches of the device operator; above them, this node
/// passes batches on and counts nothing. [`DeviceTransitions`](super::DeviceTransitions) moves it
/// back to the device operator.
#[derive(Clone, Debug)]
pub struct DeviceToHostExec {
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceToHostExec {
    /// Makes a node above `input`, which is a [`DeviceExec`] or a node on the host.
    pub fn new(input: Arc<dyn ExecutionPlan>) -> Self {
        let mut properties = input.properties().clone();
        if DeviceExec::of(&input).is_some() {
            let own = PlanProperties::clone(&properties);
            properties = Arc::new(own.with_scheduling_type(SchedulingType::Cooperative));
        }
        Self {
            input,
            properties,
            metrics: ExecutionPlanMetricsSet::new(),
        }
    }

    /// Returns the node below.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

impl DisplayAs for DeviceToHostExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = DeviceExec::of(&self.input).map(|input| input.device().id());
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
        let stream = input.execute_device(partition, context)?;
        let metrics = DeviceMetrics::new(&self.metrics, partition);
        Ok(host_stream(stream, Some(metrics)))
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
}

/// The operator that uploads a host plan's batches to a device. Uploads run ahead of the operator
/// that reads them.
///
/// Transfers of small batches are dominated by a cost per batch, so batches of fewer than half the
/// session's `batch_size` rows are first joined into batches of `batch_size` rows, which copies
/// them once on the host. Larger batches are uploaded as they are. So is everything else whose join
/// could fail or cost more than it saves: batches of more than 16 MiB, dictionaries, run-end
/// encoded columns, unions and list views, and the batches of a plan whose input is unbounded,
/// where waiting for more rows would delay those that are there.
#[derive(Clone, Debug)]
pub struct HostToDeviceExec {
    input: Arc<dyn ExecutionPlan>,
    device: Device,
}

impl HostToDeviceExec {
    /// Makes an operator above `input`, a plan on the host. `DeviceExec::new(Arc::new(...))` makes
    /// it a node.
    pub fn new(input: Arc<dyn ExecutionPlan>, device: Device) -> Self {
        Self { input, device }
    }

    /// Returns the node below.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

impl DevicePlan for HostToDeviceExec {
    fn name(&self) -> &str {
        "HostToDeviceExec"
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let input = only(self.name(), children)?;
        Ok(Arc::new(Self::new(input, self.device.clone())))
    }

    fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let rows = match self.input.boundedness().is_unbounded() {
            true => 0,
            false => context.session_config().batch_size(),
        };
        let stream = self.input.execute(partition, context)?;
        let schema = self.input.schema();
        let queue = self.device.new_queue().map_err(to_datafusion)?;
        let stream = ToUpload::new(stream, schema.clone(), rows);
        Ok(Box::pin(UploadingStream::new_on(schema, stream, queue)))
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn statistics(&self, _: Option<usize>, inputs: &[Arc<Statistics>]) -> Result<Arc<Statistics>> {
        the_same(inputs)
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }
}

/// Returns the only child.
pub(super) fn only(
    name: &str,
    mut children: Vec<Arc<dyn ExecutionPlan>>,
) -> Result<Arc<dyn ExecutionPlan>> {
    match (children.pop(), children.len()) {
        (Some(child), 0) => Ok(child),
        _ => Err(DataFusionError::Internal(format!("{name} has one child"))),
    }
}

fn the_same(inputs: &[Arc<Statistics>]) -> Result<Arc<Statistics>> {
    let only = inputs.first().cloned();
    only.ok_or_else(|| DataFusionError::Internal("no statistics of the child".into()))
}

/// Checks that there are no children.
pub(super) fn no_children(name: &str, children: &[Arc<dyn ExecutionPlan>]) -> Result<()> {
    match children.len() {
        0 => Ok(()),
        n => Err(DataFusionError::Internal(format!(
            "{n} children for {name}, which has none"
        ))),
    }
}
