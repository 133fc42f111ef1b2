//! Tables whose batches are on a device.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arrow_schema::SchemaRef;
use async_trait::async_trait;
use datafusion_catalog::{Session, TableProvider};
use datafusion_common::stats::Precision;
use datafusion_common::{DataFusionError, Result, Statistics};
use datafusion_execution::TaskContext;
use datafusion_expr::{Expr, TableType};
use datafusion_physical_expr::{EquivalenceProperties, Partitioning};
use datafusion_physical_plan::execution_plan::{Boundedness, EmissionType, SchedulingType};
use datafusion_physical_plan::{ExecutionPlan, PlanProperties};
use futures_core::Stream;

use super::metrics::to_datafusion;
use super::plan::{DeviceExec, DevicePlan};
use super::stream::SendableDeviceStream;
use super::transitions::{DeviceToHostExec, no_children};
use arrow_device::ArrowDeviceType;
use arrow_device::Device;
use arrow_device::DeviceRecordBatch;
use arrow_device::DeviceRecordBatchReader;
use arrow_device::async_stream::{
    DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, ReaderStream,
};

/// Opens the stream of a partition. Each scan calls it once, on the thread that starts the query,
/// so it must not block.
pub type OpenPartition =
    Arc<dyn Fn(Arc<TaskContext>) -> arrow_device::Result<SendableDeviceStream> + Send + Sync>;

/// A table whose batches are on a device.
///
/// Columns that a query does not use and rows beyond its limit are never moved. The rest is
/// downloaded by a [`DeviceToHostExec`], or stays on the device for a device operator.
pub struct DeviceTable {
    schema: SchemaRef,
    device: Device,
    partitions: Vec<OpenPartition>,
    statistics: Option<Statistics>,
}

impl DeviceTable {
    /// Makes a table of streams, one for each partition, whose batches are all of `schema` and on
    /// `device`.
    pub fn new(schema: SchemaRef, device: Device, partitions: Vec<OpenPartition>) -> Self {
        Self {
            schema,
            device,
            partitions,
            statistics: None,
        }
    }

