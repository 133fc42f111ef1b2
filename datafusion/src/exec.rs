//! [`DeviceExec`]: the node of a plan that holds a device operator.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use datafusion_catalog::memory::DataSourceExec;
use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{DataFusionError, Result, Statistics};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_expr::{OrderingRequirements, PhysicalExpr, PhysicalSortExpr};
use datafusion_physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion_physical_plan::execution_plan::{CardinalityEffect, InvariantLevel};
use datafusion_physical_plan::filter_pushdown::{
    ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation,
};
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion_physical_plan::projection::ProjectionExec;
use datafusion_physical_plan::repartition::RepartitionExec;
use datafusion_physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion_physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, InputDistributionRequirements, PlanProperties,
    SortOrderPushdownResult, replace_children_if_necessary,
};

use super::memory::DeviceReservation;
use super::metrics::DeviceMetrics;
use super::options::DeviceOptions;
use super::plugin::{DeviceOperator, DevicePlugin, DeviceTask, target_of};
use super::spec::{DeviceSpec, open_for};
use super::stream::{SendableDeviceStream, measured, until_first};
use super::transfer::host_stream;
use super::upload::Target;
use arrow_device::Device;

/// The node of a plan that holds a [`DeviceOperator`], and the node of DataFusion in whose place that runs.
///
/// A parent on the same device reads the operator's device stream. A parent on the host would read host batches, but
/// [`DeviceRule`](super::DeviceRule) makes the download a node of its own. What DataFusion asks of a plan, the other node answers.
#[derive(Clone, Debug)]
pub struct DeviceExec {
    node: Arc<dyn ExecutionPlan>,
    device: DeviceSpec,
    operator: Arc<dyn DeviceOperator>,
    /// What makes the operator anew. Without one, the operator stays, whatever the node becomes.
    plugin: Option<Arc<dyn DevicePlugin>>,
    /// Whether it is an upload or a move, instead of which a reader on the host reads what that reads.
    pub(super) is_transition: bool,
    /// Whether it only passes rows on, so that those of the host go up to it as its reader wants them.
    pub(super) passes_on: bool,
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceExec {
    /// Makes a node whose operator stays the same if `node` gets other children or another limit: what it needs to know of them, it
    /// asks of [`DeviceTask::node`].
    pub fn new(
        node: Arc<dyn ExecutionPlan>,
        device: impl Into<DeviceSpec>,
        operator: Arc<dyn DeviceOperator>,
    ) -> Self {
        Self {
            node,
            device: device.into(),
            operator,
            plugin: None,
            is_transition: false,
            passes_on: false,
            metrics: ExecutionPlanMetricsSet::new(),
        }
    }

    /// Makes a node with the operator that a plugin puts in the place of `node`, whose children are the operator's.
    ///
    /// # Errors
    /// Returns the plugin's error.
    pub fn in_place_of(
        node: Arc<dyn ExecutionPlan>,
        device: impl Into<DeviceSpec>,
        plugin: &Arc<dyn DevicePlugin>,
    ) -> Result<Self> {
        let operator = plugin.replace(&node)?;
        let plugin = Some(plugin.clone());
        Ok(Self {
            plugin,
            ..Self::new(node, device, operator)
        })
    }

    /// Returns the node of DataFusion in whose place the operator runs, over the operator's children.
    pub fn node(&self) -> &Arc<dyn ExecutionPlan> {
        &self.node
    }

    /// Returns which device its batches are on.
    pub fn device(&self) -> &DeviceSpec {
        &self.device
    }

    /// Returns the plugin that has made the operator, if one has.
    pub fn plugin(&self) -> Option<&Arc<dyn DevicePlugin>> {
        self.plugin.as_ref()
    }

    /// Opens the device for a partition with the session's [`DeviceResolver`](super::DeviceResolver), starts the partition on it, and returns its
    /// stream, which counts the node's metrics.
    ///
    /// # Errors
    /// Returns an error if there is no such device, and the operator's error if the partition cannot be started.
    pub fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let device = self.open(partition, &context)?;
        self.execute_on(partition, &device, &context, None)
    }

    /// Opens the device for a partition.
    pub(super) fn open(&self, partition: usize, context: &TaskContext) -> Result<Device> {
        open_for(self.name(), &self.device, partition, context)
    }

