//! The tests' operator that DataFusion asks: it answers everything.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use arrow_device::Device;
use arrow_device::async_stream::DeviceRecordBatchStreamAdapter;
use arrow_device_datafusion::{
    DeviceExec, DevicePlan, DeviceSpec, DeviceToHostExec, SendableDeviceStream,
};
use async_trait::async_trait;
use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::config::ConfigOptions;
use datafusion::common::stats::Precision;
use datafusion::common::{DataFusionError, Result, Statistics};
use datafusion::execution::TaskContext;
use datafusion::logical_expr::{Expr, TableType};
use datafusion::physical_expr::expressions::{Column, DynamicFilterPhysicalExpr, lit};
use datafusion::physical_expr::{
    Distribution, EquivalenceProperties, LexRequirement, OrderingRequirements, Partitioning,
    PhysicalExpr, PhysicalSortExpr, PhysicalSortRequirement,
};
use datafusion::physical_plan::execution_plan::{
    Boundedness, CardinalityEffect, EmissionType, InvariantLevel,
};
use datafusion::physical_plan::filter_pushdown::{
    ChildPushdownResult, FilterDescription, FilterPushdownPhase, FilterPushdownPropagation,
    PushedDown,
};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::{
    InputDistributionRequirements, PlanProperties, SortOrderPushdownResult,
};

use crate::kit::*;

/// What DataFusion has asked the operators of a table.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The filters that were offered, with their phase.
    pub(crate) offered: Mutex<Vec<(FilterPushdownPhase, String)>>,
    pub(crate) resets: AtomicUsize,
    /// Rows that scans have returned.
    pub(crate) rows: AtomicUsize,
}

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
    metrics: ExecutionPlanMetricsSet,
    log: Arc<Log>,
}

impl Asked {
    pub(crate) fn new(
        device: impl Into<DeviceSpec>,
        batches: &[RecordBatch],
        log: &Arc<Log>,
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
            metrics: ExecutionPlanMetricsSet::new(),
            log: log.clone(),
        }
    }

    pub(crate) fn after(&self, last: impl Into<String>) -> Arc<dyn DevicePlan> {
        let last = last.into();
        Arc::new(Self {
            last,
            ..self.clone()
        })
    }

    pub(crate) fn node(self) -> Plan {
        Arc::new(DeviceExec::new(Arc::new(self)))
    }
}

fn dynamic() -> Arc<dyn PhysicalExpr> {
    Arc::new(DynamicFilterPhysicalExpr::new(vec![], lit(true)))
}

impl DevicePlan for Asked {
    fn name(&self) -> &str {
        "AskedExec"
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ", filters={}", self.filters.len())
    }

    fn describe_tree(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "answers=all")
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Plan> {
        self.child.iter().collect()
    }

    fn with_children(&self, mut children: Vec<Plan>) -> Result<Arc<dyn DevicePlan>> {
        let child = children.pop();
        Ok(Arc::new(Self {
            child,
            ..self.clone()
        }))
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        _: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let own = MetricBuilder::new(&self.metrics).counter("batches_read", partition);
        let (this, device) = (self.clone(), device.clone());
        let (schema, device_type) = (self.schema.clone(), device.id().device_type);
        let read = move |i: usize| -> arrow_device::Result<_> {
            own.add(1);
            let mut batch = this.batches[i].clone();
            for filter in &this.filters {
                let kept = filter.evaluate(&batch).unwrap();
                let kept = kept.into_array(batch.num_rows()).unwrap();
                batch = filter_record_batch(&batch, kept.as_boolean())?;
            }
            this.log.rows.fetch_add(batch.num_rows(), SeqCst);
            device.upload(&batch)
        };
        let batches = futures::stream::iter((0..self.batches.len()).map(read));
        let stream = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
        Ok(Box::pin(stream))
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        let one = self.child.iter().map(|_| Distribution::SinglePartition);
        InputDistributionRequirements::new(one.collect())
    }

    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        let by = |_| {
            let by = PhysicalSortRequirement::new(Arc::new(Column::new("a", 0)), None);
            Some(OrderingRequirements::new(
                LexRequirement::new([by]).unwrap(),
            ))
        };
        self.child.iter().map(by).collect()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        self.child.iter().map(|_| true).collect()
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        self.child.iter().map(|_| true).collect()
    }

    fn statistics(
        &self,
        partition: Option<usize>,
        inputs: &[Arc<Statistics>],
    ) -> Result<Arc<Statistics>> {
        let rows = 1000 + 10 * inputs.len() + partition.unwrap_or(9);
        let mut statistics = Statistics::new_unknown(&self.schema);
        statistics.num_rows = Precision::Inexact(rows);
        Ok(Arc::new(statistics))
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::LowerEqual
    }

    fn expressions(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        self.filters.iter().collect()
    }

    fn dynamic_expressions_produced(&self) -> Vec<Arc<dyn PhysicalExpr>> {
        match self.child {
            Some(_) => vec![dynamic()],
            None => vec![],
        }
    }

    fn supports_limit_pushdown(&self) -> bool {
        self.child.is_some()
    }

    fn fetch(&self) -> Option<usize> {
        self.fetch
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn DevicePlan>> {
        let fetch = Some(limit?);
        self.child.as_ref()?;
        Some(Arc::new(Self {
            fetch,
            ..self.clone()
        }))
    }

    fn repartitioned(&self, n: usize, _: &ConfigOptions) -> Result<Option<Arc<dyn DevicePlan>>> {
        let asked = self
            .child
            .is_some()
            .then(|| self.after(format!("repartitioned({n})")));
        Ok(asked)
    }

    fn try_swapping_with_projection(&self, above: &ProjectionExec) -> Result<Option<Plan>> {
        let Some(child) = &self.child else {
            return Ok(None);
        };
        assert_eq!(above.expr().len(), 1);
        Ok(Some(child.clone()))
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
        phase: FilterPushdownPhase,
        result: ChildPushdownResult,
        _: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn DevicePlan>>> {
        let mut own = self.clone();
        for offered in &result.parent_filters {
            let text = format!("{}", offered.filter);
            self.log.offered.lock().unwrap().push((phase, text));
            own.filters.push(offered.filter.clone());
        }
        let taken = vec![PushedDown::Yes; result.parent_filters.len()];
        let answer = FilterPushdownPropagation::with_parent_pushdown_result(taken);
        Ok(answer.with_updated_node(Arc::new(own)))
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
    ) -> Result<SortOrderPushdownResult<Arc<dyn DevicePlan>>> {
        let inner = self.after("sorted");
        Ok(match order.len() {
            1 => SortOrderPushdownResult::Exact { inner },
            2 => SortOrderPushdownResult::Inexact { inner },
            _ => SortOrderPushdownResult::Unsupported,
        })
    }

    fn with_preserve_order(&self, preserve_order: bool) -> Option<Arc<dyn DevicePlan>> {
        preserve_order.then(|| self.after("preserves"))
    }

    fn reset_state(&self) -> Result<Arc<dyn DevicePlan>> {
        self.log.resets.fetch_add(1, SeqCst);
        Ok(self.after("reset"))
    }

    fn with_new_state(&self, state: Arc<dyn Any + Send + Sync>) -> Option<Arc<dyn DevicePlan>> {
        let state = state.downcast_ref::<&str>()?;
        Some(self.after(*state))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
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
            scan = Asked::new(scan.device, &batches, &scan.log);
        }
        Ok(Arc::new(DeviceToHostExec::new(scan.node())))
    }
}