    /// Makes a table of readers, for example of foreign C streams. `open` makes a reader for each
    /// partition of each scan, which a thread of its own reads, one batch ahead.
    pub fn from_readers<R: DeviceRecordBatchReader + Send + 'static>(
        schema: SchemaRef,
        device: Device,
        partitions: usize,
        open: impl Fn(usize) -> arrow_device::Result<R> + Send + Sync + 'static,
    ) -> Self {
        let open = Arc::new(open);
        let partition = |i: usize| -> OpenPartition {
            let open = open.clone();
            Arc::new(move |_| Ok(Box::pin(ReaderStream::spawn(open(i)?, 1)?)))
        };
        Self::new(schema, device, (0..partitions).map(partition).collect())
    }

    /// Makes a table of batches. Those of a partition keep their order, and the number of rows is
    /// known.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](arrow_device::Error::InvalidArgument) for a batch of
    /// another schema or device.
    pub fn from_batches(
        schema: SchemaRef,
        device: Device,
        partitions: Vec<Vec<DeviceRecordBatch>>,
    ) -> arrow_device::Result<Self> {
        let mut rows = 0;
        for batch in partitions.iter().flatten() {
            if batch.schema_ref().fields() != schema.fields() || *batch.device() != device {
                return Err(not_the_tables(&device));
            }
            rows += batch.num_rows();
        }
        let of = (schema.clone(), device.id().device_type);
        let partition = |batches: Vec<DeviceRecordBatch>| -> OpenPartition {
            let ((schema, device_type), batches) = (of.clone(), Arc::new(batches));
            Arc::new(move |_| {
                let batches = Batches {
                    batches: batches.clone(),
                    next: 0,
                };
                let (schema, device_type) = (schema.clone(), device_type);
                let stream = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
                Ok(Box::pin(stream))
            })
        };
        let statistics = Statistics {
            num_rows: Precision::Exact(rows),
            ..Statistics::new_unknown(&schema)
        };
        let partitions = partitions.into_iter().map(partition).collect();
        Self::new(schema, device, partitions).with_statistics(statistics)
    }

    /// Sets the statistics of the table, with those of its columns in their order.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](arrow_device::Error::InvalidArgument) if the number of
    /// columns is not the table's.
    pub fn with_statistics(mut self, statistics: Statistics) -> arrow_device::Result<Self> {
        let (found, columns) = (
            statistics.column_statistics.len(),
            self.schema.fields().len(),
        );
        if found != columns {
            return Err(arrow_device::Error::InvalidArgument(
                format!(
                    "statistics of {found} columns for a table of {columns} columns on {}",
                    self.device
                )
                .into(),
            ));
        }
        self.statistics = Some(statistics);
        Ok(self)
    }

    /// Returns the operator that reads the table: these columns, and at most `fetch` rows of each
    /// partition.
    ///
    /// # Errors
    /// Returns an error for a column that does not exist.
    pub fn scan_on_device(
        &self,
        projection: Option<&[usize]>,
        fetch: Option<usize>,
    ) -> Result<DeviceScanExec> {
        let all = |schema: &SchemaRef| (0..schema.fields().len()).collect();
        let projection: Vec<usize> = projection.map_or_else(|| all(&self.schema), <[_]>::to_vec);
        let schema = Arc::new(self.schema.project(&projection)?);
        let partitions = Partitioning::UnknownPartitioning(self.partitions.len());
        let properties = PlanProperties::new(
            EquivalenceProperties::new(schema.clone()),
            partitions,
            EmissionType::Incremental,
            Boundedness::Bounded,
        )
        .with_scheduling_type(SchedulingType::Cooperative);
        let columns = self.schema.fields().len();
        let is_all = projection.iter().copied().eq(0..columns);
        let statistics = match &self.statistics {
            None => Statistics::new_unknown(&schema),
            Some(all) if is_all => all.clone(),
            Some(all) => Statistics {
                total_byte_size: Precision::Absent,
                ..all.clone().project(Some(&projection))
            },
        };
        Ok(DeviceScanExec {
            device: self.device.clone(),
            table: self.schema.clone(),
            partitions: self.partitions.clone(),
            projection: (!is_all).then(|| projection.into()),
            fetch,
            statistics: Arc::new(statistics),
            properties: Arc::new(properties),
        })
    }
}

fn not_the_tables(device: &Device) -> arrow_device::Error {
    let what = format!("a batch or stream of another schema than the table's, or not on {device}");
    arrow_device::Error::InvalidArgument(what.into())
}

/// A partition's batches.
struct Batches {
    batches: Arc<Vec<DeviceRecordBatch>>,
    next: usize,
}

impl Stream for Batches {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let batch = self.batches.get(self.next).cloned();
        self.next += 1;
        Poll::Ready(batch.map(Ok))
    }
}

impl fmt::Debug for DeviceTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceTable")
            .field("device", &self.device)
            .field("schema", &self.schema)
            .field("partitions", &self.partitions.len())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl TableProvider for DeviceTable {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        _: &dyn Session,
        projection: Option<&Vec<usize>>,
        _: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let scan = self.scan_on_device(projection.map(Vec::as_slice), limit)?;
        let scan = Arc::new(DeviceExec::new(Arc::new(scan)));
        Ok(Arc::new(DeviceToHostExec::new(scan)))
    }

    fn statistics(&self) -> Option<Statistics> {
        self.statistics.clone()
    }
}

/// The operator that reads a [`DeviceTable`].
#[derive(Clone)]
pub struct DeviceScanExec {
    device: Device,
    /// The table's schema.
    table: SchemaRef,
    partitions: Vec<OpenPartition>,
    /// `None`: all columns in their order.
    projection: Option<Arc<[usize]>>,
    /// The most rows of each partition.
    fetch: Option<usize>,
    /// The statistics without `fetch`.
    statistics: Arc<Statistics>,
    properties: Arc<PlanProperties>,
}