    /// Starts a partition on this device, which its description fits. If it passes rows on, those of the host go up as its reader wants them.
    pub(super) fn execute_on(
        &self,
        partition: usize,
        device: &Device,
        context: &Arc<TaskContext>,
        reader: Option<&Target>,
    ) -> Result<SendableDeviceStream> {
        let partitions = self.node.properties().partitioning.partition_count();
        if partition >= partitions {
            let what = format!("partition {partition} of {partitions} of {}", self.name());
            return Err(DataFusionError::Internal(what));
        }
        let memory = DeviceReservation::new(context, self.name(), partition, device);
        let memory = memory.with_metrics(&self.metrics);
        let reader = reader.filter(|_| self.passes_on).cloned();
        let stream = self.operator.execute(&DeviceTask {
            partition,
            device,
            context,
            node: &self.node,
            name: self.name(),
            target: reader.unwrap_or_else(|| target_of(self.plugin.as_ref(), context)),
            metrics: &self.metrics,
        });
        let stream = stream.map_err(|e| memory.named(e))?;
        Ok(measured(stream, &self.metrics, partition, memory))
    }

    /// Starts a partition for a reader on the host, on the device and downloaded, unless its work is done on the host: the session
    /// wants it so, or the device cannot be opened, or its memory is not enough for a first batch.
    pub(super) fn execute_down(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
        name: &str,
        metrics: &ExecutionPlanMetricsSet,
    ) -> Result<SendableRecordBatchStream> {
        if let Some(why) = self.kept_from_device(&context) {
            return self.start(partition, context, &why);
        }
        let can = self.operator.runs_on_host() && !self.is_transition;
        let may = can && has_independent_partitions(&self.node);
        let falls_back = may && DeviceOptions::of_task(&context).fallback;
        let device = match self.open(partition, &context) {
            Err(e) if falls_back => return self.start(partition, context, &e.to_string()),
            device => device?,
        };
        let memory = DeviceReservation::new(&context, name, partition, &device);
        let memory = memory.with_metrics(metrics);
        let rows = context.session_config().batch_size();
        let config = context.session_config().options();
        let mut read = self.children().into_iter();
        let falls_back = falls_back && read.all(|child| runs_again(child, config));
        let metrics = DeviceMetrics::new(metrics, partition);
        let down = |stream| host_stream(stream, &device, self.schema(), metrics, memory, rows);
        let on_device = self.execute_on(partition, &device, &context, None);
        let stream = on_device.map(down);
        if !falls_back {
            return stream;
        }
        let own = self.clone();
        until_first(stream, move |why| own.start(partition, context, why))
    }

    /// Whether the session has its work done on the host. An upload or a move stays where its reader wants the rows.
    pub(super) fn runs_on_host(&self, context: &TaskContext) -> bool {
        self.kept_from_device(context).is_some() && !self.is_transition
    }

    /// Why the session keeps the operator from the device.
    fn kept_from_device(&self, context: &TaskContext) -> Option<String> {
        let options = DeviceOptions::of_task(context);
        let mut names = options.disable.split(',').map(str::trim);
        match names.find(|name| *name == self.name()) {
            _ if !self.operator.runs_on_host() => None,
            _ if !options.enable => Some("device.enable is false".into()),
            name => name.map(|name| format!("device.disable has {name}")),
        }
    }

    /// Whether its batches are to be joined.
    pub(super) fn has_small_batches(&self) -> bool {
        self.operator.has_small_batches(&*self.node)
    }

    /// Starts a partition on the host. Device operators below decide for themselves.
    fn start(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
        why: &str,
    ) -> Result<SendableRecordBatchStream> {
        let count = MetricBuilder::new(&self.metrics);
        count.counter(format!("on_host ({why})"), partition).add(1);
        self.node.execute(partition, context)
    }

    /// Returns the node if `plan` is one.
    pub fn of(plan: &Arc<dyn ExecutionPlan>) -> Option<&Self> {
        plan.downcast_ref()
    }

    /// Returns the operator of type `T` if `plan` is a node that holds one.
    pub fn operator<T: DeviceOperator>(plan: &Arc<dyn ExecutionPlan>) -> Option<&T> {
        (&*Self::of(plan)?.operator as &dyn Any).downcast_ref()
    }

    /// The plan in place of another one of DataFusion's, which the node has made of itself. Another kind of node runs on the host.
    fn instead(&self, node: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
        if node.name() != self.node.name() || Self::of(&node).is_some() {
            return Ok(node);
        }
        let operator = match &self.plugin {
            Some(plugin) => plugin.replace(&node)?,
            None => self.operator.clone(),
        };
        Ok(Arc::new(Self {
            node,
            operator,
            metrics: ExecutionPlanMetricsSet::new(),
            ..self.clone()
        }))
    }
}

