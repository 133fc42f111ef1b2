//! The tests' operator that DataFusion asks: it answers everything.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use arrow_device_datafusion::{
    DeviceExec, DeviceOperator, DeviceSpec, DeviceTask, DeviceToHostExec, SendableDeviceStream,
};
use async_trait::async_trait;
use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::config::ConfigOptions;
use datafusion::common::stats::Precision;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{DataFusionError, Result, Statistics};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::{Expr, TableType};
use datafusion::physical_expr::expressions::{Column, DynamicFilterPhysicalExpr, lit};
use datafusion::physical_expr::{
    Distribution, EquivalenceProperties, LexRequirement, OrderingRequirements, Partitioning,
    PhysicalExpr, PhysicalSortExpr, PhysicalSortRequirement,
};
use datafusion::physical_plan::execution_plan::{
    Boundedness, CardinalityEffect, ChildrenPropertiesMode, EmissionType, InvariantLevel,
    ReplaceChildrenOptions, apply_expression_roots,
};
use datafusion::physical_plan::filter_pushdown::{
    ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation,
    PushedDown,
};
use datafusion::physical_plan::metrics::MetricBuilder;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::statistics::{ChildStats, StatisticsArgs};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, InputDistributionRequirements, PlanProperties,
    SortOrderPushdownResult,
};

use crate::kit::*;

/// A scan of one batch after another, which takes all filters. Over a child, it is only asked.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    device: DeviceSpec,
    pub(crate) child: Option<Plan>,
    schema: SchemaRef,
    batches: Arc<Vec<RecordBatch>>,
    filters: Vec<Arc<dyn PhysicalExpr>>,
    /// What the last call asked for, which made this operator of another.
    pub(crate) last: String,
    fetch: Option<usize>,
    properties: Arc<PlanProperties>,
    pub(crate) resets: Arc<AtomicUsize>,
}

impl Asked {
    pub(crate) fn new(
        device: impl Into<DeviceSpec>,
        batches: &[RecordBatch],
        resets: &Arc<AtomicUsize>,
    ) -> Self {
        let schema = batches[0].schema();
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Self {
            device: device.into(),
            child: None,
            schema,
            batches: Arc::new(batches.to_vec()),
            filters: Vec::new(),
            last: String::new(),
            fetch: None,
            properties: Arc::new(properties),
            resets: resets.clone(),
        }
    }

    pub(crate) fn after(&self, last: impl Into<String>) -> Plan {
        let mut own = self.clone();
        own.last = last.into();
        Arc::new(own)
    }

    pub(crate) fn node(self) -> Plan {
        let device = self.device.clone();
        Arc::new(DeviceExec::new(Arc::new(self), device, Arc::new(Asks)))
    }
}

impl DisplayAs for Asked {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match t {
            DisplayFormatType::TreeRender => writeln!(f, "answers=all"),
            _ => write!(f, "Asked: filters={}", self.filters.len()),
        }
    }
}

impl ExecutionPlan for Asked {
    fn name(&self) -> &str {
        "Asked"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Plan> {
        self.child.iter().collect()
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Plan>,
        _: ReplaceChildrenOptions,
    ) -> Result<Plan> {
        let mut own = Self::clone(&self);
        own.child = children.pop();
        Ok(Arc::new(own))
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let options = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        self.replace_children(children, options)
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        unreachable!("its operator runs")
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        let one = self.child.iter().map(|_| Distribution::SinglePartition);
        InputDistributionRequirements::new(one.collect())
    }

    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        let by = PhysicalSortRequirement::new(Arc::new(Column::new("a", 0)), None);
        let by = LexRequirement::new([by]).map(OrderingRequirements::new);
        self.child.iter().map(|_| by.clone()).collect()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        self.child.iter().map(|_| true).collect()
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        self.child.iter().map(|_| true).collect()
    }

    fn child_stats_requests(&self, _: Option<usize>) -> Vec<ChildStats> {
        self.child.iter().map(|_| ChildStats::At(None)).collect()
    }

    fn statistics_from_inputs(
        &self,
        inputs: &[Arc<Statistics>],
        args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let rows = 1000 + 10 * inputs.len() + args.partition().unwrap_or(9);
        let mut statistics = Statistics::new_unknown(&self.schema);
        statistics.num_rows = Precision::Inexact(rows);
        Ok(Arc::new(statistics))
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::LowerEqual
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        apply_expression_roots(&self.filters, f)
    }

