//! [`DeviceCoalesceBatchesExec`]: small batches made larger.

use std::fmt;
use std::sync::Arc;

use arrow_device::{Device, DeviceArray, DeviceId, DeviceRecordBatch, Queue};
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::future::ready;
use futures::{StreamExt, TryStreamExt};
use tokio::runtime::Handle;

use super::joining::groups;
use super::memory::{DeviceReservation, Share};
use super::metrics::on_blocking_thread;
use super::plugin::{DeviceOperator, DeviceTask};
use super::spec::DeviceSpec;
use super::stream::{Item, SendableDeviceStream, device_stream};
use super::transfer::queue_of;
use super::transitions::to_host::passing;
use super::upload::can_join;

/// The most bytes of batches that are joined: larger ones gain nothing.
const MAX_JOINED: usize = 16 << 20;

/// The operator that joins small batches on a device, such as those that a filter leaves: the operators above run fewer
/// kernels, and a download has fewer batches.
///
/// Batches of fewer than half of `rows` rows are joined, to at most `rows` rows or 16 MiB, until the input ends, a larger batch
/// comes, or they have waited long enough. Rows keep their order. Joining copies them once, on the device, to one allocation for each batch that
/// is made; see [`DeviceRecordBatch::concat`] for what else it does. The memory of batches that wait is reserved in the device's
/// pool.
///
/// Larger batches, those that keep 8 MiB or more alive, and one that has no neighbour to join, are passed on as they are; batches
/// without rows are dropped. The batches of unbounded inputs are passed on, and so are those with dictionaries, run-end encoded
/// columns, unions or list views, whose join could fail.
#[derive(Clone, Debug)]
pub struct DeviceCoalesceBatchesExec {
    rows: usize,
}

impl DeviceCoalesceBatchesExec {
    /// Makes an operator whose batches have about `rows` rows: the session's `batch_size` is a good choice.
    pub fn new(rows: usize) -> Self {
        Self { rows }
    }

    /// Returns how many rows the batches are to have.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the node that joins the batches of `input` on a device.
    pub fn above(
        self,
        input: Arc<dyn ExecutionPlan>,
        device: impl Into<DeviceSpec>,
    ) -> Arc<dyn ExecutionPlan> {
        Arc::new(passing(input, device, self))
    }
}

impl DeviceOperator for DeviceCoalesceBatchesExec {
    fn name(&self) -> &str {
        "DeviceCoalesceBatchesExec"
    }

    fn describe(&self, _: &dyn ExecutionPlan, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ", rows={}", self.rows)
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let (stream, input) = (task.input(0)?, task.child(0)?);
        let (schema, device_type) = (stream.schema(), stream.device_type());
        let joins = schema.fields().iter().all(|f| can_join(f.data_type()));
        if !joins || input.boundedness().is_unbounded() {
            return Ok(stream);
        }
        let runtime = Handle::try_current().map_err(|e| {
            let name = self.name();
            DataFusionError::Execution(format!("{name} needs a Tokio runtime: {e}"))
        })?;
        let (device, name) = (task.device.clone(), self.name());
        let memory = DeviceReservation::new(task.context, name, task.partition, &device);
        let (memory, most) = (Arc::new(memory), (self.rows, MAX_JOINED));
        let filled = stream.try_filter(|batch| ready(batch.num_rows() > 0));
        let size = move |(batch, share): &mut Part| {
            // A slice counts as what it keeps alive.
            let (rows, bytes) = (batch.num_rows(), batch.get_array_memory_size());
            let small = rows < most.0 / 2 && bytes < most.1 / 2;
            *share = small.then(|| Share::new(&memory, bytes)).transpose()?;
            Ok(small.then_some((rows, bytes)))
        };
        let parts = filled.map_ok(|batch| (batch, None));
        let groups = groups(parts, most, task.target.patience, size);
        let (of, mut queue) = (schema.clone(), None);
        let joined = groups.then(move |parts| {
            let (schema, device, runtime) = (of.clone(), device.clone(), runtime.clone());
            let started = parts.and_then(|parts| {
                let several = parts.len() > 1;
                let queue = several.then(|| queue_of(&device, &mut queue));
                Ok((parts, queue.transpose()?))
            });
            async move {
                let (parts, queue) = started?;
                join(parts, schema, &device, queue, &runtime).await
            }
        });
        Ok(device_stream(joined, schema, device_type))
    }
}

/// A batch, and what is reserved for it while it waits or is being joined.
type Part = (DeviceRecordBatch, Option<Share>);

/// Joins batches, on a blocking thread if the host waits for the device. Without a queue there is one, which is returned.
async fn join(
    mut parts: Vec<Part>,
    schema: SchemaRef,
    device: &Device,
    queue: Option<Queue>,
    runtime: &Handle,
) -> Item {
    let Some(queue) = queue else {
        return Ok(parts.remove(0).0);
    };
    let (small, shares): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let waits = waits(&small, device);
    let join = move || {
        let joined = DeviceRecordBatch::concat(&schema, &small, &queue);
        // If the stream has been dropped, they were reserved until now.
        drop((small, shares));
        joined
    };
    if !waits {
        return join();
    }
    let operation = "joining batches on a device after the end of the Tokio runtime";
    on_blocking_thread(runtime, operation, join).await?
}

/// Whether the host waits for the device to join these batches.
fn waits(batches: &[DeviceRecordBatch], device: &Device) -> bool {
    let is_ready = |batch: &DeviceRecordBatch| batch.is_ready().unwrap_or(false);
    if device.is_host_readable() && !batches.iter().all(is_ready) {
        return true;
    }
    let is_fixed =
        |column: DeviceArray| column.data_type().is_primitive() && column.null_count() == Some(0);
    device.id() != DeviceId::CPU && !batches.iter().flat_map(|b| b.columns()).all(is_fixed)
}
