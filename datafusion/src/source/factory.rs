//! [`DeviceTableFactory`]: tables that SQL creates.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arrow_schema::{Schema, SchemaRef};
use async_trait::async_trait;
use datafusion_catalog::{Session, TableProvider, TableProviderFactory};
use datafusion_common::{DataFusionError, Result};
use datafusion_expr::CreateExternalTable;
use datafusion_expr::execution_props::ExecutionProps;
use datafusion_physical_expr::{EquivalenceProperties, LexOrdering, create_lex_ordering};

use super::contract::DeviceSource;
use super::table::DeviceTable;
use crate::metrics::to_datafusion;
use crate::spec::DeviceSpec;

/// Makes the sources of tables that are created with `CREATE EXTERNAL TABLE`. See
/// [`DeviceTableFactory`].
#[async_trait]
pub trait DeviceSourceFactory: fmt::Debug + Send + Sync {
    /// Makes the source of a new table, whose batches are on [`NewDeviceTable::device`].
    ///
    /// The source declares what the statement declares: columns (if it names any), `WITH ORDER`,
    /// constraints and `UNBOUNDED`. Nothing that was written is ignored: a statement that declares
    /// what the source does not is refused, and so are options that this function has not taken.
    ///
    /// # Errors
    /// Returns an error if the table cannot be created.
    async fn create(
        &self,
        state: &dyn Session,
        table: &mut NewDeviceTable<'_>,
    ) -> Result<Arc<dyn DeviceSource>>;
}

/// A `CREATE EXTERNAL TABLE` statement of a table on a device.
#[derive(Debug)]
pub struct NewDeviceTable<'a> {
    command: &'a CreateExternalTable,
    device: DeviceSpec,
    options: BTreeMap<String, String>,
}

impl NewDeviceTable<'_> {
    /// Returns the statement: name, columns, locations, constraints. Its options are taken with
    /// [`take_option`](Self::take_option).
    pub fn command(&self) -> &CreateExternalTable {
        self.command
    }

    /// Returns which device the table is to be on: the one of the option `device`, or the
    /// factory's.
    pub fn device(&self) -> &DeviceSpec {
        &self.device
    }

    /// Returns the value of an option, and marks it as known. Names are in lower case.
    pub fn take_option(&mut self, name: &str) -> Option<String> {
        self.options.remove(name)
    }

    /// Returns the orders that `WITH ORDER` declares, over the columns of a schema.
    ///
    /// # Errors
    /// Returns an error for a column that the schema does not have.
    pub fn orderings(&self, schema: &SchemaRef) -> Result<Vec<LexOrdering>> {
        create_lex_ordering(schema, &self.command.order_exprs, &ExecutionProps::new())
    }

    fn refused(&self, why: impl fmt::Display) -> DataFusionError {
        let (name, stored_as) = (&self.command.name, &self.command.file_type);
        DataFusionError::Plan(format!(
            "CREATE EXTERNAL TABLE {name} STORED AS {stored_as}: {why}"
        ))
    }

    /// Checks that nothing in the statement has been ignored.
    fn check(&self, source: &dyn DeviceSource) -> Result<()> {
        if !self.options.is_empty() {
            let names: Vec<_> = self.options.keys().map(String::as_str).collect();
            let names = names.join(", ");
            return Err(self.refused(format!("unknown options: {names}")));
        }
        let (schema, columns): (_, &Schema) = (source.schema(), self.command.schema.as_arrow());
        if !columns.fields().is_empty() && columns.fields() != schema.fields() {
            return Err(self.refused(format!(
                "the columns are not those of its source: declared={columns} found={schema}"
            )));
        }
        let (wanted, found) = (&self.device, source.device());
        let same_id = wanted.id().is_none_or(|id| found.id() == Some(id));
        if wanted.device_type() != found.device_type() || !same_id {
            return Err(self.refused(format!("its source is on {found}, not on {wanted}")));
        }
        let known = EquivalenceProperties::new_with_orderings(schema.clone(), source.orderings());
        for order in self.orderings(&schema)? {
            if !known.ordering_satisfy(order.clone())? {
                return Err(self.refused(format!("its source does not have the order [{order}]")));
            }
        }
        let has = |constraint| {
            source
                .constraints()
                .is_some_and(|c| c.iter().any(|own| own == constraint))
        };
        if !self.command.constraints.iter().all(has) {
            return Err(self.refused("its source does not declare the constraints"));
        }
        if self.command.unbounded != source.boundedness().is_unbounded() {
            return Err(self.refused(match self.command.unbounded {
                true => "its source ends, and the table is declared as unbounded",
                false => {
                    "its source never ends; CREATE UNBOUNDED EXTERNAL TABLE declares such a table"
                }
            }));
        }
        if !self.command.table_partition_cols.is_empty() {
            return Err(self.refused("PARTITIONED BY is not supported"));
        }
        Ok(())
    }
}

