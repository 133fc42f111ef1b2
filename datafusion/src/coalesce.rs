//! [`DeviceCoalesceBatchesExec`]: small batches made larger.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use arrow_device::{Device, DeviceArray, DeviceId, DeviceRecordBatch, Error, Queue};
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::stream::try_unfold;
use tokio::runtime::Handle;

use super::memory::DeviceReservation;
use super::metrics::{from_datafusion, on_blocking_thread};
use super::operator::{DeviceOperator, DeviceTask};
use super::spec::DeviceSpec;
use super::stream::{Item, SendableDeviceStream, device_stream};
use super::timer::Patience;
use super::transitions::to_host::passing;
use super::upload::can_join;

/// The bytes from which on batches wait no longer: larger ones gain nothing.
const MAX_JOINED: usize = 16 << 20;

/// The operator that joins small batches on a device, such as those that a filter leaves: the operators above run fewer
/// kernels, and a download has fewer batches.
///
/// Batches of fewer than half of `rows` rows are joined until there are at least `rows` rows or 16 MiB, or until the input ends
/// or a larger batch comes. Rows keep their order. Joining copies them once, on the device, to one allocation for each batch that
/// is made; see [`DeviceRecordBatch::concat`] for what else it does. The memory of batches that wait is reserved in the device's
/// pool.
///
/// Larger batches, those that keep 16 MiB or more alive, and one that has no neighbour to join, are passed on as they are; batches
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
        let (device, name) = (task.device, self.name());
        let memory = DeviceReservation::new(task.context, name, task.partition, device);
        let joined = Joined {
            stream,
            schema: schema.clone(),
            device: device.clone(),
            memory: Arc::new(memory),
            queue: None,
            runtime,
            rows: self.rows,
            patience: Patience::new(task.target.patience),
            after: None,
        };
        let batches = try_unfold(joined, |mut joined| async move {
            let next = joined.next().await?;
            Ok(next.map(|batch| (batch, joined)))
        });
        Ok(device_stream(batches, schema, device_type))
    }
}

struct Joined {
    stream: SendableDeviceStream,
    schema: SchemaRef,
    device: Device,
    /// The memory of the batches that wait, or are being joined.
    memory: Arc<DeviceReservation>,
    /// Made for the first join.
    queue: Option<Queue>,
    runtime: Handle,
    rows: usize,
    patience: Patience,
    /// What comes after the batches that have been joined.
    after: Option<Item>,
}

impl Joined {
    async fn next(&mut self) -> Result<Option<DeviceRecordBatch>, Error> {
        let mut small = Vec::new();
        let (mut waiting, mut kept) = (0, 0);
        while self.after.is_none() && waiting < self.rows && kept < MAX_JOINED {
            let Some(next) = self.poll_next(small.is_empty()).await else {
                break;
            };
            let batch = match next {
                Ok(batch) => batch,
                Err(e) => {
                    self.after = Some(Err(e));
                    break;
                }
            };
            // A slice counts as what it keeps alive.
            let (rows, bytes) = (batch.num_rows(), batch.get_array_memory_size());
            if rows >= self.rows / 2 || bytes >= MAX_JOINED {
                self.after = Some(Ok(batch)).filter(|_| rows > 0);
            } else if rows > 0 {
                self.memory.grow(bytes).map_err(from_datafusion)?;
                if small.is_empty() {
                    self.patience.begin();
                }
                (waiting, kept) = (waiting + rows, kept + bytes);
                small.push(batch);
            }
        }
        if small.is_empty() {
            return self.after.take().transpose();
        }
        let joined = self.join(small).await;
        self.memory.shrink(usize::MAX);
        joined.map(Some)
    }

    /// The next batch; `None` at the end, or if others have waited for it long enough.
    async fn poll_next(&mut self, alone: bool) -> Option<Item> {
        poll_fn(|cx| match self.stream.as_mut().poll_next(cx) {
            Poll::Pending if !alone && self.patience.ends(cx.waker()) => Poll::Ready(None),
            next => next,
        })
        .await
    }

    /// Joins batches, on a blocking thread if the host waits for the device.
    async fn join(&mut self, mut small: Vec<DeviceRecordBatch>) -> Item {
        if small.len() == 1 {
            return Ok(small.remove(0));
        }
        let queue = match &self.queue {
            Some(queue) => queue,
            None => self.queue.insert(self.device.new_queue()?),
        };
        if !waits(&small, &self.device) {
            return DeviceRecordBatch::concat(&self.schema, &small, queue);
        }
        let (schema, queue, memory) = (self.schema.clone(), queue.clone(), self.memory.clone());
        let join = move || {
            let joined = DeviceRecordBatch::concat(&schema, &small, &queue);
            // If the stream has been dropped, they were reserved until now.
            drop((small, memory));
            joined
        };
        let operation = "joining batches on a device after the end of the Tokio runtime";
        on_blocking_thread(&self.runtime, operation, join).await?
    }
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