impl fmt::Debug for DeviceScanExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceScanExec")
            .field("device", &self.device)
            .field("projection", &self.projection)
            .field("fetch", &self.fetch)
            .finish_non_exhaustive()
    }
}

impl DeviceScanExec {
    fn schema(&self) -> &SchemaRef {
        self.properties.equivalence_properties().schema()
    }
}

impl DevicePlan for DeviceScanExec {
    fn name(&self) -> &str {
        "DeviceScanExec"
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ", partitions={}", self.partitions.len())?;
        if self.projection.is_some() {
            let names: Vec<_> = self.schema().fields().iter().map(|f| &**f.name()).collect();
            write!(f, ", projection=[{}]", names.join(", "))?;
        }
        match self.fetch {
            Some(rows) => write!(f, ", fetch={rows}"),
            None => Ok(()),
        }
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        no_children(self.name(), &children)?;
        Ok(Arc::new(self.clone()))
    }

    fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let open = self.partitions.get(partition).ok_or_else(|| {
            DataFusionError::Internal(format!(
                "partition {partition} of {}",
                self.partitions.len()
            ))
        })?;
        let stream = open(context).map_err(to_datafusion)?;
        if stream.schema().fields() != self.table.fields() {
            return Err(to_datafusion(not_the_tables(&self.device)));
        }
        Ok(Box::pin(Scan {
            stream: Some(stream),
            device: self.device.clone(),
            table: self.table.clone(),
            schema: self.schema().clone(),
            projection: self.projection.clone(),
            left: self.fetch,
        }))
    }

    fn statistics(
        &self,
        partition: Option<usize>,
        _: &[Arc<Statistics>],
    ) -> Result<Arc<Statistics>> {
        let one = self.partitions.len() == 1;
        let known = || Statistics::clone(&self.statistics);
        Ok(match (self.fetch, self.statistics.num_rows) {
            _ if partition.is_some() && !one => Arc::new(Statistics::new_unknown(self.schema())),
            (None, _) => self.statistics.clone(),
            (Some(rows), _) if one => Arc::new(known().with_fetch(Some(rows), 0, 1)?),
            // No partition has more rows.
            (Some(rows), Precision::Exact(all)) if all <= rows => self.statistics.clone(),
            // How the rows are distributed over the partitions is not known.
            _ => Arc::new(known().to_inexact()),
        })
    }

    fn fetch(&self) -> Option<usize> {
        self.fetch
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn DevicePlan>> {
        let fetch = limit;
        Some(Arc::new(Self {
            fetch,
            ..self.clone()
        }))
    }
}

/// A scan's stream: some of the columns, and at most so many rows. Nothing is moved.
struct Scan {
    /// `None` once enough rows have come, which ends its producer.
    stream: Option<SendableDeviceStream>,
    device: Device,
    table: SchemaRef,
    schema: SchemaRef,
    projection: Option<Arc<[usize]>>,
    /// Rows still to come.
    left: Option<usize>,
}

impl Scan {
    fn cut(&mut self, mut batch: DeviceRecordBatch) -> arrow_device::Result<DeviceRecordBatch> {
        if *batch.device() != self.device || batch.schema_ref().fields() != self.table.fields() {
            return Err(not_the_tables(&self.device));
        }
        if let Some(projection) = &self.projection {
            batch = batch.project(projection)?;
        }
        if let Some(left) = &mut self.left {
            if batch.num_rows() > *left {
                batch = batch.slice(0, *left)?;
            }
            *left -= batch.num_rows();
        }
        Ok(batch)
    }
}

impl Stream for Scan {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.left == Some(0) {
            self.stream = None;
        }
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        let next = match stream.as_mut().poll_next(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(next) => next,
        };
        let next = next.map(|batch| batch.and_then(|batch| self.cut(batch)));
        if !matches!(next, Some(Ok(_))) || self.left == Some(0) {
            self.stream = None;
        }
        Poll::Ready(next)
    }
}

impl DeviceRecordBatchStream for Scan {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device.id().device_type
    }
}