    fn dynamic_expressions_produced(&self) -> Vec<Arc<dyn PhysicalExpr>> {
        let dynamic = |_| Arc::new(DynamicFilterPhysicalExpr::new(vec![], lit(true))) as _;
        self.child.iter().map(dynamic).collect()
    }

    fn supports_limit_pushdown(&self) -> bool {
        self.child.is_some()
    }

    fn fetch(&self) -> Option<usize> {
        self.fetch
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Plan> {
        let mut own = self.clone();
        own.fetch = Some(limit?);
        own.child.is_some().then(|| Arc::new(own) as _)
    }

    fn try_swapping_with_projection(&self, above: &ProjectionExec) -> Result<Option<Plan>> {
        let taken = above.expr().iter().any(|one| one.alias == "taken");
        Ok(taken.then(|| self.after("projected")))
    }

    fn gather_filters_for_pushdown(
        &self,
        _: FilterPushdownPhase,
        filters: Vec<Arc<dyn PhysicalExpr>>,
        _: &ConfigOptions,
    ) -> Result<FilterDescription> {
        FilterDescription::from_children(filters, &self.children())
    }

    fn handle_child_pushdown_result(
        &self,
        _: FilterPushdownPhase,
        result: ChildPushdownResult,
        _: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Plan>> {
        let mut own = self.clone();
        for offered in &result.parent_filters {
            own.filters.push(offered.filter.clone());
        }
        let taken = vec![PushedDown::Yes; result.parent_filters.len()];
        let answer = FilterPushdownPropagation::with_parent_pushdown_result(taken);
        Ok(answer.with_updated_node(Arc::new(own)))
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
    ) -> Result<SortOrderPushdownResult<Plan>> {
        let inner = self.after("sorted");
        Ok(match order.len() {
            1 => SortOrderPushdownResult::Exact { inner },
            2 => SortOrderPushdownResult::Inexact { inner },
            _ => SortOrderPushdownResult::Unsupported,
        })
    }

    fn reset_state(self: Arc<Self>) -> Result<Plan> {
        self.resets.fetch_add(1, SeqCst);
        Ok(self.after("reset"))
    }

    fn check_invariants(&self, check: InvariantLevel) -> Result<()> {
        match (check, &*self.last) {
            (InvariantLevel::Executable, "broken") => {
                Err(DataFusionError::Internal("as asked".into()))
            }
            _ => Ok(()),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Asks;

impl DeviceOperator for Asks {
    fn name(&self) -> &str {
        "AskedExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let own = MetricBuilder::new(task.metrics()).counter("batches_read", task.partition);
        let this: &Asked = task.node().downcast_ref().unwrap();
        let (this, device) = (this.clone(), task.device.clone());
        let count = this.batches.len();
        let read = move |i: usize| -> arrow_device::Result<_> {
            own.add(1);
            let mut batch = this.batches[i].clone();
            for filter in &this.filters {
                let kept = filter.evaluate(&batch).unwrap();
                let kept = kept.into_array(batch.num_rows()).unwrap();
                batch = filter_record_batch(&batch, kept.as_boolean())?;
            }
            device.upload(&batch)
        };
        let batches = futures::stream::iter((0..count).map(read));
        Ok(task.stream(batches))
    }
}

/// A table whose scan is the operator.
#[derive(Debug)]
pub(crate) struct AskedTable(pub(crate) Asked);

#[async_trait]
impl TableProvider for AskedTable {
    fn schema(&self) -> SchemaRef {
        self.0.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        _: &dyn Session,
        projection: Option<&Vec<usize>>,
        _: &[Expr],
        _: Option<usize>,
    ) -> Result<Plan> {
        let mut scan = self.0.clone();
        if let Some(projection) = projection {
            let batches = scan.batches.iter().map(|b| b.project(projection));
            let batches: Vec<_> = batches.collect::<std::result::Result<_, _>>()?;
            scan = Asked::new(scan.device, &batches, &scan.resets);
        }
        Ok(Arc::new(DeviceToHostExec::new(scan.node())))
    }
}
