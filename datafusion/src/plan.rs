//! Operators whose batches are on a device, and the node that carries them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use datafusion_common::Statistics;
use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_expr::{Distribution, OrderingRequirements, PhysicalExpr};
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion_physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion_physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties,
    InputDistributionRequirements, PlanProperties,
};

use super::stream::{Measured, SendableDeviceStream, host_stream};
use arrow_device::Device;

/// An operator whose batches are on a device.
///
/// It becomes part of a plan inside a [`DeviceExec`], which measures it and shows it in `EXPLAIN`.
/// Its children are plans. After [`DeviceTransitions`](super::DeviceTransitions) has run, all of
/// them are on the operator's device, and [`execute_child`] returns their streams. A stream's
/// `poll_next` must not wait for the device: it queues the work and returns the batch before the
/// work is done.
///
/// The methods with defaults have the meaning of the methods of the same name in [`ExecutionPlan`].
pub trait DevicePlan: Any + fmt::Debug + Send + Sync {
    /// Returns the operator's name, for `EXPLAIN`.
    fn name(&self) -> &str;

    /// Writes what `EXPLAIN` shows after the name. By default, nothing.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = f;
        Ok(())
    }

    /// Returns the device that its batches are on.
    fn device(&self) -> &Device;

    /// Returns the schema, partitions and orderings of its output.
    fn properties(&self) -> &Arc<PlanProperties>;

    /// Returns the plans that it reads from.
    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>>;

    /// Returns the same operator over the same number of other children.
    ///
    /// # Errors
    /// Returns an error if the operator cannot run over these children.
    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>>;

    /// Starts a partition.
    ///
    /// # Errors
    /// Returns an error if the partition cannot be started. An error from the stream fails the
    /// query.
    fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream>;

    /// Returns how the children's rows must be distributed over their partitions. By default, in
    /// any way.
    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        let any = vec![Distribution::UnspecifiedDistribution; self.children().len()];
        InputDistributionRequirements::new(any)
    }

    /// Returns how each child's rows must be ordered. By default, in any way.
    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        vec![None; self.children().len()]
    }

    /// Returns whether the output keeps each child's order. By default, it does not.
    fn maintains_input_order(&self) -> Vec<bool> {
        vec![false; self.children().len()]
    }

    /// Returns the statistics of a partition, or of all. By default, nothing is known. `inputs` are
    /// the children's statistics: of the same partition, or unknown if a child has another number
    /// of partitions.
    ///
    /// # Errors
    /// Returns an error if the statistics cannot be computed.
    fn statistics(
        &self,
        partition: Option<usize>,
        inputs: &[Arc<Statistics>],
    ) -> Result<Arc<Statistics>> {
        let _ = (partition, inputs);
        let schema = self.properties().equivalence_properties().schema();
        Ok(Arc::new(Statistics::new_unknown(schema)))
    }

    /// Returns the expressions of the operator. By default, none.
    fn expressions(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        Vec::new()
    }

    /// Returns whether a limit on its rows may be pushed to its children, which requires that each
    /// partition has as many rows as the child's partition of the same number. By default, it may
    /// not.
    fn supports_limit_pushdown(&self) -> bool {
        false
    }

    /// Returns the limit on the rows of each partition, if there is one.
    fn fetch(&self) -> Option<usize> {
        None
    }

    /// Returns the same operator with another limit, or `None`, the default, if it does not support
    /// limits.
    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn DevicePlan>> {
        let _ = limit;
        None
    }
}

