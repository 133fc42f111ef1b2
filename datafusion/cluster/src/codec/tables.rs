//! [`DeviceTables`]: the tables that plans of other processes read by name.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::DeviceTable;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;

type Open = dyn Fn(&str) -> Result<Option<DeviceTable>> + Send + Sync;

/// The tables on devices that this process has, by the names that plans of other processes use ([`DeviceTable::with_name`]). A worker
/// has them as an extension of its session's configuration; a scheduler that plans queries over such tables has them, too.
///
/// A table's closures, readers and batches cannot travel. So a plan carries the name, and each worker reads its own table of this name. It
/// must have the same schema, partitions and orders as the one that the query was planned with, which is checked, and should have the same rows,
/// which cannot be.
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device::Devices;
/// # use arrow_device_datafusion::DeviceTable;
/// use arrow_device_cluster::codec::DeviceTables;
/// use datafusion::prelude::SessionConfig;
/// # use datafusion::arrow::array::{Int64Array, RecordBatch};
/// # let batch = RecordBatch::try_from_iter([("a", Arc::new(Int64Array::from(vec![1, 2])) as _)])?;
/// # let batch = Devices::cpu().upload(&batch)?;
/// # let orders = DeviceTable::from_batches(batch.schema(), Devices::cpu(), vec![vec![batch]])?;
/// let tables = DeviceTables::of([("orders", orders)]);
/// let config = SessionConfig::new().with_extension(Arc::new(tables));
/// # let _ = config;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct DeviceTables(Arc<Open>);

impl DeviceTables {
    /// Makes the tables of a function, which returns `None` for a name that it does not know. It is called for each scan of each
    /// task, on a thread of the runtime, so it should be quick.
    pub fn new(open: impl Fn(&str) -> Result<Option<DeviceTable>> + Send + Sync + 'static) -> Self {
        Self(Arc::new(open))
    }

    /// Makes the tables of a list. Of two with the same name, the last counts.
    pub fn of<N: Into<String>>(tables: impl IntoIterator<Item = (N, DeviceTable)>) -> Self {
        let tables = tables.into_iter().map(|(name, table)| (name.into(), table));
        let tables: HashMap<String, DeviceTable> = tables.collect();
        Self::new(move |name| Ok(tables.get(name).cloned()))
    }

    /// Returns the table of a name, which is then also [`DeviceTable::name`].
    ///
    /// # Errors
    /// Returns [`DataFusionError::Plan`] if there is none; otherwise the function's error.
    pub fn table(&self, name: &str) -> Result<DeviceTable> {
        match (self.0)(name)? {
            Some(table) => Ok(table.with_name(name)),
            None => Err(absent(name, "its DeviceTables have no table of this name")),
        }
    }

    /// Returns the table of a name in a task's session.
    pub(super) fn table_of_task(context: &TaskContext, name: &str) -> Result<DeviceTable> {
        let tables = context.session_config().get_extension::<Self>();
        let tables = tables.ok_or_else(|| {
            let reason = "its session configuration has no DeviceTables; add them with SessionConfig::with_extension";
            absent(name, reason)
        });
        tables?.table(name)
    }
}

fn absent(name: &str, reason: &str) -> DataFusionError {
    DataFusionError::Plan(format!(
        "a plan reads the DeviceTable {name:?}, which this process does not have: {reason}"
    ))
}

impl fmt::Debug for DeviceTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceTables")
    }
}
