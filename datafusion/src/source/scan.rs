//! [`DeviceScanExec`]: the scan of a table.

use std::fmt;
use std::sync::{Arc, OnceLock};

use arrow_schema::SchemaRef;
use datafusion_common::config::ConfigOptions;
use datafusion_common::stats::Precision;
use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{Result, Statistics, internal_datafusion_err, plan_err};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_expr::TableProviderFilterPushDown;
use datafusion_physical_expr::projection::ProjectionExprs;
use datafusion_physical_expr::{
    DynamicFilterTracking, Partitioning, PhysicalExpr, PhysicalSortExpr,
};
use datafusion_physical_plan::execution_plan::apply_expression_roots;
use datafusion_physical_plan::filter_pushdown::{
    ChildPushdownResult, FilterPushdownPhase, FilterPushdownPropagation, PushedDown,
};
use datafusion_physical_plan::projection::{
    ProjectionExec, all_alias_free_columns, new_projections_for_columns,
};
use datafusion_physical_plan::statistics::StatisticsArgs;
use datafusion_physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, SortOrderPushdownResult,
};
use futures::stream::empty;

use super::contract::{DeviceSource, ScanRequest};
use super::declared::properties;
use super::streams::scanned;
use crate::exec::DeviceExec;
use crate::metrics::to_datafusion;
use crate::plugin::{DeviceOperator, DeviceTask};
use crate::stream::SendableDeviceStream;

/// The operator that reads a [`DeviceTable`](crate::DeviceTable).
#[derive(Clone, Debug)]
pub struct DeviceScanExec {
    source: Arc<dyn DeviceSource>,
    table_name: Option<Arc<str>>,
    /// `None`: all columns in their order.
    projection: Option<Arc<[usize]>>,
    /// Those that the source applies, over the table's columns.
    filters: Vec<Arc<dyn PhysicalExpr>>,
    /// The most rows of each partition.
    fetch: Option<usize>,
    /// `(i, n)`: only every `n`-th partition from `i` on is read.
    part: Option<(usize, usize)>,
    properties: Arc<PlanProperties>,
    /// Those of all rows, for which planners ask many times.
    statistics: OnceLock<Arc<Statistics>>,
}

impl DeviceScanExec {
    /// The scan of a source whose declarations have been checked.
    pub(super) fn new(
        source: Arc<dyn DeviceSource>,
        table_name: Option<Arc<str>>,
        projection: Option<&[usize]>,
        fetch: Option<usize>,
    ) -> Result<Self> {
        let table = source.schema();
        let all: Vec<usize> = (0..table.fields().len()).collect();
        let projection = projection.filter(|columns| **columns != *all);
        let columns = projection.unwrap_or(&all);
        let schema = Arc::new(table.project(columns)?);
        let properties = Arc::new(properties(&*source, schema, columns)?);
        Ok(Self {
            projection: projection.map(Arc::from),
            source,
            table_name,
            filters: Vec::new(),
            fetch,
            part: None,
            properties,
            statistics: OnceLock::new(),
        })
    }

    /// Returns the source. If its rows may change, it is the snapshot that the scan was planned
    /// with.
    pub fn source(&self) -> &Arc<dyn DeviceSource> {
        &self.source
    }

    /// Returns the name by which other processes know the table, if it has one: [`DeviceTable::name`](crate::DeviceTable::name).
    pub fn table_name(&self) -> Option<&str> {
        self.table_name.as_deref()
    }

    /// Returns the same scan with these filters, over the table's columns, instead of those that it has. The source applies them as it
    /// says in [`DeviceSource::supports_filter`].
    ///
    /// # Errors
    /// Returns [`DataFusionError::Plan`](datafusion_common::DataFusionError::Plan) for a filter that the source does not support.
    pub fn with_filters(self, filters: Vec<Arc<dyn PhysicalExpr>>) -> Result<Self> {
        for filter in &filters {
            if self.source.supports_filter(filter) == TableProviderFilterPushDown::Unsupported {
                return plan_err!(
                    "DeviceScanExec on {}: the source does not support the filter {filter}; DeviceSource::supports_filter must always give \
                     the same answer",
                    self.source.device()
                );
            }
        }
        Ok(Self { filters, ..self })
    }

    /// Returns the scan of a part of the table, for one of `count` tasks that read all of it between them: only partitions
    /// `index`, `index + count`, and so on are read, and the others have no rows here. The number of partitions stays.
    ///
    /// # Errors
    /// Returns [`DataFusionError::Plan`](datafusion_common::DataFusionError::Plan) if `index` is not less than `count`.
    pub fn with_part(self, index: usize, count: usize) -> Result<Self> {
        if index >= count {
            return plan_err!(
                "part {index} of {count} of DeviceScanExec on {}; parts begin at 0",
                self.source.device()
            );
        }
        let part = Some((index, count));
        Ok(Self { part, ..self })
    }

