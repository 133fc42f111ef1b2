//! [`DeviceInsertExec`]: the node of an `INSERT`.

use std::fmt;
use std::sync::Arc;

use arrow_array::{RecordBatch, UInt64Array};
use arrow_device::{Device, DeviceRecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use datafusion_common::tree_node::TreeNodeRecursion;
use datafusion_common::{Result, internal_err, plan_err};
use datafusion_execution::{SendableRecordBatchStream, TaskContext};
use datafusion_expr::dml::InsertOp;
use datafusion_physical_expr::{EquivalenceProperties, Partitioning, PhysicalExpr};
use datafusion_physical_plan::execution_plan::{EmissionType, EvaluationType, SchedulingType};
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion_physical_plan::stream::RecordBatchStreamAdapter;
use datafusion_physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
};
use futures::TryStreamExt;
use futures::stream::once;
use tokio::runtime::Handle;

use super::contract::{DeviceSource, InsertRequest};
use crate::inputs::merged;
use crate::metrics::{named, on_blocking_thread, to_datafusion};
use crate::spec::{DeviceSpec, open_for};

/// The node that inserts rows into a [`DeviceTable`](crate::DeviceTable), and returns their number
/// in one row on the host.
///
/// It reads batches on the table's device: those of a device operator on that device do not move,
/// and those of a host plan are uploaded. The partitions of its input run at the same time, each on
/// a task of its own; the rows of one partition keep their order.
#[derive(Clone, Debug)]
pub struct DeviceInsertExec {
    input: Arc<dyn ExecutionPlan>,
    source: Arc<dyn DeviceSource>,
    table_name: Option<Arc<str>>,
    op: InsertOp,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceInsertExec {
    /// The insertion of rows, which fails if their types are not the table's.
    pub(super) fn new(
        input: Arc<dyn ExecutionPlan>,
        source: Arc<dyn DeviceSource>,
        table_name: Option<Arc<str>>,
        op: InsertOp,
    ) -> Result<Self> {
        let types = |schema: SchemaRef| {
            let types = schema.fields().iter().map(|f| f.data_type().to_string());
            types.collect::<Vec<_>>().join(", ")
        };
        let (expected, found) = (types(source.schema()), types(input.schema()));
        if expected != found {
            let device = source.device();
            return plan_err!(
                "columns of types {found} to insert into a DeviceTable on {device} with columns of types {expected}"
            );
        }
        let count = Field::new("count", DataType::UInt64, false);
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::new(Schema::new(vec![count]))),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Final,
            input.boundedness(),
        )
        .with_scheduling_type(SchedulingType::Cooperative)
        .with_evaluation_type(EvaluationType::Eager);
        Ok(Self {
            input,
            source,
            table_name,
            op,
            properties: Arc::new(properties),
            metrics: ExecutionPlanMetricsSet::new(),
        })
    }

    /// Returns which device the rows are wanted on.
    pub fn device(&self) -> &DeviceSpec {
        self.source.device()
    }

    /// Returns the source that takes the rows.
    pub fn source(&self) -> &Arc<dyn DeviceSource> {
        &self.source
    }

    /// Returns the name by which other processes know the table, if it has one: [`DeviceTable::name`](crate::DeviceTable::name).
    pub fn table_name(&self) -> Option<&str> {
        self.table_name.as_deref()
    }

    /// Returns whether the rows are added to those of the table, or replace them.
    pub fn op(&self) -> InsertOp {
        self.op
    }

    /// Returns the plan whose rows are inserted.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

impl DisplayAs for DeviceInsertExec {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, op) = (self.device(), &self.op);
        match t {
            DisplayFormatType::TreeRender => writeln!(f, "device={device}\nop={op}"),
            _ => write!(f, "DeviceInsertExec: device={device}, op={op}"),
        }
    }
}

impl ExecutionPlan for DeviceInsertExec {
    fn name(&self) -> &str {
        "DeviceInsertExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    /// The rows of a partition are written in their order, so DataFusion keeps a sort below.
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
        let Ok([input]) = <[_; 1]>::try_from(children) else {
            return internal_err!("DeviceInsertExec has one child");
        };
        let (source, name) = (self.source.clone(), self.table_name.clone());
        Ok(Arc::new(Self::new(input, source, name, self.op)?))
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        if partition > 0 {
            return internal_err!("partition {partition} of DeviceInsertExec, which has one");
        }
        let (node, schema) = (self.clone(), self.schema());
        let insertion = async move {
            let inserted = node.insert(context).await;
            let rows = inserted.map_err(|e| named(e, node.name(), 0, node.device()))?;
            let count = Arc::new(UInt64Array::from(vec![rows]));
            Ok(RecordBatch::try_new(node.schema(), vec![count])?)
        };
        let count = RecordBatchStreamAdapter::new(schema, once(insertion));
        Ok(Box::pin(count))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}

impl DeviceInsertExec {
    /// Inserts all rows, and returns their number.
    async fn insert(&self, context: Arc<TaskContext>) -> Result<u64> {
        let device = open_for(self.name(), self.device(), 0, &context)?;
        let rows_written = MetricBuilder::new(&self.metrics).counter("rows_written", 0);
        let mut batches = merged(&self.input, &device, &context, None)?;
        let request = InsertRequest {
            op: self.op,
            device: device.clone(),
            context,
        };
        let mut sink = self.source.insert(request).map_err(to_datafusion)?;
        let schema = self.source.schema();
        let mut rows = 0;
        while let Some(batch) = batches.try_next().await.map_err(to_datafusion)? {
            let batch = of_table(batch, &schema, &device);
            let batch = batch.await.map_err(to_datafusion)?;
            let found = batch.num_rows();
            sink.write(batch).await.map_err(to_datafusion)?;
            rows_written.add(found);
            rows += found as u64;
        }
        sink.commit().await.map_err(to_datafusion)?;
        Ok(rows)
    }
}

/// The batch with the table's schema, which has no nulls where the table allows none. To count them may wait for the device, where waiting
/// does not hold up other tasks.
async fn of_table(
    batch: DeviceRecordBatch,
    schema: &SchemaRef,
    device: &Device,
) -> arrow_device::Result<DeviceRecordBatch> {
    let (found, columns, rows) = batch.into_parts();
    let fields = schema.fields().iter().zip(found.fields());
    for ((field, found), column) in fields.zip(&columns) {
        let may_have_nulls = found.is_nullable() && column.null_count().is_none();
        if !field.is_nullable() && may_have_nulls {
            let column = column.clone();
            let operation =
                "counting the nulls of rows to insert after the end of the Tokio runtime";
            let count = move || column.resolve_null_counts();
            on_blocking_thread(&Handle::current(), operation, count).await??;
        }
    }
    DeviceRecordBatch::try_new_with_rows(device, schema.clone(), &columns, rows)
}
