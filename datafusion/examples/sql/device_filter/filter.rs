//! The operator: keeps the rows that pass, and some of their columns. No value is copied to the host.

use std::future::ready;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceOperator, DeviceTask, SendableDeviceStream, to_datafusion};
use datafusion::error::Result;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::{StreamExt, TryStreamExt};

use super::cache::KernelCache;
use super::join::{Limits, join};
use super::select::{Filter, Running};

/// A filter with a projection on a device, in the place of DataFusion's.
#[derive(Debug)]
pub(crate) struct DeviceFilterExec {
    filter: Arc<Filter>,
    kernels: Arc<KernelCache>,
}

impl DeviceFilterExec {
    pub(crate) fn new(filter: Filter, kernels: Arc<KernelCache>) -> Self {
        let filter = Arc::new(filter);
        Self { filter, kernels }
    }
}

impl DeviceOperator for DeviceFilterExec {
    fn name(&self) -> &str {
        "DeviceFilterExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let limits = Limits {
            rows: task.context.session_config().batch_size(),
            fetch: task.node().fetch(),
            join: !task.node().boundedness().is_unbounded(),
        };
        let kernels = self.kernels.of(task.device).map_err(to_datafusion)?;
        // The node reserves for the next batch only, but batches wait for each other.
        let memory = task.reservation();
        let running = Running::start(self.filter.clone(), kernels, task.device, memory);
        let running = Arc::new(running.map_err(to_datafusion)?);
        let select = running.clone();
        let selected = task
            .input(0)?
            .try_filter(|batch| ready(batch.num_rows() > 0))
            .map(move |batch| batch.and_then(|batch| select.select(&batch)))
            // The number of rows that pass is known once the kernels have run. The task waits for it without blocking its
            // thread, and the next batch's kernels are queued meanwhile.
            .map(|selected| async { selected?.await })
            .buffered(2);
        Ok(task.stream(join(running, selected.boxed(), limits)))
    }

    /// It joins them itself.
    fn has_small_batches(&self, _: &dyn ExecutionPlan) -> bool {
        false
    }
}
