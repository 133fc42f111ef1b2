//! [`DeviceForm`]: DataFusion's nodes that need no kernel, on a device.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{DataFusionError, Result, Statistics};
use datafusion_execution::TaskContext;
use datafusion_physical_expr::expressions::{CastExpr, Column};
use datafusion_physical_expr::{
    OrderingRequirements, Partitioning, PhysicalExpr, PhysicalSortExpr,
};
use datafusion_physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion_physical_plan::execution_plan::{
    CardinalityEffect, ChildrenPropertiesMode, InvariantLevel, ReplaceChildrenOptions,
};
use datafusion_physical_plan::filter_pushdown::{FilterDescription, FilterPushdownPhase};
use datafusion_physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion_physical_plan::projection::{ProjectionExec, make_with_child};
use datafusion_physical_plan::repartition::RepartitionExec;
use datafusion_physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion_physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion_physical_plan::union::UnionExec;
use datafusion_physical_plan::{
    DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, InputDistributionRequirements,
    PlanProperties, SortOrderPushdownResult, replace_children_if_necessary,
};

use super::shared::Shared;
use super::streams::{Columns, Limited};
use crate::child::{execute_child, execute_child_apart};
use crate::exec::DeviceExec;
use crate::memory::DeviceReservation;
use crate::parallel::merged;
use crate::plan::DevicePlan;
use crate::resolver::open_for;
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;
use crate::transfer::on_device;
use crate::transitions::below::operator;
use arrow_device::Device;

/// One of DataFusion's nodes that needs no kernel, as an operator on a device: it has the node's properties and gives
/// DataFusion the node's answers, and passes on batches that stay on the device.
///
/// | DataFusion's node | this operator | what it does |
/// | --- | --- | --- |
/// | `ProjectionExec` of columns: dropped, reordered, renamed, repeated | `DeviceProjectionExec` | shares the columns |
/// | `UnionExec` | `DeviceUnionExec` | passes batches on |
/// | `GlobalLimitExec`, `LocalLimitExec` | `DeviceLimitExec` | slices the first and the last batch that it returns |
/// | `CoalescePartitionsExec` | `DeviceCoalescePartitionsExec` | runs each of several partitions on a task of its own, one batch ahead; passes the batches of a single one on |
/// | `SortPreservingMergeExec` over one partition | `DeviceSortPreservingMergeExec` | passes batches on |
/// | `RepartitionExec`, round robin, without an order of several inputs to keep | `DeviceRepartitionExec` | gives each batch to the partition that asks first |
///
/// The partitions of a `DeviceRepartitionExec` share a run of the input, whether they are started with one task context or with one
/// each, as in DataFusion. Starting a partition again begins the next run. Plans may also run several times at once, each with a context of
/// its own, which `SessionContext::task_ctx` makes, if each run starts the same partition first; where it cannot be told which run a partition
/// belongs to, starting it is an error. `ExecutionPlan::reset_state` makes a plan without runs.
/// The inputs are dropped with the streams of all partitions. If partitions have not been started, their rows may still be
/// asked for: then the inputs stay until the plan is dropped, or until the next run begins.
///
/// The outputs of a round-robin repartition divide the rows among themselves as they ask for them, so all of them must run in one process, over
/// one copy of the plan. An engine that runs the partitions of one plan on several workers must leave `RepartitionExec` as it is.
///
/// Nothing is copied and no device memory is allocated, nothing waits, and no device work is queued, as long as the children are on
/// the same device. (Otherwise they are moved, as [`execute_child`] says.)
///
/// [`DeviceTransitions`](crate::DeviceTransitions) makes these operators of nodes that stand between operators on one device.
/// A rule that inserts device operators may do so, too:
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device::Devices;
/// use arrow_device_datafusion::{DeviceExec, DeviceForm, DeviceTable};
/// # use datafusion::physical_plan::{ExecutionPlan, limit::LocalLimitExec};
/// # fn main() -> datafusion::error::Result<()> {
/// # let batch = arrow_array::record_batch!(("a", Int64, [1, 2, 3])).unwrap();
/// # let device = Devices::cpu();
/// # let table = DeviceTable::from_batches(batch.schema(), device.clone(), vec![vec![device.upload(&batch).unwrap()]]).unwrap();
/// let scan = Arc::new(DeviceExec::new(Arc::new(table.scan_on_device(None, None)?)));
/// let limit: Arc<dyn ExecutionPlan> = Arc::new(LocalLimitExec::new(scan, 2));
/// let limit = DeviceForm::of(limit, device)?.expect("a limit needs no kernel");
/// let limit: Arc<dyn ExecutionPlan> = Arc::new(DeviceExec::new(Arc::new(limit)));
/// assert_eq!(limit.name(), "DeviceLimitExec");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceForm {
    /// DataFusion's node, over the operator's children. It describes the operator and never runs.
    node: Arc<dyn ExecutionPlan>,
    device: DeviceSpec,
    kind: Kind,
    expressions: Vec<Arc<dyn PhysicalExpr>>,
}