/// The node of a plan that holds a [`DevicePlan`].
///
/// A parent on the same device reads the operator's device stream. A parent on the host would read
/// host batches, but [`DeviceTransitions`](super::DeviceTransitions) makes the download a node of
/// its own.
#[derive(Clone)]
pub struct DeviceExec {
    plan: Arc<dyn DevicePlan>,
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceExec {
    /// Makes a node around an operator.
    pub fn new(plan: Arc<dyn DevicePlan>) -> Self {
        Self {
            plan,
            metrics: ExecutionPlanMetricsSet::new(),
        }
    }

    /// Returns the operator. `(&**plan as &dyn Any).downcast_ref()` downcasts it.
    pub fn plan(&self) -> &Arc<dyn DevicePlan> {
        &self.plan
    }

    /// Returns the device that its batches are on.
    pub fn device(&self) -> &Device {
        self.plan.device()
    }

    /// Starts a partition, and returns its stream, which counts the node's metrics.
    ///
    /// # Errors
    /// Returns the operator's error if the partition cannot be started.
    pub fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let stream = self.plan.execute_device(partition, context)?;
        Ok(Box::pin(Measured::new(stream, &self.metrics, partition)))
    }

    /// Returns the node if `plan` is one.
    pub fn of(plan: &Arc<dyn ExecutionPlan>) -> Option<&Self> {
        plan.downcast_ref()
    }
}

/// Starts a partition of a child of a [`DevicePlan`], and returns its device stream. The plan must
/// have been through [`DeviceTransitions`](super::DeviceTransitions).
///
/// # Errors
/// Returns an internal error for a child on the host, and the child's error if the partition cannot
/// be started.
pub fn execute_child(
    child: &Arc<dyn ExecutionPlan>,
    partition: usize,
    context: Arc<TaskContext>,
) -> Result<SendableDeviceStream> {
    match DeviceExec::of(child) {
        Some(device) => device.execute_device(partition, context),
        None => Err(DataFusionError::Internal(format!(
            "{} is not a device operator; the physical optimizer rule DeviceTransitions inserts a \
             HostToDeviceExec above it",
            child.name()
        ))),
    }
}

impl fmt::Debug for DeviceExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceExec").field(&self.plan).finish()
    }
}

impl DisplayAs for DeviceExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match t {
            DisplayFormatType::Default | DisplayFormatType::Verbose => {
                write!(f, "{}: device={}", self.plan.name(), self.device().id())?;
                self.plan.describe(f)
            }
            DisplayFormatType::TreeRender => writeln!(f, "device={}", self.device().id()),
        }
    }
}

impl ExecutionPlan for DeviceExec {
    fn name(&self) -> &str {
        self.plan.name()
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.plan.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.plan.children()
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let expected = self.children().len();
        if children.len() != expected {
            return Err(DataFusionError::Internal(format!(
                "{} children for {}, which has {expected}",
                children.len(),
                self.name()
            )));
        }
        Ok(Arc::new(Self::new(self.plan.with_children(children)?)))
    }

    /// Repartitioning would happen on the host.
    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false; self.children().len()]
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        self.plan.input_distribution_requirements()
    }

    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        self.plan.required_input_ordering()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        self.plan.maintains_input_order()
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        let mut recursion = TreeNodeRecursion::Continue;
        for expression in self.plan.expressions() {
            recursion = recursion.visit_sibling(|| f(expression))?;
        }
        Ok(recursion)
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        let stream = self.execute_device(partition, context)?;
        Ok(host_stream(stream, None))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        let own = self.properties().output_partitioning().partition_count();
        let of = |child: &&Arc<dyn ExecutionPlan>| {
            let partitions = child.output_partitioning().partition_count();
            match partition {
                Some(_) if partitions != own => ChildStats::Skip,
                _ => ChildStats::At(partition),
            }
        };
        self.children().iter().map(of).collect()
    }

    fn statistics_from_inputs(
        &self,
        input_stats: &[Arc<Statistics>],
        args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        self.plan.statistics(args.partition(), input_stats)
    }

    fn supports_limit_pushdown(&self) -> bool {
        self.plan.supports_limit_pushdown()
    }

    fn fetch(&self) -> Option<usize> {
        self.plan.fetch()
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        let plan = self.plan.with_fetch(limit)?;
        Some(Arc::new(Self::new(plan)))
    }
}
