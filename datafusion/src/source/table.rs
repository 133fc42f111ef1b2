//! [`DeviceTable`]: a table whose batches are on a device.

use std::any::Any;
use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{Device, DeviceRecordBatch, DeviceRecordBatchReader, Error};
use arrow_schema::SchemaRef;
use async_trait::async_trait;
use datafusion_catalog::{Session, TableProvider};
use datafusion_common::{
    Constraints, DFSchema, DataFusionError, Result, Statistics, not_impl_datafusion_err,
};
use datafusion_expr::dml::InsertOp;
use datafusion_expr::execution_props::ExecutionProps;
use datafusion_expr::expr_rewriter::unnormalize_col;
use datafusion_expr::physical_planning_context::PhysicalPlanningContext;
use datafusion_expr::{Expr, TableProviderFilterPushDown, TableType};
use datafusion_physical_expr::{PhysicalExpr, create_physical_expr};
use datafusion_physical_plan::ExecutionPlan;
use futures::Stream;

use super::batches::Memory;
use super::contract::{DeviceSource, ScanRequest};
use super::declared::check;
use super::insert::DeviceInsertExec;
use super::scan::DeviceScanExec;
use super::streams::StreamSource;
use crate::exec::DeviceExec;
use crate::metrics::to_datafusion;
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;

/// A table whose batches are on a device.
///
/// A [`DeviceSource`] says what is known of the rows and opens streams of them. The columns,
/// filters and limit of a query reach it, so that it reads no more than the query needs. What it
/// returns beyond that is never moved: the rest is downloaded for nodes on the host, or stays on the device for a device operator.
///
/// For `CREATE EXTERNAL TABLE`, DataFusion's `TableProviderFactory` makes them:
///
/// ```
/// # use std::sync::Arc;
/// use arrow_device_datafusion::{DeviceSpec, DeviceTable, to_datafusion};
/// # use arrow_device_datafusion::DeviceSource;
/// use datafusion::catalog::{Session, TableProvider, TableProviderFactory};
/// # use datafusion::{error::{DataFusionError, Result}, execution::SessionStateBuilder, logical_expr::CreateExternalTable, prelude::SessionContext};
/// # fn my_source(_: &str, _: DeviceSpec) -> Result<Arc<dyn DeviceSource>> {
/// #     let batch = arrow_array::record_batch!(("a", Int64, [1, 2]))?;
/// #     let device = arrow_device::Devices::cpu();
/// #     let up = device.upload(&batch).map_err(to_datafusion)?;
/// #     let table = DeviceTable::from_batches(batch.schema(), device, vec![vec![up]]);
/// #     Ok(table.map_err(to_datafusion)?.source().clone())
/// # }
/// #[derive(Debug)]
/// struct MyFormat;
///
/// #[async_trait::async_trait]
/// impl TableProviderFactory for MyFormat {
///     async fn create(&self, _: &dyn Session, table: &CreateExternalTable) -> Result<Arc<dyn TableProvider>> {
///         let device = table.options.get("format.device").map_or("cuda", String::as_str); // in OPTIONS ('device' 'cuda:1')
///         let device: DeviceSpec = device.parse().map_err(to_datafusion)?;
///         let source = my_source(&table.locations[0], device)?; // a `DeviceSource` of the file
///         let made = DeviceTable::new(source).map_err(to_datafusion)?;
///         Ok(Arc::new(made.with_column_defaults(table.column_defaults.clone())))
///     }
/// }
///
/// # #[tokio::main]
/// # async fn main() -> Result<()> {
/// let mut state = SessionStateBuilder::new().with_default_features().build();
/// state.table_factories_mut().insert("MINE".into(), Arc::new(MyFormat));
/// # let context = SessionContext::new_with_state(state);
/// # context.sql("CREATE EXTERNAL TABLE t STORED AS MINE LOCATION 'a.mine' OPTIONS ('device' 'cpu')").await?;
/// # assert_eq!(context.sql("SELECT a FROM t").await?.count().await?, 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceTable {
    source: Arc<dyn DeviceSource>,
    /// What other processes call it.
    name: Option<Arc<str>>,
    defaults: HashMap<String, Expr>,
}

impl DeviceTable {
    /// Makes the table of a source.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](arrow_device::Error::InvalidArgument) if what the source
    /// declares does not fit its schema.
    pub fn new(source: Arc<dyn DeviceSource>) -> arrow_device::Result<Self> {
        check(&*source)?;
        Ok(Self::of(source))
    }

    fn of(source: Arc<dyn DeviceSource>) -> Self {
        Self {
            source,
            name: None,
            defaults: HashMap::new(),
        }
    }

