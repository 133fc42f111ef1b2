//! [`DeviceSink`]: rows on their way into a source.

use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch, Result};
use async_trait::async_trait;
use datafusion_execution::TaskContext;
use datafusion_expr::dml::InsertOp;

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
    async fn write(&mut self, batch: DeviceRecordBatch) -> Result<()>;

    /// Makes all rows visible to the scans that are planned from now on.
    ///
    /// # Errors
    /// Returns an error if the rows could not be added. None of them are.
    async fn commit(self: Box<Self>) -> Result<()>;
}