#[derive(Debug)]
enum Kind {
    Projection(Arc<[usize]>),
    Union,
    Limit { skip: usize, fetch: Option<usize> },
    Coalesce { fetch: Option<usize> },
    Merge { fetch: Option<usize> },
    Repartition(Shared),
}

/// Which of DataFusion's nodes may become operators on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Forms {
    All,
    /// Those that move no rows between partitions.
    WithoutExchanges,
}

impl Kind {
    /// Whether rows leave their partitions.
    fn is_exchange(&self) -> bool {
        match self {
            Self::Coalesce { .. } | Self::Merge { .. } | Self::Repartition(_) => true,
            Self::Projection(_) | Self::Union | Self::Limit { .. } => false,
        }
    }

    fn of(node: &Arc<dyn ExecutionPlan>) -> Option<Self> {
        if let Some(projection) = node.downcast_ref::<ProjectionExec>() {
            return Some(Self::Projection(columns(projection)?));
        }
        if node.downcast_ref::<UnionExec>().is_some() {
            return Some(Self::Union);
        }
        if let Some(limit) = node.downcast_ref::<GlobalLimitExec>() {
            let (skip, fetch) = (limit.skip(), limit.fetch());
            return Some(Self::Limit { skip, fetch });
        }
        if let Some(limit) = node.downcast_ref::<LocalLimitExec>() {
            let (skip, fetch) = (0, Some(limit.fetch()));
            return Some(Self::Limit { skip, fetch });
        }
        if node.downcast_ref::<CoalescePartitionsExec>().is_some() {
            let fetch = node.fetch();
            return Some(Self::Coalesce { fetch });
        }
        if let Some(merge) = node.downcast_ref::<SortPreservingMergeExec>() {
            let fetch = merge.fetch();
            let one = merge.input().output_partitioning().partition_count() == 1;
            return one.then_some(Self::Merge { fetch });
        }
        let repartition = node.downcast_ref::<RepartitionExec>()?;
        let round_robin = matches!(repartition.partitioning(), Partitioning::RoundRobinBatch(_));
        (round_robin && !repartition.preserve_order()).then(|| Self::Repartition(Shared::default()))
    }
}

/// The columns of a projection that has no other expressions. DataFusion's unions put casts to another field of the same type
/// above columns, for its name, metadata, and nulls.
fn columns(projection: &ProjectionExec) -> Option<Arc<[usize]>> {
    let input = projection.input().schema();
    let column = |expression: &Arc<dyn PhysicalExpr>| {
        let column = match expression.downcast_ref::<CastExpr>() {
            Some(cast) => {
                let column = cast.expr().downcast_ref::<Column>()?;
                let field = input.fields().get(column.index())?;
                let same = field.data_type() == cast.cast_type();
                let nulls = cast.target_nullable() == Some(false) && field.is_nullable();
                (same && !nulls).then_some(column)
            }
            None => expression.downcast_ref::<Column>(),
        }?;
        (column.index() < input.fields().len()).then_some(column.index())
    };
    let expressions = projection.expr().iter();
    expressions.map(|one| column(&one.expr)).collect()
}

/// Whether a projection has fewer columns than its input and none twice, and no other expressions.
pub(crate) fn drops_columns(projection: &ProjectionExec) -> bool {
    let Some(columns) = columns(projection) else {
        return false;
    };
    let mut seen = HashSet::new();
    columns.len() < projection.input().schema().fields().len()
        && columns.iter().all(|column| seen.insert(column))
}

/// The operator that `plan` is on a device, if its rows come from that device and only nodes that may take their forms stand
/// between.
pub(crate) fn lifted(
    plan: &Arc<dyn ExecutionPlan>,
    device: &DeviceSpec,
    forms: Forms,
) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    let operator = operator(plan);
    if let Some(node) = DeviceExec::of(operator) {
        return Ok((node.device() == device).then(|| operator.clone()));
    }
    match Kind::of(operator) {
        Some(kind) if forms == Forms::All || !kind.is_exchange() => {}
        _ => return Ok(None),
    }
    let children = operator.children().into_iter();
    let children = children.map(|child| lifted(child, device, forms));
    let Some(children) = children.collect::<Result<Option<_>>>()? else {
        return Ok(None);
    };
    let node = replace_children_if_necessary(operator.clone(), children)?;
    let form = DeviceForm::bare(node, device.clone())?;
    Ok(form.map(|form| Arc::new(DeviceExec::new(Arc::new(form))) as _))
}

