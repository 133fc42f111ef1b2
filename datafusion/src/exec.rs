//! [`DeviceExec`]: the node of a plan that holds a device operator.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use datafusion_catalog::memory::DataSourceExec;
use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{DataFusionError, Result, Statistics};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_physical_expr::{OrderingRequirements, PhysicalExpr, PhysicalSortExpr};
use datafusion_physical_plan::execution_plan::{
    CardinalityEffect, InvariantLevel, ReplaceChildrenOptions, check_default_invariants,
};
use datafusion_physical_plan::filter_pushdown::{
    ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation,
};
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion_physical_plan::projection::ProjectionExec;
use datafusion_physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion_physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, InputDistributionRequirements, PlanProperties,
    SortOrderPushdownResult,
};

use super::memory::DeviceReservation;
use super::metrics::DeviceMetrics;
use super::on_host::{OnHost, UntilFirst, is_exhausted};
use super::options::DeviceOptions;
use super::plan::DevicePlan;
use super::resolver::open_for;
use super::spec::DeviceSpec;
use super::stream::{Measured, SendableDeviceStream};
use super::transfer::host_stream;
use arrow_device::Device;

/// The node of a plan that holds a [`DevicePlan`].
///
/// A parent on the same device reads the operator's device stream. A parent on the host would read host batches, but
/// [`DeviceTransitions`](super::DeviceTransitions) makes the download a node of its own. What DataFusion asks of a node, the operator
/// answers.
#[derive(Clone)]
pub struct DeviceExec {
    plan: Arc<dyn DevicePlan>,
    metrics: ExecutionPlanMetricsSet,
    /// What runs in its place on the host, if that has been asked for.
    on_host: OnceLock<Option<Arc<dyn ExecutionPlan>>>,
}

impl DeviceExec {
    /// Makes a node around an operator.
    pub fn new(plan: Arc<dyn DevicePlan>) -> Self {
        Self {
            plan,
            metrics: ExecutionPlanMetricsSet::new(),
            on_host: OnceLock::new(),
        }
    }

    /// Returns the operator. `(&**plan as &dyn Any).downcast_ref()` downcasts it.
    pub fn plan(&self) -> &Arc<dyn DevicePlan> {
        &self.plan
    }

    /// Returns which device its batches are on.
    pub fn device(&self) -> &DeviceSpec {
        self.plan.device()
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
        self.execute_on(partition, &device, context)
    }

    /// Opens the device for a partition.
    pub(super) fn open(&self, partition: usize, context: &TaskContext) -> Result<Device> {
        open_for(self.name(), self.device(), partition, context)
    }

    /// Starts a partition on this device, which its description fits.
    pub(super) fn execute_on(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let memory = DeviceReservation::new(&context, self.name(), partition, device);
        let memory = memory.with_metrics(&self.metrics);
        let stream = self.plan.execute_device(partition, device, context);
        let stream = stream.map_err(|e| memory.named(e))?;
        let measured = Measured::new(stream, &self.metrics, partition, memory);
        Ok(Box::pin(measured))
    }

    /// Starts a partition for a reader on the host, on the device and downloaded, unless its work is done on the host: the session
    /// wants it so, or the device cannot be opened, or its memory is not enough for a first batch.
    pub(super) fn execute_down(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
        name: &str,
        metrics: Option<&ExecutionPlanMetricsSet>,
    ) -> Result<SendableRecordBatchStream> {
        let host = self.on_host();
        if let (Some(host), Some(why)) = (&host, self.kept_from_device(&context)) {
            return self.start(host, partition, context, &why);
        }
        // Its outputs share the inputs, so that all of them run in one place.
        let apart = self.name() != "DeviceRepartitionExec" && self.moved().is_none();
        let host = host.filter(|_| apart && DeviceOptions::of_task(&context).fallback);
        let device = match (self.open(partition, &context), &host) {
            (Err(e), Some(host)) => return self.start(host, partition, context, &e.to_string()),
            (device, _) => device?,
        };
        let mut memory = DeviceReservation::new(&context, name, partition, &device);
        if let Some(metrics) = metrics {
            memory = memory.with_metrics(metrics);
        }
        let rows = context.session_config().batch_size();
        let config = context.session_config().options();
        let mut read = self.children().into_iter();
        let host = host.filter(|_| read.all(|child| runs_again(child, config)));
        let stream = match (self.execute_on(partition, &device, context.clone()), &host) {
            (Err(e), Some(host)) if is_exhausted(&e) => {
                return self.start(host, partition, context, &e.to_string());
            }
            (stream, _) => stream?,
        };
        let metrics = metrics.map(|metrics| DeviceMetrics::new(metrics, partition));
        let stream = host_stream(stream, metrics, memory, rows);
        let Some(host) = host else {
            return Ok(stream);
        };
        let own = self.clone();
        let host: OnHost = Box::new(move |why| own.start(&host, partition, context, why));
        let host = Some(host);
        Ok(Box::pin(UntilFirst { stream, host }))
    }

