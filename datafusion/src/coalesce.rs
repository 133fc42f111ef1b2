//! [`DeviceCoalesceBatchesExec`]: small batches made larger.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_device::{Device, DeviceArray, DeviceId, DeviceRecordBatch, Error, Queue, TransferStats};
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::stream::poll_fn;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::memory::DeviceReservation;
use super::metrics::{add_elsewhere, from_blocking, from_datafusion};
use super::operator::{DeviceOperator, DeviceTask};
use super::spec::DeviceSpec;
use super::stream::{Item, SendableDeviceStream, device_stream};
use super::transitions::to_host::passing;
use super::upload::can_join;

/// The bytes from which on batches wait no longer: larger ones gain nothing.
const MAX_JOINED: usize = 16 << 20;

/// The operator that joins small batches on a device, such as those that a filter leaves: the operators above run fewer
/// kernels, and a download has fewer batches.
///
/// Batches of fewer than half of `rows` rows are joined until there are at least `rows` rows or 16 MiB, or until the input ends
/// or a larger batch comes. Rows keep their order. Joining copies them once, on the device, to one allocation for each batch that
/// is made; see [`DeviceRecordBatch::concat`] for what else it does. The memory of batches that wait is reserved in the session's
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
        let mut joined = Joined {
            stream: Some(stream),
            schema: schema.clone(),
            device: task.device.clone(),
            memory: Arc::new(DeviceReservation::new(
                task.context,
                self.name(),
                task.partition,
                task.device,
            )),
            queue: None,
            runtime,
            joining: JoinSet::new(),
            rows: self.rows,
            small: Vec::new(),
            waiting: 0,
            bytes: 0,
            after: None,
        };
        Ok(device_stream(
            poll_fn(move |cx| joined.poll(cx)),
            schema,
            device_type,
        ))
    }
}

struct Joined {
    /// `None` once it has ended.
    stream: Option<SendableDeviceStream>,
    schema: SchemaRef,
    device: Device,
    /// The memory of the batches that wait, or are being joined.
    memory: Arc<DeviceReservation>,
    /// Made for the first join.
    queue: Option<Queue>,
    runtime: Handle,
    /// The join that waits for the device on a blocking thread, at most one.
    joining: JoinSet<(Item, TransferStats)>,
    rows: usize,
    /// Batches that wait for more.
    small: Vec<DeviceRecordBatch>,
    /// Their rows.
    waiting: usize,
    /// Their bytes, at least.
    bytes: usize,
    /// What comes after those.
    after: Option<Item>,
}

impl Joined {
    /// Keeps a small batch, and has others come after those that are kept.
    fn take(&mut self, batch: DeviceRecordBatch) -> Result<(), Error> {
        // A slice counts as what it keeps alive.
        let (rows, bytes) = (batch.num_rows(), batch.get_array_memory_size());
        if rows == 0 {
            return Ok(());
        }
        if rows >= self.rows / 2 || bytes >= MAX_JOINED {
            self.after = Some(Ok(batch));
            return Ok(());
        }
        self.memory.grow(bytes).map_err(from_datafusion)?;
        self.waiting += rows;
        self.bytes += bytes;
        self.small.push(batch);
        Ok(())
    }

    /// Whether those that wait are enough.
    fn is_full(&self) -> bool {
        self.waiting >= self.rows || self.bytes >= MAX_JOINED
    }

    /// One batch of those that wait; `None` if there is none.
    fn poll_join(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let joined = match self.joining.is_empty() {
            true => match self.join() {
                Ok(joined) => joined.map(Ok),
                Err(e) => Some(Err(e)),
            },
            false => None,
        };
        let joined = match ready!(self.joining.poll_join_next(cx)) {
            None => joined,
            Some(Ok((joined, counts))) => {
                add_elsewhere(&counts);
                Some(joined)
            }
            Some(Err(e)) => {
                let operation = "joining batches on a device after the end of the Tokio runtime";
                Some(Err(from_blocking(e, operation)))
            }
        };
        self.memory.shrink(usize::MAX);
        Poll::Ready(joined)
    }

    /// Joins the batches that wait, on a blocking thread if the host waits for the device.
    fn join(&mut self) -> Result<Option<DeviceRecordBatch>, Error> {
        (self.waiting, self.bytes) = (0, 0);
        let mut small = std::mem::take(&mut self.small);
        if small.len() < 2 {
            return Ok(small.pop());
        }
        let queue = match &self.queue {
            Some(queue) => queue,
            None => self.queue.insert(self.device.new_queue()?),
        };
        if !waits(&small, &self.device) {
            return DeviceRecordBatch::concat(&self.schema, &small, queue).map(Some);
        }
        let (schema, queue, memory) = (self.schema.clone(), queue.clone(), self.memory.clone());
        let join = move || {
            let join = || DeviceRecordBatch::concat(&schema, &small, &queue);
            let joined = TransferStats::scope(join);
            // If the stream has been dropped, they were reserved until now.
            drop((small, memory));
            joined
        };
        self.joining.spawn_blocking_on(join, &self.runtime);
        Ok(None)
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

impl Joined {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        loop {
            let is_joining = !self.joining.is_empty();
            if is_joining || self.after.is_some() || self.stream.is_none() || self.is_full() {
                if let Some(joined) = ready!(self.poll_join(cx)) {
                    return Poll::Ready(Some(joined));
                }
                if let Some(after) = self.after.take() {
                    return Poll::Ready(Some(after));
                }
            }
            let Some(stream) = &mut self.stream else {
                return Poll::Ready(None);
            };
            let taken = match ready!(stream.as_mut().poll_next(cx)) {
                Some(batch) => batch.and_then(|batch| self.take(batch)),
                None => {
                    self.stream = None;
                    Ok(())
                }
            };
            if let Err(e) = taken {
                self.stream = None;
                self.after = Some(Err(e));
            }
        }
    }
}