    /// Makes a table of readers, for example of foreign C streams. `open` makes a reader for each
    /// partition of each scan, on the thread that starts the query, and a thread of its own reads
    /// it, one batch ahead.
    /// [`DeviceSource::open`] says which columns and rows a reader must return.
    pub fn from_readers<R: DeviceRecordBatchReader + Send + 'static>(
        schema: SchemaRef,
        device: impl Into<DeviceSpec>,
        partitions: usize,
        open: impl Fn(ScanRequest) -> arrow_device::Result<R> + Send + Sync + 'static,
    ) -> Self {
        let open = move |request| -> arrow_device::Result<SendableDeviceStream> {
            Ok(Box::pin(open(request)?.into_stream(1)?))
        };
        Self::of(StreamSource::shared(schema, device, partitions, open))
    }

    /// Makes a table of streams. `open` makes a future of the stream for each partition of each
    /// scan. It runs on the task that polls the scan, and not before the first poll, so no thread
    /// waits for it. [`DeviceSource::open`] says which columns and rows a stream must return.
    ///
    /// ```
    /// # use arrow_device::Devices;
    /// # use arrow_device::DeviceRecordBatches;
    /// # use arrow_device_datafusion::DeviceTable;
    /// # let batch = Devices::cpu().upload(&arrow_array::record_batch!(("a", Int64, [1, 2]))?)?;
    /// # let (schema, device) = (batch.schema(), Devices::cpu());
    /// let of = schema.clone();
    /// let table = DeviceTable::from_streams(schema, device, 4, move |request| {
    ///     let (schema, batch) = (of.clone(), batch.clone());
    ///     async move {
    ///         // Open a file, ask a server ...
    ///         let device_type = request.device.id().device_type;
    ///         let batches = futures::stream::iter([Ok(batch)]);
    ///         Ok(DeviceRecordBatches::from_stream(batches, schema, device_type))
    ///     }
    /// });
    /// # let _ = table;
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    pub fn from_streams<S, F>(
        schema: SchemaRef,
        device: impl Into<DeviceSpec>,
        partitions: usize,
        open: impl Fn(ScanRequest) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = arrow_device::Result<S>> + Send + 'static,
        S: DeviceRecordBatchStream
            + Stream<Item = arrow_device::Result<DeviceRecordBatch>>
            + Send
            + 'static,
    {
        let open = move |request: ScanRequest| Ok(request.stream_later(open(request.clone())));
        Self::of(StreamSource::shared(schema, device, partitions, open))
    }

    /// Makes a table that this process only plans with. Other processes have the rows, and find them by the name: see
    /// [`with_name`](Self::with_name). So the planner of a distributed engine needs no device and no data. A scan that
    /// runs in this process fails.
    pub fn declared(
        name: impl Into<Arc<str>>,
        schema: SchemaRef,
        device: impl Into<DeviceSpec>,
        partitions: usize,
    ) -> Self {
        let name = name.into();
        let own = name.clone();
        let open = move |request: ScanRequest| {
            Err(Error::NotSupported {
                device: request.device.id(),
                operation: "scan of a DeviceTable",
                reason: format!(
                    "this process has only declared the table {own:?}, to plan with it, and its rows are elsewhere; but the engine runs \
                     this part of the plan here"
                )
                .into(),
            })
        };
        Self::of(StreamSource::shared(schema, device, partitions, open)).with_name(name)
    }

    /// Makes a table of batches. Those of a partition keep their order, and the number of rows is
    /// known.
    ///
    /// `INSERT INTO` adds its batches to the partitions in turn, and `INSERT OVERWRITE` replaces
    /// all rows. `UPDATE` and `DELETE` bring all rows to the host and the rest up again, while the
    /// statement is planned, as for DataFusion's `MemTable`. A query reads the rows that the table
    /// had when the query was planned; what it reads stays in memory until it ends.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](arrow_device::Error::InvalidArgument) for a batch on
    /// another device, and for one whose rows do not fit the schema, as
    /// [`with_schema`](DeviceRecordBatch::with_schema) has it.
    pub fn from_batches(
        schema: SchemaRef,
        device: Device,
        partitions: Vec<Vec<DeviceRecordBatch>>,
    ) -> arrow_device::Result<Self> {
        let source = Memory::new(schema, &device, partitions)?;
        Ok(Self::of(Arc::new(source)))
    }

    /// Sets the name by which other processes know the table, so that plans that read it can run there. A plan that travels
    /// carries the name, and whoever runs it reads its own table of this name, which has the same schema and partitions. Without a
    /// name, plans with the table stay in this process. SQL does not use this name.
    pub fn with_name(mut self, name: impl Into<Arc<str>>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets what `INSERT` puts into columns that it does not name, instead of null, by the names of the columns.
    pub fn with_column_defaults(mut self, defaults: HashMap<String, Expr>) -> Self {
        self.defaults = defaults;
        self
    }

    /// Returns the name by which other processes know the table, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the source.
    pub fn source(&self) -> &Arc<dyn DeviceSource> {
        &self.source
    }

    /// Returns the operator that reads the table: these columns, and at most `fetch` rows of each
    /// partition.
    ///
    /// # Errors
    /// Returns an error for a column that does not exist, and if what the source declares does not
    /// fit its schema.
    pub fn scan_on_device(
        &self,
        projection: Option<&[usize]>,
        fetch: Option<usize>,
    ) -> Result<DeviceScanExec> {
        let source = self.source.snapshot();
        let source = source.unwrap_or_else(|| self.source.clone());
        check(&*source).map_err(to_datafusion)?;
        DeviceScanExec::new(source, self.name.clone(), projection, fetch)
    }

    /// Says that the rows cannot be changed in this way.
    fn refused(&self, what: &str) -> DataFusionError {
        let device = self.source.device();
        not_impl_datafusion_err!(
            "the source of this DeviceTable on {device} does not support {what}"
        )
    }

    /// Returns the table of batches, for a statement that changes its rows.
    fn memory(&self, what: &str) -> Result<&Memory> {
        let source: &dyn Any = &*self.source;
        source.downcast_ref().ok_or_else(|| self.refused(what))
    }

    /// Returns the node that inserts the rows of `input` into the table, as an `INSERT` statement does.
    ///
    /// # Errors
    /// Returns [`DataFusionError::NotImplemented`] if the source does not support the operation, and [`DataFusionError::Plan`] if the types of the rows are not the table's.
    pub fn insert_on_device(
        &self,
        input: Arc<dyn ExecutionPlan>,
        op: InsertOp,
    ) -> Result<DeviceInsertExec> {
        if !self.source.supports_insert(op) {
            return Err(self.refused(&op.to_string()));
        }
        DeviceInsertExec::new(input, self.source.clone(), self.name.clone(), op)
    }
}

#[async_trait]
impl TableProvider for DeviceTable {
    fn schema(&self) -> SchemaRef {
        self.source.schema()
    }

    fn constraints(&self) -> Option<&Constraints> {
        self.source.constraints()
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        state: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let (schema, properties) = (self.schema(), state.execution_props());
        let filters = filters
            .iter()
            .map(|filter| over_table(filter, &schema, properties));
        let scan = self.scan_on_device(projection.map(Vec::as_slice), limit)?;
        let scan = scan.with_filters(filters.collect::<Result<_>>()?)?;
        Ok(Arc::new(DeviceExec::from(scan)))
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> Result<Vec<TableProviderFilterPushDown>> {
        let (schema, properties) = (self.schema(), ExecutionProps::new());
        let supported = |filter: &&Expr| match over_table(filter, &schema, &properties) {
            Ok(filter) => self.source.supports_filter(&filter),
            // The plan's own filter evaluates it, or reports why it cannot.
            Err(_) => TableProviderFilterPushDown::Unsupported,
        };
        Ok(filters.iter().map(supported).collect())
    }

    async fn insert_into(
        &self,
        _: &dyn Session,
        input: Arc<dyn ExecutionPlan>,
        op: InsertOp,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(self.insert_on_device(input, op)?))
    }

    async fn delete_from(
        &self,
        state: &dyn Session,
        filters: Vec<Expr>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let memory = self.memory("DELETE FROM")?;
        memory.change(state, None, filters).await
    }

    async fn update(
        &self,
        state: &dyn Session,
        assignments: Vec<(String, Expr)>,
        filters: Vec<Expr>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let memory = self.memory("UPDATE")?;
        memory.change(state, Some(assignments), filters).await
    }

    fn get_column_default(&self, column: &str) -> Option<&Expr> {
        self.defaults.get(column)
    }

    fn statistics(&self) -> Option<Statistics> {
        Some(self.source.statistics(None))
    }
}

/// The filter over the table's columns.
fn over_table(
    filter: &Expr,
    schema: &SchemaRef,
    properties: &ExecutionProps,
) -> Result<Arc<dyn PhysicalExpr>> {
    let filter = unnormalize_col(filter.clone());
    let schema = DFSchema::try_from(schema.clone())?;
    let planning = PhysicalPlanningContext::default();
    create_physical_expr(&filter, &schema, properties, &planning)
}
