//! [`DevicePlan`]: operators whose batches are on a device.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use datafusion_common::config::ConfigOptions;
use datafusion_common::{Result, Statistics};
use datafusion_execution::TaskContext;
use datafusion_physical_expr::{
    Distribution, OrderingRequirements, PhysicalExpr, PhysicalSortExpr,
};
use datafusion_physical_plan::execution_plan::{CardinalityEffect, InvariantLevel};
use datafusion_physical_plan::filter_pushdown::{
    ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation,
};
use datafusion_physical_plan::metrics::MetricsSet;
use datafusion_physical_plan::projection::ProjectionExec;
use datafusion_physical_plan::statistics::ChildStats;
use datafusion_physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, InputDistributionRequirements, PlanProperties,
    SortOrderPushdownResult,
};

use super::spec::DeviceSpec;
use super::stream::SendableDeviceStream;
use arrow_device::Device;

/// An operator whose batches are on a device.
///
/// It becomes part of a plan inside a [`DeviceExec`](super::DeviceExec), which opens its device, measures it and shows it in
/// `EXPLAIN`. Its children are plans. After [`DeviceTransitions`](super::DeviceTransitions) has run, all of them are on the
/// operator's device, and [`execute_child`](super::execute_child) returns their streams. A stream's `poll_next` must not wait
/// for the device: it queues the work and returns the batch before the work is done.
///
/// Methods that [`ExecutionPlan`] has by the same name have the same meaning; where they return operators, `DeviceExec` wraps each of
/// them in a node. By default nothing is known of the operator, and nothing is pushed into it or below it.
pub trait DevicePlan: Any + fmt::Debug + Send + Sync {
    /// Returns the operator's name, for `EXPLAIN`.
    fn name(&self) -> &str;

