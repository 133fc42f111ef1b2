//! [`DeviceSource`]: what a table on a device is made of.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch, Error};
use arrow_schema::SchemaRef;
use async_trait::async_trait;
use datafusion_common::{Constraints, Statistics};
use datafusion_execution::TaskContext;
use datafusion_expr::TableProviderFilterPushDown;
use datafusion_expr::dml::InsertOp;
use datafusion_physical_expr::{LexOrdering, Partitioning, PhysicalExpr};
use datafusion_physical_plan::execution_plan::Boundedness;

use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;

/// Where the rows of a [`DeviceTable`](crate::DeviceTable) come from: a file format that is decoded
/// on a device, another library's tables, batches in device memory.
///
/// A source declares what it knows of its rows, and DataFusion plans with it: it leaves out a
/// repartition, a sort or an aggregation that the declaration makes needless. A wrong declaration
/// gives wrong results, so a source declares only what holds for every scan. By default nothing is
/// known, and there is one partition.
///
/// The declarations are descriptions and need no device; [`open`](Self::open) runs where the plan
/// runs.
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device::ArrowDeviceType;
/// # use arrow_device_datafusion::{DeviceSource, DeviceSpec, DeviceTable, ScanRequest, SendableDeviceStream};
/// # use arrow_schema::{DataType, Field, Schema, SchemaRef};
/// /// The numbers from 0 on, made on the device.
/// #[derive(Debug)]
/// struct Numbers {
///     schema: SchemaRef,
///     device: DeviceSpec,
/// }
///
/// impl DeviceSource for Numbers {
///     fn schema(&self) -> SchemaRef {
///         self.schema.clone()
///     }
///
///     fn device(&self) -> &DeviceSpec {
///         &self.device
///     }
///
///     fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
///         let numbers = arrow_array::Int64Array::from_iter_values(0..100);
///         let batch = arrow_array::RecordBatch::try_new(self.schema(), vec![Arc::new(numbers)])?;
///         let batch = request.device.upload(&batch)?;
///         Ok(request.stream(futures::stream::iter([Ok(batch)])))
///     }
/// }
///
/// let schema = Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]));
/// let device = DeviceSpec::any(ArrowDeviceType::CPU);
/// let table = DeviceTable::new(Arc::new(Numbers { schema, device }))?;
/// # let _ = table;
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub trait DeviceSource: Any + fmt::Debug + Send + Sync {
    /// Returns the schema of the table.
    fn schema(&self) -> SchemaRef;

    /// Returns which device the batches are on.
    fn device(&self) -> &DeviceSpec;

    /// Returns how the rows are distributed over the partitions, with expressions over the table's
    /// columns. By default, there is one partition.
    ///
    /// [`Partitioning::Hash`] saves a repartition below an aggregation or a join. A join reads partition *i* of one side with
    /// partition *i* of the other, so the rows must be where DataFusion's `RepartitionExec` puts
    /// them: with another hash function, a join with another table loses rows.
    fn partitioning(&self) -> Partitioning {
        Partitioning::UnknownPartitioning(1)
    }

    /// Returns the orders that the rows of each partition have, over the table's columns. By
    /// default, none. Streams must always have them.
    fn orderings(&self) -> Vec<LexOrdering> {
        Vec::new()
    }

    /// Returns the constraints that the rows satisfy. They are not checked. By default, none.
    fn constraints(&self) -> Option<&Constraints> {
        None
    }

    /// Returns whether the streams end. By default, they do.
    fn boundedness(&self) -> Boundedness {
        Boundedness::Bounded
    }

    /// Returns what is known of the rows of a partition, or of all, without any filter. By default,
    /// nothing. Of a table of one partition, only the statistics of all are used.
    ///
    /// DataFusion may answer a query such as `count(*)` from exact values alone, so a scan without
    /// filters fails if it reads another number of rows than the exact one that is declared for the
    /// partition, or for a table of one partition. Other values are not checked.
    fn statistics(&self, partition: Option<usize>) -> Statistics {
        let _ = partition;
        Statistics::new_unknown(&self.schema())
    }

    /// Returns how the source would apply a filter, whose columns are the table's. By default, not
    /// at all.
    ///
    /// - `Exact`: a scan returns only rows for which the filter is true, and no other node
    ///   evaluates it.
    /// - `Inexact`: a scan may leave out rows for which it is not true, and a filter above removes
    ///   the others.
    ///
    /// The same question is asked more than once while a query is planned, and must always get the
    /// same answer. Joins and TopK ask about a
    /// [`DynamicFilterPhysicalExpr`](datafusion_physical_expr::expressions::DynamicFilterPhysicalExpr),
    /// whose `current()` may become stricter while the scan runs; they need no exact answer.
    fn supports_filter(&self, filter: &Arc<dyn PhysicalExpr>) -> TableProviderFilterPushDown {
        let _ = filter;
        TableProviderFilterPushDown::Unsupported
    }

    /// Returns the source with the rows that it has now, if they may change: each scan keeps what
    /// this returns from its planning on, so that its partitions and statistics belong together. By
    /// default `None`: the rows do not change, or the source sees to it itself.
    fn snapshot(&self) -> Option<Arc<dyn DeviceSource>> {
        None
    }

    /// Starts the scan of a partition. It is called on a thread of the runtime, so it must not
    /// block:
    /// [`ScanRequest::stream_later`] makes a stream of a future, and
    /// [`into_stream`](arrow_device::DeviceRecordBatchReader::into_stream) reads a blocking reader on a thread of its own.
    ///
    /// The batches are on [`request.device`](ScanRequest::device). They have either the schema of
    /// the request or that of the table, from which the scan then takes the columns that were asked
    /// for. The scan also cuts off rows beyond the limit, and drops the stream as soon as it has
    /// enough. Applying exact filters is up to the source.
    ///
    /// # Errors
    /// Returns an error if the partition cannot be started. An error from the stream fails the
    /// query.
    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream>;

    /// Returns whether rows can be inserted in this way. By default, in none, and `INSERT` is
    /// refused when it is planned.
    fn supports_insert(&self, op: InsertOp) -> bool {
        let _ = op;
        false
    }

    /// Starts an `INSERT`. Like [`open`](Self::open), it must not block.
    ///
    /// # Errors
    /// Returns an error if no rows can be inserted now. By default, [`Error::NotSupported`].
    fn insert(&self, request: InsertRequest) -> arrow_device::Result<Box<dyn DeviceSink>> {
        Err(Error::NotSupported {
            device: request.device.id(),
            operation: "INSERT INTO a DeviceTable",
            reason: "its source takes no rows".into(),
        })
    }
}