/// Creates tables on a device for `CREATE EXTERNAL TABLE t STORED AS name ...`, with sources that a
/// [`DeviceSourceFactory`] makes.
///
/// Every such statement may have the option `device`, as in `OPTIONS ('device' 'cuda:1')`, in the
/// form that [`DeviceSpec`] parses.
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device_datafusion::{DeviceSource, DeviceSourceFactory, DeviceTableFactory, NewDeviceTable};
/// # use async_trait::async_trait;
/// # use datafusion::{catalog::Session, error::Result, execution::SessionStateBuilder};
/// # #[derive(Debug)]
/// # struct MyFormat;
/// # #[async_trait]
/// # impl DeviceSourceFactory for MyFormat {
/// #     async fn create(&self, _: &dyn Session, _: &mut NewDeviceTable<'_>) -> Result<Arc<dyn DeviceSource>> {
/// #         Err(datafusion::error::DataFusionError::NotImplemented("an example".into()))
/// #     }
/// # }
/// let factory = DeviceTableFactory::new(Arc::new(MyFormat)).with_device("cuda".parse()?);
/// let mut state = SessionStateBuilder::new().with_default_features().build();
/// state.table_factories_mut().insert("MYFORMAT".into(), Arc::new(factory));
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceTableFactory {
    sources: Arc<dyn DeviceSourceFactory>,
    device: Option<DeviceSpec>,
}

impl DeviceTableFactory {
    /// Makes a factory of tables that name their device.
    pub fn new(sources: Arc<dyn DeviceSourceFactory>) -> Self {
        Self {
            sources,
            device: None,
        }
    }

    /// Sets the device of tables that name none.
    pub fn with_device(mut self, device: DeviceSpec) -> Self {
        self.device = Some(device);
        self
    }
}

#[async_trait]
impl TableProviderFactory for DeviceTableFactory {
    async fn create(
        &self,
        state: &dyn Session,
        command: &CreateExternalTable,
    ) -> Result<Arc<dyn TableProvider>> {
        // DataFusion puts this before a name without a dot.
        let name = |key: &String| key.strip_prefix("format.").unwrap_or(key).to_owned();
        let options = command.options.iter().map(|(k, v)| (name(k), v.clone()));
        let mut table = NewDeviceTable {
            command,
            device: DeviceSpec::any(arrow_device::ArrowDeviceType::CPU),
            options: options.collect(),
        };
        table.device = match (table.take_option("device"), &self.device) {
            (Some(text), _) => text.parse().map_err(|e| table.refused(e))?,
            (None, Some(device)) => device.clone(),
            (None, None) => {
                let why = "no device is named; add OPTIONS ('device' 'cuda'), for example";
                return Err(table.refused(why));
            }
        };
        let source = self.sources.create(state, &mut table).await?;
        table.check(&*source)?;
        let table = DeviceTable::new(source).map_err(to_datafusion)?;
        let defaults = command.column_defaults.clone();
        Ok(Arc::new(table.with_column_defaults(defaults)))
    }
}
