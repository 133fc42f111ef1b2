//! Sessions, tables and round trips.

use std::sync::Arc;

use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch};
use arrow_device_cluster::codec::{DeviceCodec, DeviceTables};
use arrow_device_datafusion::{
    DeviceExec, DeviceResolver, DeviceScanExec, DeviceSource, DeviceSpec, DeviceTable, ScanRequest,
    SendableDeviceStream,
};
use datafusion::arrow::array::{Int64Array, RecordBatch, StringArray};
use datafusion::arrow::compute::concat_batches;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::logical_expr::TableProviderFilterPushDown;
use datafusion::physical_expr::expressions::BinaryExpr;
use datafusion::physical_expr::{LexOrdering, Partitioning, PhysicalExpr};
use datafusion::physical_plan::{ExecutionPlan, collect_partitioned, displayable};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_proto::bytes::{
    physical_plan_from_bytes_with_extension_codec, physical_plan_to_bytes_with_extension_codec,
};

use crate::filter_codec::FilterCodec;

pub(crate) const SIM: DeviceSpec = DeviceSpec::any(ArrowDeviceType::EXT_DEV);

pub(crate) fn sim() -> Device {
    Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap()
}

/// A worker: a device, and tables.
pub(crate) fn worker(tables: DeviceTables) -> SessionContext {
    let devices = DeviceResolver::of([sim()]);
    let config = SessionConfig::new()
        .with_extension(Arc::new(devices))
        .with_extension(Arc::new(tables));
    SessionContext::new_with_config(config)
}

/// A worker that has a table "t" of two partitions.
pub(crate) fn worker_with_t() -> SessionContext {
    worker(DeviceTables::of([("t", t(2))]))
}

pub(crate) fn codec() -> DeviceCodec {
    DeviceCodec::new().with_plan(Arc::new(FilterCodec::default()))
}

pub(crate) fn batch(number: i64) -> RecordBatch {
    let ids = number * 100..(number + 1) * 100;
    let texts = StringArray::from_iter(
        ids.clone()
            .map(|id| (id % 7 != 3).then(|| format!("text {id}"))),
    );
    RecordBatch::try_from_iter([
        (
            "id",
            Arc::new(Int64Array::from_iter_values(ids.clone())) as _,
        ),
        (
            "n",
            Arc::new(Int64Array::from_iter(
                ids.map(|id| (id % 5 != 1).then_some(id % 13)),
            )) as _,
        ),
        ("s", Arc::new(texts) as _),
    ])
    .unwrap()
}

/// Rows that a process makes on its device, in order of their ids, and filters `id > ...` that it applies.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) schema: SchemaRef,
    pub(crate) device: DeviceSpec,
    pub(crate) partitions: usize,
    pub(crate) ordered: bool,
    pub(crate) filters: TableProviderFilterPushDown,
}

impl Made {
    pub(crate) fn new(partitions: usize) -> Self {
        Self {
            schema: batch(0).schema(),
            device: SIM,
            partitions,
            ordered: false,
            filters: TableProviderFilterPushDown::Unsupported,
        }
    }

    pub(crate) fn table(self) -> DeviceTable {
        DeviceTable::new(Arc::new(self)).unwrap()
    }
}

impl DeviceSource for Made {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn partitioning(&self) -> Partitioning {
        Partitioning::UnknownPartitioning(self.partitions)
    }

    fn orderings(&self) -> Vec<LexOrdering> {
        let by = datafusion::physical_expr::expressions::col("id", &self.schema).unwrap();
        let by = datafusion::physical_expr::PhysicalSortExpr::new_default(by);
        LexOrdering::new([by])
            .filter(|_| self.ordered)
            .into_iter()
            .collect()
    }

    fn supports_filter(&self, filter: &Arc<dyn PhysicalExpr>) -> TableProviderFilterPushDown {
        match filter.downcast_ref::<BinaryExpr>() {
            Some(_) => self.filters.clone(),
            None => TableProviderFilterPushDown::Unsupported,
        }
    }

    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
        let mut rows = batch(request.partition as i64);
        for filter in &request.filters {
            let keep = filter
                .evaluate(&rows)
                .and_then(|keep| keep.into_array(rows.num_rows()));
            let keep =
                keep.map_err(|e| arrow_device::Error::InvalidArgument(e.to_string().into()))?;
            let keep = datafusion::arrow::array::AsArray::as_boolean(&keep).clone();
            rows = datafusion::arrow::compute::filter_record_batch(&rows, &keep)?;
        }
        let rows = match &request.projection {
            Some(columns) => rows.project(columns)?,
            None => rows,
        };
        let rows = request.device.upload(&rows)?;
        Ok(request.stream(futures::stream::iter([Ok(rows)])))
    }
}

/// The table "t".
pub(crate) fn t(partitions: usize) -> DeviceTable {
    Made::new(partitions).table().with_name("t")
}

pub(crate) fn node(scan: DeviceScanExec) -> Arc<dyn ExecutionPlan> {
    Arc::new(DeviceExec::from(scan))
}

/// The scan of "t".
pub(crate) fn scan(partitions: usize) -> Arc<dyn ExecutionPlan> {
    node(t(partitions).scan_on_device(None, None).unwrap())
}

/// Rows on the host, which need no table to travel.
pub(crate) fn host_rows(partitions: usize) -> Arc<dyn ExecutionPlan> {
    let batches: Vec<_> = (0..partitions as i64).map(|i| vec![batch(i)]).collect();
    let rows = datafusion::datasource::memory::MemorySourceConfig::try_new_exec(
        &batches,
        batch(0).schema(),
        None,
    );
    rows.unwrap()
}

pub(crate) fn text(plan: &Arc<dyn ExecutionPlan>) -> String {
    displayable(&**plan).indent(true).to_string()
}

pub(crate) fn bytes(plan: &Arc<dyn ExecutionPlan>) -> Result<Vec<u8>> {
    let bytes = physical_plan_to_bytes_with_extension_codec(plan.clone(), &codec())?;
    Ok(bytes.to_vec())
}

pub(crate) fn read(bytes: &[u8], context: &TaskContext) -> Result<Arc<dyn ExecutionPlan>> {
    physical_plan_from_bytes_with_extension_codec(bytes, context, &codec())
}

/// All rows, the partitions in their order.
pub(crate) async fn rows(plan: Arc<dyn ExecutionPlan>, context: &SessionContext) -> RecordBatch {
    let schema = plan.schema();
    let all = collect_partitioned(plan, context.task_ctx()).await.unwrap();
    concat_batches(&schema, &all.concat()).unwrap()
}

/// Sends a plan from a process without a device to one with a device, and checks that it is the same there and returns the same rows.
#[track_caller]
pub(crate) fn travel(plan: Arc<dyn ExecutionPlan>, to: &SessionContext) -> Arc<dyn ExecutionPlan> {
    let bytes = bytes(&plan).unwrap();
    let there = read(&bytes, &to.task_ctx()).unwrap();
    assert_eq!(text(&there), text(&plan));
    assert_eq!(there.schema(), plan.schema());
    there
}

pub(crate) fn upload(batch: &RecordBatch, device: &Device) -> DeviceRecordBatch {
    device.upload(batch).unwrap()
}