    /// Writes what `EXPLAIN` shows after the name and the device, beginning with `", "`. By default, nothing.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = f;
        Ok(())
    }

    /// Writes the lines that `EXPLAIN FORMAT TREE` shows below the device, such as `fetch=10`, each with an end of line. By
    /// default, nothing.
    fn describe_tree(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = f;
        Ok(())
    }

    /// Returns which device its batches are on.
    fn device(&self) -> &DeviceSpec;

    /// Returns the schema, partitions and orderings of its output, whether it ends, when it returns rows, and how it yields to other
    /// tasks, as for any node of DataFusion. A `DeviceExec` yields by itself, so
    /// [`SchedulingType::Cooperative`](datafusion_physical_plan::execution_plan::SchedulingType) is true of every operator.
    fn properties(&self) -> &Arc<PlanProperties>;

    /// Returns the plans that it reads from.
    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>>;

    /// Returns the same operator over the same number of other children.
    ///
    /// # Errors
    /// Returns an error if the operator cannot run over these children.
    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>>;

    /// Returns DataFusion's node that does the same on the host, over the same children, or `None`, the default, if there is none: each of
    /// its partitions has the rows of the operator's. An operator that was put in the place of such a node keeps it, and returns it here.
    ///
    /// Its schema and number of partitions are the operator's. Partitions may run in different places, and a partition may be started twice:
    /// do not return a node if partitions share state or exchange rows.
    ///
    /// It runs in place of the operator if the session says so ([`DeviceOptions`](super::DeviceOptions)): always, or with
    /// [`fallback`](super::DeviceOptions::fallback) if the device cannot be opened, or if its memory is not enough for a partition's first batch
    /// and what the operator reads can be read again. The operators below decide for themselves. `EXPLAIN ANALYZE` and
    /// [`ran_on_host`](super::ran_on_host) say why.
    fn on_host(&self) -> Option<Arc<dyn ExecutionPlan>> {
        None
    }

    /// Starts a partition, whose batches are on `device`, which [`device`](Self::device) describes. Another partition may get
    /// another device.
    ///
    /// It runs on a thread of the runtime and must not block. The stream's batches are on `device` and have the schema of
    /// [`properties`](Self::properties). State of a device, such as loaded kernels, is best kept by device and shared by operators.
    ///
    /// # Errors
    /// Returns an error if the partition cannot be started. An error from the stream fails the query.
    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream>;

    /// Returns how the children's rows must be distributed over their partitions. By default, in any way.
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

    /// Returns whether the operator gains from more partitions of each child. By default, it does not: DataFusion would
    /// repartition on the host.
    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false; self.children().len()]
    }

    /// Returns of which partition of each child [`statistics`](Self::statistics) of a partition, or of all, needs the statistics. By
    /// default, of the same partition, or of all if the operator has only one, and none of a child that has another number of
    /// partitions.
    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        let own = self.properties().output_partitioning().partition_count();
        let of = |child: &&Arc<dyn ExecutionPlan>| {
            let partitions = child.output_partitioning().partition_count();
            match partition {
                // The only partition is made of all of the child's.
                Some(_) if own == 1 => ChildStats::At(None),
                Some(_) if partitions != own => ChildStats::Skip,
                _ => ChildStats::At(partition),
            }
        };
        self.children().iter().map(of).collect()
    }

    /// Returns the statistics of a partition, or of all. By default, nothing is known. `inputs` are the children's
    /// statistics for which [`child_stats_requests`](Self::child_stats_requests) asks, and unknown ones for those that it skips.
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

    /// Returns how the number of rows of the output compares with that of the input. By default, unknown.
    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Unknown
    }

    /// Returns the expressions of the operator, without those of its children. By default, none.
    fn expressions(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        Vec::new()
    }

    /// Returns the dynamic expressions that the operator updates while it runs. By default, none.
    fn dynamic_expressions_produced(&self) -> Vec<Arc<dyn PhysicalExpr>> {
        Vec::new()
    }

    /// Returns whether a limit on its rows may be pushed to its children, which requires that each partition has as many rows
    /// as the child's partition of the same number. By default, it may not.
    fn supports_limit_pushdown(&self) -> bool {
        false
    }

    /// Returns the limit on the rows of each partition, if there is one.
    fn fetch(&self) -> Option<usize> {
        None
    }

    /// Returns the same operator with another limit, or `None`, the default, if it does not support limits.
    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn DevicePlan>> {
        let _ = limit;
        None
    }

    /// Returns the same operator with up to so many partitions, or `None`, the default, if its partitions cannot change.
    ///
    /// # Errors
    /// Returns an error if the operator cannot be made.
    fn repartitioned(
        &self,
        target_partitions: usize,
        config: &ConfigOptions,
    ) -> Result<Option<Arc<dyn DevicePlan>>> {
        let _ = (target_partitions, config);
        Ok(None)
    }

    /// Returns the plan of this operator and a projection above it with the projection done by the operator or below it, or
    /// `None`, the default, if the projection stays above.
    ///
    /// # Errors
    /// Returns an error if the plan cannot be made.
    fn try_swapping_with_projection(
        &self,
        projection: &ProjectionExec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let _ = projection;
        Ok(None)
    }

    /// Returns which of the filters above may go to which child, and which of its own. By default, none may.
    ///
    /// # Errors
    /// Returns an error if the filters cannot be examined.
    fn gather_filters_for_pushdown(
        &self,
        phase: FilterPushdownPhase,
        parent_filters: Vec<Arc<dyn PhysicalExpr>>,
        config: &ConfigOptions,
    ) -> Result<FilterDescription> {
        let _ = (phase, config);
        let children = self.children();
        Ok(FilterDescription::all_unsupported(
            &parent_filters,
            &children,
        ))
    }

    /// Returns which of the filters above are done by the operator or its children, given what the children said, and the operator
    /// that does them. By default, those that all children do.
    ///
    /// # Errors
    /// Returns an error if the operator cannot be made.
    fn handle_child_pushdown_result(
        &self,
        phase: FilterPushdownPhase,
        child_pushdown_result: ChildPushdownResult,
        config: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn DevicePlan>>> {
        let _ = (phase, config);
        Ok(FilterPushdownPropagation::if_all(child_pushdown_result))
    }

    /// Returns the same operator with its rows in this order, exactly or nearly, if it can return them in this order. By default, it cannot.
    ///
    /// # Errors
    /// Returns an error if the operator cannot be made.
    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
    ) -> Result<SortOrderPushdownResult<Arc<dyn DevicePlan>>> {
        let _ = order;
        Ok(SortOrderPushdownResult::Unsupported)
    }

    /// Returns the same operator with the order of its rows kept, or not. `None`, the default, if it knows no such choice.
    fn with_preserve_order(&self, preserve_order: bool) -> Option<Arc<dyn DevicePlan>> {
        let _ = preserve_order;
        None
    }

    /// Returns the operator as it was before it ran, for a plan that runs again, as in a recursive query. By default, the same
    /// operator over the same children: an operator whose copies share state of a run must override this.
    ///
    /// # Errors
    /// Returns an error if the operator cannot be made.
    fn reset_state(&self) -> Result<Arc<dyn DevicePlan>> {
        self.with_children(self.children().into_iter().cloned().collect())
    }

    /// Returns the operator with state of another node, such as the work table of a recursive query. `None`, the default, if it takes none.
    fn with_new_state(&self, state: Arc<dyn Any + Send + Sync>) -> Option<Arc<dyn DevicePlan>> {
        let _ = state;
        None
    }

    /// Returns the operator's own metrics, which are shown beside those of the node. By default, none.
    fn metrics(&self) -> Option<MetricsSet> {
        None
    }

    /// Checks what must hold of the operator, beside what DataFusion checks of every node.
    ///
    /// # Errors
    /// Returns an error if it does not hold.
    fn check_invariants(&self, check: InvariantLevel) -> Result<()> {
        let _ = check;
        Ok(())
    }
}