/// What a scan asks of a [`DeviceSource`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ScanRequest {
    /// The number of the partition.
    pub partition: usize,
    /// The device that the batches must be on, opened for this partition.
    pub device: Device,
    /// The columns to return, as indices into the table's schema in the order of the output.
    /// `None`: all, in their order.
    pub projection: Option<Arc<[usize]>>,
    /// The filters that the source supports, over the table's columns, whether they are returned or
    /// not. All of them must be true.
    pub filters: Vec<Arc<dyn PhysicalExpr>>,
    /// The most rows that are needed of this partition, after the filters. `None`: all.
    pub fetch: Option<usize>,
    /// The task that runs the scan.
    pub context: Arc<TaskContext>,
    pub(super) schema: SchemaRef,
    pub(super) table: SchemaRef,
}

impl ScanRequest {
    /// Returns the schema of the columns to return.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Checks that batches of `schema` can be made the scan's, and returns whether all columns are
    /// in them, of which the scan takes those that were asked for.
    pub(super) fn is_whole(&self, schema: &SchemaRef) -> arrow_device::Result<bool> {
        if schema.fields() == self.schema.fields() {
            return Ok(false);
        }
        if schema.fields() == self.table.fields() {
            return Ok(true);
        }
        let whole = match self.projection {
            Some(_) => format!(" or the whole table's, {}", self.table),
            None => String::new(),
        };
        let expected = format!("expected={}{whole}", self.schema);
        Err(self.returned(format!(
            "a batch or stream of another schema: {expected} found={schema}"
        )))
    }

    /// The error of a source that returned something else.
    pub(super) fn returned(&self, what: String) -> Error {
        let (device, partition) = (&self.device, self.partition);
        let what = format!("DeviceScanExec on {device}: partition {partition} returned {what}");
        Error::InvalidArgument(what.into())
    }

    pub(super) fn device_type(&self) -> ArrowDeviceType {
        self.device.id().device_type
    }
}

/// What an `INSERT` asks of a [`DeviceSource`](crate::DeviceSource).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct InsertRequest {
    /// Whether the rows are added to those of the table, or replace all or some of them.
    pub op: InsertOp,
    /// The device that the batches will be on, which the source's description fits.
    pub device: Device,
    /// The task that runs the statement.
    pub context: Arc<TaskContext>,
}

/// Takes the rows of one `INSERT`.
///
/// Nothing of them may be visible to scans before [`commit`](Self::commit), and all of them after
/// it. A sink that is dropped without it, after an error or because the query was cancelled, leaves
/// the table as it was. The methods run on tasks of the runtime, so they must not block.
#[async_trait]
pub trait DeviceSink: Send {
    /// Takes a batch, which has the table's schema and is on [`InsertRequest::device`]. The work
    /// that fills it may not be done yet.
    ///
    /// # Errors
    /// Returns an error if the rows cannot be written, which ends the statement.
    async fn write(&mut self, batch: DeviceRecordBatch) -> arrow_device::Result<()>;

    /// Makes all rows visible to the scans that are planned from now on.
    ///
    /// # Errors
    /// Returns an error if the rows could not be added. None of them are.
    async fn commit(self: Box<Self>) -> arrow_device::Result<()>;
}