impl DisplayAs for DeviceExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match t {
            DisplayFormatType::Default | DisplayFormatType::Verbose => {
                write!(f, "{}: device={}", self.name(), self.device)?;
                self.operator.describe(&*self.node, f)
            }
            DisplayFormatType::TreeRender => {
                writeln!(f, "device={}", self.device)?;
                // What passes rows on has its own device only.
                if self.node.name() == "DeviceToHostExec" {
                    return Ok(());
                }
                self.node.fmt_as(t, f)
            }
        }
    }
}

impl ExecutionPlan for DeviceExec {
    fn name(&self) -> &str {
        self.operator.name()
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.node.properties()
    }

    fn check_invariants(&self, check: InvariantLevel) -> Result<()> {
        self.node.check_invariants(check)
    }

    fn dynamic_expressions_produced(&self) -> Vec<Arc<dyn PhysicalExpr>> {
        self.node.dynamic_expressions_produced()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.node.children()
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let node = replace_children_if_necessary(self.node.clone(), children)?;
        self.instead(node)
    }

    /// DataFusion would repartition on the host.
    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false; self.children().len()]
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

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.node.apply_expressions(f)
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        match self.is_transition {
            true => self.node.execute(partition, context),
            false => self.execute_down(partition, context, self.name(), &<_>::default()),
        }
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        self.node.child_stats_requests(partition)
    }

    fn statistics_from_inputs(
        &self,
        input_stats: &[Arc<Statistics>],
        args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        self.node.statistics_from_inputs(input_stats, args)
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        self.node.cardinality_effect()
    }

    /// A limit of all partitions is none of each. DataFusion knows that of its own node by its type only.
    fn supports_limit_pushdown(&self) -> bool {
        self.node.supports_limit_pushdown() && !self.node.is::<CoalescePartitionsExec>()
    }

    fn fetch(&self) -> Option<usize> {
        self.node.fetch()
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        self.instead(self.node.with_fetch(limit)?).ok()
    }

    fn try_swapping_with_projection(
        &self,
        projection: &ProjectionExec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        // Below another operator, it might have to run on the host.
        if !self.children().is_empty() {
            return Ok(None);
        }
        let node = self.node.try_swapping_with_projection(projection)?;
        node.map(|node| self.instead(node)).transpose()
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

    fn handle_child_pushdown_result(
        &self,
        phase: FilterPushdownPhase,
        child_pushdown_result: ChildPushdownResult,
        config: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn ExecutionPlan>>> {
        let node = &self.node;
        let mut answer = node.handle_child_pushdown_result(phase, child_pushdown_result, config)?;
        let updated = answer.updated_node.take();
        answer.updated_node = updated.map(|node| self.instead(node)).transpose()?;
        Ok(answer)
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
    ) -> Result<SortOrderPushdownResult<Arc<dyn ExecutionPlan>>> {
        let sorted = self.node.try_pushdown_sort(order)?;
        sorted.try_map(|node| self.instead(node))
    }

    fn reset_state(self: Arc<Self>) -> Result<Arc<dyn ExecutionPlan>> {
        self.instead(self.node.clone().reset_state()?)
    }
}

/// Whether some partitions of a node may run on the host and others not. Joins count their partitions, exchanges pass rows between them, and
/// a dynamic filter waits for all.
fn has_independent_partitions(node: &Arc<dyn ExecutionPlan>) -> bool {
    let alone = node.children().len() < 2 && !node.is::<RepartitionExec>();
    alone && node.dynamic_expressions_produced().is_empty()
}

/// Whether partitions of a plan may be executed twice, with the same rows.
fn runs_again(plan: &Arc<dyn ExecutionPlan>, config: &ConfigOptions) -> bool {
    const NODES: [&str; 5] = [
        "CoalesceBatchesExec",
        "CooperativeExec",
        "DeviceToHostExec",
        "FilterExec",
        "ProjectionExec",
    ];
    let mut children = plan.children().into_iter();
    let itself = match (DeviceExec::of(plan), plan.downcast_ref::<DataSourceExec>()) {
        (Some(node), _) => children.len() == 0 || node.operator.runs_on_host(),
        // Files that partitions take from a common queue are not in it any more.
        (_, Some(scan)) => scan.data_source().create_sibling_state(config).is_none(),
        _ => NODES.contains(&plan.name()),
    };
    itself && children.all(|child| runs_again(child, config))
}