    /// Whether the session has its work done on the host. An upload or a move stays where its reader wants the rows.
    pub(super) fn runs_on_host(&self, context: &TaskContext) -> bool {
        let kept = self.kept_from_device(context).is_some();
        kept && self.on_host().is_some() && self.moved().is_none()
    }

    /// Why the session keeps the operator from the device.
    fn kept_from_device(&self, context: &TaskContext) -> Option<String> {
        let options = DeviceOptions::of_task(context);
        if !options.enable {
            return Some("device.enable is false".into());
        }
        let mut names = options.disable.split(',').map(str::trim);
        let name = names.find(|name| *name == self.name());
        name.map(|name| format!("device.disable has {name}"))
    }

    /// What runs in its place on the host: the same node each time, whose partitions may belong together.
    fn on_host(&self) -> Option<Arc<dyn ExecutionPlan>> {
        self.on_host.get_or_init(|| self.plan.on_host()).clone()
    }

    /// What an upload or a move reads, which a reader on the host reads instead.
    fn moved(&self) -> Option<Arc<dyn ExecutionPlan>> {
        let children = self.children();
        let is_child = |host: &_| children.iter().any(|child| Arc::ptr_eq(child, host));
        self.on_host().filter(is_child)
    }

    /// Starts a partition of that. Device operators below decide for themselves.
    fn start(
        &self,
        host: &Arc<dyn ExecutionPlan>,
        partition: usize,
        context: Arc<TaskContext>,
        why: &str,
    ) -> Result<SendableRecordBatchStream> {
        let count = MetricBuilder::new(&self.metrics);
        count.counter(format!("on_host ({why})"), partition).add(1);
        host.execute(partition, context)
    }

    /// Returns the node if `plan` is one.
    pub fn of(plan: &Arc<dyn ExecutionPlan>) -> Option<&Self> {
        plan.downcast_ref()
    }

    /// Returns the operator of type `T` if `plan` is a node that holds one.
    pub fn operator<T: DevicePlan>(plan: &Arc<dyn ExecutionPlan>) -> Option<&T> {
        (&**Self::of(plan)?.plan() as &dyn Any).downcast_ref()
    }

    /// A node around an operator.
    fn node(plan: Arc<dyn DevicePlan>) -> Arc<dyn ExecutionPlan> {
        Arc::new(Self::new(plan))
    }

    fn over(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        let expected = self.children().len();
        if children.len() != expected {
            return Err(DataFusionError::Internal(format!(
                "{} children for {}, which has {expected}",
                children.len(),
                self.name()
            )));
        }
        Ok(Self::node(self.plan.with_children(children)?))
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
                write!(f, "{}: device={}", self.plan.name(), self.device())?;
                self.plan.describe(f)
            }
            DisplayFormatType::TreeRender => {
                writeln!(f, "device={}", self.device())?;
                self.plan.describe_tree(f)
            }
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

    fn check_invariants(&self, check: InvariantLevel) -> Result<()> {
        check_default_invariants(self, check)?;
        self.plan.check_invariants(check)?;
        let host = self.on_host().filter(|_| self.moved().is_none());
        let partitions =
            |plan: &dyn ExecutionPlan| plan.properties().partitioning.partition_count();
        match host {
            Some(host) if host.schema() != self.schema() => Err(DataFusionError::Internal(
                format!("{}: on_host has another schema", self.name()),
            )),
            Some(host) if partitions(&*host) != partitions(self) => Err(DataFusionError::Internal(
                format!("{}: on_host has another number of partitions", self.name()),
            )),
            _ => Ok(()),
        }
    }