    /// Returns which part of the table the scan reads, `(index, count)`, or `None` for all of it.
    pub fn part(&self) -> Option<(usize, usize)> {
        self.part
    }

    /// Returns the columns that the scan returns, as indices into the table's schema, or `None` for
    /// all in their order.
    pub fn projection(&self) -> Option<&[usize]> {
        self.projection.as_deref()
    }

    /// Returns the filters that the source applies, over the table's columns.
    pub fn filters(&self) -> &[Arc<dyn PhysicalExpr>] {
        &self.filters
    }

    /// The columns that the scan returns.
    fn columns(&self) -> Vec<usize> {
        let all = || (0..self.source.schema().fields().len()).collect();
        self.projection().map_or_else(all, <[_]>::to_vec)
    }

    fn schema(&self) -> &SchemaRef {
        self.properties.equivalence_properties().schema()
    }

    fn partitions(&self) -> usize {
        self.properties.output_partitioning().partition_count()
    }

    /// The statistics of a partition or of all, without the limit and the filters.
    fn unlimited(&self, partition: Option<usize>) -> Statistics {
        let whole = partition.is_none() || self.partitions() == 1;
        let known = self.source.statistics(partition.filter(|_| !whole));
        let mut known = known.project(self.projection.as_ref());
        if self.projection.is_some() {
            known.total_byte_size = Precision::Absent;
        }
        known
    }

    /// The exact number of rows of a partition, if it is known.
    fn rows(&self, partition: usize) -> Option<usize> {
        match self.unlimited(Some(partition)).num_rows {
            Precision::Exact(rows) if self.filters.is_empty() => {
                Some(rows.min(self.fetch.unwrap_or(usize::MAX)))
            }
            _ => None,
        }
    }
}

impl DisplayAs for DeviceScanExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = vec![format!("partitions={}", self.partitions())];
        if self.projection.is_some() {
            let names = self.schema().fields().iter().map(|f| f.name().as_str());
            let names = names.collect::<Vec<_>>().join(", ");
            parts.push(format!("projection=[{names}]"));
        }
        if !self.filters.is_empty() {
            let filters: Vec<_> = self.filters.iter().map(ToString::to_string).collect();
            parts.push(format!("filters=[{}]", filters.join(", ")));
        }
        parts.extend(self.fetch.map(|rows| format!("fetch={rows}")));
        let part = self.part;
        parts.extend(part.map(|(index, count)| format!("part={index} of {count}")));
        match self.properties.output_partitioning() {
            Partitioning::UnknownPartitioning(_) => {}
            declared => parts.push(format!("partitioning={declared}")),
        }
        let order = self.properties.output_ordering();
        parts.extend(order.map(|order| format!("order=[{order}]")));
        let unbounded = self.properties.boundedness.is_unbounded();
        parts.extend(unbounded.then(|| "unbounded".to_owned()));
        match t {
            DisplayFormatType::TreeRender => {
                parts.iter().try_for_each(|part| writeln!(f, "{part}"))
            }
            _ => write!(f, "DeviceScanExec: {}", parts.join(", ")),
        }
    }
}

impl ExecutionPlan for DeviceScanExec {
    fn name(&self) -> &str {
        "DeviceScanExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn with_new_children(
        self: Arc<Self>,
        _: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        DeviceExec::from(self.clone()).execute(partition, context)
    }

    fn statistics_from_inputs(
        &self,
        _: &[Arc<Statistics>],
        args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        let partition = args.partition();
        let is_plain = self.fetch.is_none() && self.filters.is_empty() && self.part.is_none();
        if is_plain && partition.is_none() {
            let all = || Arc::new(self.unlimited(None));
            return Ok(self.statistics.get_or_init(all).clone());
        }
        let known = self.unlimited(partition);
        let one = partition.is_some() || self.partitions() == 1;
        let known = match (self.fetch, known.num_rows) {
            (None, _) => known,
            (Some(rows), _) if one => known.with_fetch(Some(rows), 0, 1)?,
            // No partition has more rows.
            (Some(rows), Precision::Exact(all)) if all <= rows => known,
            // How the rows are distributed over the partitions is not known.
            _ => known.to_inexact(),
        };
        Ok(Arc::new(match (&self.filters[..], self.part) {
            ([], None) => known,
            _ => known.to_inexact(),
        }))
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        apply_expression_roots(&self.filters, f)
    }

