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
/// It becomes part of a plan inside a [`DeviceExec`], which measures it and shows it in `EXPLAIN`. Its children are
/// plans; once [`DeviceTransitions`](super::DeviceTransitions) has run, all of them are on the operator's device,
/// and [`execute_child`] gives their streams. Nothing that a stream's `poll_next` does may wait for the device: queue
/// the work, and give the batch before it is done.
///
/// The methods with defaults mean what those of the same name mean in [`ExecutionPlan`].
pub trait DevicePlan: Any + fmt::Debug + Send + Sync {
    /// The operator's name, for `EXPLAIN`.
    fn name(&self) -> &str;

    /// What `EXPLAIN` says after the name; nothing by default.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = f;
        Ok(())
    }

    /// The device that its batches are on.
    fn device(&self) -> &Device;

    /// Schema, partitions and orderings of what it gives.
    fn properties(&self) -> &Arc<PlanProperties>;

    /// What it reads.
    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>>;

    /// The same operator over other children, as many.
    ///
    /// # Errors
    /// Returns an error if the operator cannot run over these children.
    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>>;

    /// Starts a partition.
    ///
    /// # Errors
    /// Returns an error if the partition cannot be started. An error from the stream fails the query.
    fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream>;

    /// How the children's rows must be spread over their partitions; any way by default.
    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        let any = vec![Distribution::UnspecifiedDistribution; self.children().len()];
        InputDistributionRequirements::new(any)
    }

    /// How each child's rows must be ordered; any way by default.
    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        vec![None; self.children().len()]
    }

    /// Whether each child's order is that of the result; not by default.
    fn maintains_input_order(&self) -> Vec<bool> {
        vec![false; self.children().len()]
    }

    /// What is known of a partition, or of all; nothing by default. `inputs` are the children's: of the same partition, if
    /// they have as many, else unknown.
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

    /// The expressions in it; none by default.
    fn expressions(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        Vec::new()
    }

    /// Whether a limit on its rows may be pushed to its children; not by default. Only where each partition has as many rows as
    /// the child's of the same number.
    fn supports_limit_pushdown(&self) -> bool {
        false
    }

    /// The most rows that it gives of each partition, if there is such a limit.
    fn fetch(&self) -> Option<usize> {
        None
    }

    /// The same operator with another limit; `None`, as by default, if it cannot have one.
    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn DevicePlan>> {
        let _ = limit;
        None
    }
}

/// The node of a plan that carries a [`DevicePlan`]. A parent on the same device takes the operator's stream; to a
/// parent on the host it gives host batches, but [`DeviceTransitions`](super::DeviceTransitions) makes that a node of
/// its own.
#[derive(Clone)]
pub struct DeviceExec {
    plan: Arc<dyn DevicePlan>,
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceExec {
    /// A node around an operator.
    pub fn new(plan: Arc<dyn DevicePlan>) -> Self {
        Self {
            plan,
            metrics: ExecutionPlanMetricsSet::new(),
        }
    }

    /// The operator. `(&**plan as &dyn Any).downcast_ref()` finds its type.
    pub fn plan(&self) -> &Arc<dyn DevicePlan> {
        &self.plan
    }

    /// The device that its batches are on.
    pub fn device(&self) -> &Device {
        self.plan.device()
    }

    /// The operator's stream of a partition, measured.
    ///
    /// # Errors
    /// What the operator says.
    pub fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let stream = self.plan.execute_device(partition, context)?;
        Ok(Box::pin(Measured::new(stream, &self.metrics, partition)))
    }

    /// The node in a plan, if it is one.
    pub fn of(plan: &Arc<dyn ExecutionPlan>) -> Option<&Self> {
        plan.downcast_ref()
    }
}

/// A child's stream of a partition: `children()[i]` of an operator whose plan has been through
/// [`DeviceTransitions`](super::DeviceTransitions).
///
/// # Errors
/// An internal error for a child on the host; what the child says.
pub fn execute_child(
    child: &Arc<dyn ExecutionPlan>,
    partition: usize,
    context: Arc<TaskContext>,
) -> Result<SendableDeviceStream> {
    match DeviceExec::of(child) {
        Some(device) => device.execute_device(partition, context),
        None => Err(DataFusionError::Internal(format!(
            "{} is no operator on a device; the physical optimizer rule DeviceTransitions puts a \
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

    /// Other partitions would be made on the host.
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