    fn dynamic_expressions_produced(&self) -> Vec<Arc<dyn PhysicalExpr>> {
        self.plan.dynamic_expressions_produced()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.plan.children()
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        self.over(children)
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        self.over(children)
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        self.plan.benefits_from_input_partitioning()
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
        match self.moved() {
            Some(input) => input.execute(partition, context),
            None => self.execute_down(partition, context, self.name(), None),
        }
    }

    fn metrics(&self) -> Option<MetricsSet> {
        let mut metrics = self.metrics.clone_inner();
        let own = self.plan.metrics();
        own.iter()
            .flat_map(MetricsSet::iter)
            .for_each(|metric| metrics.push(metric.clone()));
        Some(metrics)
    }

    fn child_stats_requests(&self, partition: Option<usize>) -> Vec<ChildStats> {
        self.plan.child_stats_requests(partition)
    }

    fn statistics_from_inputs(
        &self,
        input_stats: &[Arc<Statistics>],
        args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        self.plan.statistics(args.partition(), input_stats)
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        self.plan.cardinality_effect()
    }

    fn supports_limit_pushdown(&self) -> bool {
        self.plan.supports_limit_pushdown()
    }

    fn fetch(&self) -> Option<usize> {
        self.plan.fetch()
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        self.plan.with_fetch(limit).map(Self::node)
    }

    fn repartitioned(
        &self,
        target_partitions: usize,
        config: &ConfigOptions,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let plan = self.plan.repartitioned(target_partitions, config)?;
        Ok(plan.map(Self::node))
    }

    fn try_swapping_with_projection(
        &self,
        projection: &ProjectionExec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        self.plan.try_swapping_with_projection(projection)
    }

    fn gather_filters_for_pushdown(
        &self,
        phase: FilterPushdownPhase,
        parent_filters: Vec<Arc<dyn PhysicalExpr>>,
        config: &ConfigOptions,
    ) -> Result<FilterDescription> {
        let plan = &self.plan;
        plan.gather_filters_for_pushdown(phase, parent_filters, config)
    }

    fn handle_child_pushdown_result(
        &self,
        phase: FilterPushdownPhase,
        child_pushdown_result: ChildPushdownResult,
        config: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn ExecutionPlan>>> {
        let plan = &self.plan;
        let answer = plan.handle_child_pushdown_result(phase, child_pushdown_result, config)?;
        Ok(FilterPushdownPropagation {
            filters: answer.filters,
            updated_node: answer.updated_node.map(Self::node),
        })
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
    ) -> Result<SortOrderPushdownResult<Arc<dyn ExecutionPlan>>> {
        Ok(self.plan.try_pushdown_sort(order)?.map(Self::node))
    }

    fn with_preserve_order(&self, preserve_order: bool) -> Option<Arc<dyn ExecutionPlan>> {
        self.plan
            .with_preserve_order(preserve_order)
            .map(Self::node)
    }

    fn reset_state(self: Arc<Self>) -> Result<Arc<dyn ExecutionPlan>> {
        self.plan.reset_state().map(Self::node)
    }

    fn with_new_state(&self, state: Arc<dyn Any + Send + Sync>) -> Option<Arc<dyn ExecutionPlan>> {
        self.plan.with_new_state(state).map(Self::node)
    }
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
    let children = plan.children();
    let itself = match (DeviceExec::of(plan), plan.downcast_ref::<DataSourceExec>()) {
        (Some(node), _) => children.is_empty() || node.on_host().is_some(),
        // Files that partitions take from a common queue are not in it any more.
        (_, Some(scan)) => scan.data_source().create_sibling_state(config).is_none(),
        _ => NODES.contains(&plan.name()),
    };
    let mut children = children.into_iter();
    itself
        && plan.name() != "DeviceRepartitionExec"
        && children.all(|child| runs_again(child, config))
}