impl DeviceForm {
    /// Returns the form of a node on a device, with the node's children, or `None` if the node has none.
    ///
    /// Children that are such nodes themselves, over operators on that device, take their forms, too. Other children stay as
    /// they are.
    ///
    /// # Errors
    /// Returns an error if a node does not accept such children.
    pub fn of(node: Arc<dyn ExecutionPlan>, device: impl Into<DeviceSpec>) -> Result<Option<Self>> {
        let device = device.into();
        if Kind::of(&node).is_none() {
            return Ok(None);
        }
        let children = node.children().into_iter();
        let children =
            children.map(|c| Ok(lifted(c, &device, Forms::All)?.unwrap_or_else(|| c.clone())));
        let children = children.collect::<Result<_>>()?;
        Self::bare(replace_children_if_necessary(node, children)?, device)
    }

    /// The form of a node over the children that it has.
    fn bare(node: Arc<dyn ExecutionPlan>, device: DeviceSpec) -> Result<Option<Self>> {
        let Some(kind) = Kind::of(&node) else {
            return Ok(None);
        };
        let mut expressions = Vec::new();
        node.apply_expressions(&mut |e| {
            expressions.push(e.clone());
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok(Some(Self {
            node,
            device,
            kind,
            expressions,
        }))
    }

    /// Returns DataFusion's node, over the children of this operator. It describes the operator, and is not executed.
    pub fn node(&self) -> &Arc<dyn ExecutionPlan> {
        &self.node
    }

    /// The form of another node of the same kind.
    fn form(&self, node: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DevicePlan>> {
        let name = node.name().to_owned();
        match Self::of(node, self.device.clone())? {
            Some(form) => Ok(Arc::new(form)),
            None => Err(DataFusionError::Plan(format!(
                "{}: no device form of this {name}",
                self.name()
            ))),
        }
    }

    fn child(&self) -> Result<&Arc<dyn ExecutionPlan>> {
        let children = self.node.children();
        let only = children.first().copied();
        only.ok_or_else(|| DataFusionError::Internal(format!("{} has no child", self.name())))
    }

    /// The union's child, and its partition, that is the union's partition `partition`.
    fn owner(&self, mut partition: usize) -> Option<(&Arc<dyn ExecutionPlan>, usize)> {
        for child in self.node.children() {
            let own = child.output_partitioning().partition_count();
            if partition < own {
                return Some((child, partition));
            }
            partition -= own;
        }
        None
    }

    /// Starts an output of a repartitioning. Each input runs on the device of its own partition; its batches are moved to that of
    /// the output that takes them.
    fn repartitioned(
        &self,
        shared: &Shared,
        partition: usize,
        device: &Device,
        context: &Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let child = self.child()?;
        let inputs = child.output_partitioning().partition_count();
        let start = |context: &Arc<TaskContext>| {
            let start = |input| {
                let name = format!("input of {}", self.name());
                let own = open_for(&name, &self.device, input, context)?;
                let memory = DeviceReservation::new(context, &name, input, &own);
                execute_child_apart(child, input, &own, context.clone(), memory)
            };
            (0..inputs).map(start).collect()
        };
        let outputs = self.node.output_partitioning().partition_count();
        let device_type = device.id().device_type;
        let schema = self.node.schema();
        let output = shared.output(partition, outputs, context, start, schema, device_type)?;
        let memory = DeviceReservation::new(context, self.name(), partition, device);
        Ok(on_device(Box::pin(output), device, memory))
    }
}

impl DevicePlan for DeviceForm {
    fn name(&self) -> &str {
        match self.kind {
            Kind::Projection(_) => "DeviceProjectionExec",
            Kind::Union => "DeviceUnionExec",
            Kind::Limit { .. } => "DeviceLimitExec",
            Kind::Coalesce { .. } => "DeviceCoalescePartitionsExec",
            Kind::Merge { .. } => "DeviceSortPreservingMergeExec",
            Kind::Repartition(_) => "DeviceRepartitionExec",
        }
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = Described(&*self.node, DisplayFormatType::Default).to_string();
        match text.split_once(": ") {
            Some((_, details)) => write!(f, ", {details}"),
            None => Ok(()),
        }
    }

    fn describe_tree(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = Described(&*self.node, DisplayFormatType::TreeRender).to_string();
        text.lines().try_for_each(|line| writeln!(f, "{line}"))
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.node.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.node.children()
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let options = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        self.form(self.node.clone().replace_children(children, options)?)
    }

    fn on_host(&self) -> Option<Arc<dyn ExecutionPlan>> {
        Some(self.node.clone())
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let partitions = self.node.output_partitioning().partition_count();
        if partition >= partitions {
            return Err(DataFusionError::Internal(format!(
                "partition {partition} of {partitions} of {}",
                self.name()
            )));
        }
        let limited = |stream, skip, fetch| -> SendableDeviceStream {
            match (skip, fetch) {
                (0, None) => stream,
                _ => Box::pin(Limited::new(stream, skip, fetch)),
            }
        };
        match &self.kind {
            Kind::Projection(columns) => Ok(Box::pin(Columns {
                stream: execute_child(self.child()?, partition, device, context)?,
                schema: self.node.schema(),
                columns: Some(columns.clone()),
            })),
            Kind::Union => {
                let (child, own) = self.owner(partition).ok_or_else(|| {
                    DataFusionError::Internal(format!("partition {partition} of no child"))
                })?;
                Ok(Box::pin(Columns {
                    stream: execute_child(child, own, device, context)?,
                    schema: self.node.schema(),
                    columns: None,
                }))
            }
            Kind::Limit { skip, fetch } => {
                let child = self.child()?;
                if child.output_partitioning().partition_count() != partitions {
                    let text = format!("{} over several partitions", self.name());
                    return Err(DataFusionError::Internal(text));
                }
                let stream = execute_child(child, partition, device, context)?;
                Ok(limited(stream, *skip, *fetch))
            }
            Kind::Coalesce { fetch } => {
                let child = self.child()?;
                let stream = match child.output_partitioning().partition_count() {
                    1 => execute_child(child, 0, device, context)?,
                    _ => merged(child, device, &context)?,
                };
                Ok(limited(stream, 0, *fetch))
            }
            Kind::Merge { fetch } => {
                let stream = execute_child(self.child()?, 0, device, context)?;
                Ok(limited(stream, 0, *fetch))
            }
            Kind::Repartition(shared) => self.repartitioned(shared, partition, device, &context),
        }
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        self.node.input_distribution_requirements()
    }

    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        self.node.required_input_ordering()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        self.node.maintains_input_order()
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        self.node.child_stats_requests(partition)
    }

    fn statistics(
        &self,
        partition: Option<usize>,
        inputs: &[Arc<Statistics>],
    ) -> Result<Arc<Statistics>> {
        let args = StatisticsArgs::new().with_partition(partition);
        self.node.statistics_from_inputs(inputs, &args)
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        self.node.cardinality_effect()
    }

    fn expressions(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        self.expressions.iter().collect()
    }

    /// A limit of all partitions is none of each. DataFusion knows that of its own node by its type only.
    fn supports_limit_pushdown(&self) -> bool {
        self.node.supports_limit_pushdown() && !matches!(self.kind, Kind::Coalesce { .. })
    }

    fn fetch(&self) -> Option<usize> {
        self.node.fetch()
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn DevicePlan>> {
        self.form(self.node.with_fetch(limit)?).ok()
    }

    fn repartitioned(
        &self,
        target_partitions: usize,
        config: &ConfigOptions,
    ) -> Result<Option<Arc<dyn DevicePlan>>> {
        let node = self.node.repartitioned(target_partitions, config)?;
        node.map(|node| self.form(node)).transpose()
    }

    fn gather_filters_for_pushdown(
        &self,
        phase: FilterPushdownPhase,
        parent_filters: Vec<Arc<dyn PhysicalExpr>>,
        config: &ConfigOptions,
    ) -> Result<FilterDescription> {
        let node = &self.node;
        node.gather_filters_for_pushdown(phase, parent_filters, config)
    }

    /// The projection may go below the node, or become one with it, as DataFusion does it, if that has a form, too.
    fn try_swapping_with_projection(
        &self,
        projection: &ProjectionExec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let above = make_with_child(projection, &self.node)?;
        let Some(above) = above.downcast_ref::<ProjectionExec>() else {
            return Ok(None);
        };
        match self.node.try_swapping_with_projection(above)? {
            Some(plan) => lifted(&plan, &self.device, Forms::All),
            None => Ok(None),
        }
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
    ) -> Result<SortOrderPushdownResult<Arc<dyn DevicePlan>>> {
        let sorted = self.node.try_pushdown_sort(order)?;
        sorted.try_map(|node| self.form(node))
    }

    fn with_preserve_order(&self, preserve_order: bool) -> Option<Arc<dyn DevicePlan>> {
        self.form(self.node.with_preserve_order(preserve_order)?)
            .ok()
    }

    fn check_invariants(&self, check: InvariantLevel) -> Result<()> {
        self.node.check_invariants(check)
    }
}

/// A node's own line in `EXPLAIN`.
struct Described<'a>(&'a dyn ExecutionPlan, DisplayFormatType);

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_as(self.1, f)
    }
}