    fn fetch(&self) -> Option<usize> {
        self.fetch
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn ExecutionPlan>> {
        let mut scan = self.clone();
        scan.fetch = limit;
        Some(Arc::new(scan))
    }

    fn try_swapping_with_projection(
        &self,
        projection: &ProjectionExec,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let expressions = projection.expr();
        if !all_alias_free_columns(expressions) {
            return Ok(None);
        }
        let columns = new_projections_for_columns(expressions, &self.columns());
        let (source, name) = (self.source.clone(), self.table_name.clone());
        let mut narrowed = Self::new(source, name, Some(&columns), self.fetch)?;
        // A projection may change the schema's metadata, which batches keep.
        if *narrowed.schema() != projection.schema() {
            return Ok(None);
        }
        (narrowed.filters, narrowed.part) = (self.filters.clone(), self.part);
        Ok(Some(Arc::new(narrowed)))
    }

    fn handle_child_pushdown_result(
        &self,
        _: FilterPushdownPhase,
        child_pushdown_result: ChildPushdownResult,
        _: &ConfigOptions,
    ) -> Result<FilterPushdownPropagation<Arc<dyn ExecutionPlan>>> {
        let columns = ProjectionExprs::from_indices(&self.columns(), &self.source.schema());
        let (mut filters, mut pushed) = (self.filters.clone(), Vec::new());
        for of_parent in child_pushdown_result.parent_filters {
            let filter = columns.unproject_expr(&of_parent.filter)?;
            let support = match self.fetch {
                None => self.source.supports_filter(&filter),
                // A filter above a limit does not commute with it.
                Some(_) => TableProviderFilterPushDown::Unsupported,
            };
            pushed.push(match support {
                TableProviderFilterPushDown::Exact => PushedDown::Yes,
                _ => PushedDown::No,
            });
            if support != TableProviderFilterPushDown::Unsupported && !filters.contains(&filter) {
                filters.push(filter);
            }
        }
        let answer = FilterPushdownPropagation::with_parent_pushdown_result(pushed);
        if filters.len() == self.filters.len() {
            return Ok(answer);
        }
        let mut scan = self.clone();
        scan.filters = filters;
        Ok(answer.with_updated_node(Arc::new(scan)))
    }

    fn try_pushdown_sort(
        &self,
        order: &[PhysicalSortExpr],
    ) -> Result<SortOrderPushdownResult<Arc<dyn ExecutionPlan>>> {
        let declared = self.properties.equivalence_properties();
        Ok(match declared.ordering_satisfy(order.iter().cloned())? {
            true => SortOrderPushdownResult::Exact {
                inner: Arc::new(self.clone()),
            },
            false => SortOrderPushdownResult::Unsupported,
        })
    }

    /// The filters of joins and TopK that have run are theirs, and stricter than the next run
    /// allows.
    fn reset_state(self: Arc<Self>) -> Result<Arc<dyn ExecutionPlan>> {
        let mut scan = Self::clone(&self);
        scan.filters
            .retain(|f| !DynamicFilterTracking::classify(f).contains_dynamic_filter());
        Ok(Arc::new(scan))
    }
}

impl From<DeviceScanExec> for DeviceExec {
    /// The node of a plan that scans.
    fn from(scan: DeviceScanExec) -> Self {
        let device = scan.source.device().clone();
        Self::new(Arc::new(scan), device, Arc::new(Scan))
    }
}

/// What runs the scan, which is its node.
#[derive(Debug)]
struct Scan;

impl DeviceOperator for Scan {
    fn name(&self) -> &str {
        "DeviceScanExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let scan: Option<&DeviceScanExec> = task.node().downcast_ref();
        let scan = scan.ok_or_else(|| internal_datafusion_err!("no scan"))?;
        let request = ScanRequest {
            partition: task.partition,
            device: task.device.clone(),
            projection: scan.projection.clone(),
            filters: scan.filters.clone(),
            fetch: scan.fetch,
            context: task.context.clone(),
            schema: scan.schema().clone(),
            table: scan.source.schema(),
        };
        let (index, count) = scan.part.unwrap_or((0, 1));
        if task.partition % count != index {
            return Ok(request.stream(empty()));
        }
        let promised = scan.rows(task.partition);
        let stream = scan.source.open(request.clone());
        let scanned = stream.and_then(|stream| scanned(stream, request, promised));
        scanned.map_err(to_datafusion)
    }

    fn runs_on_host(&self) -> bool {
        false
    }
}
