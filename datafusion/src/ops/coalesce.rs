//! [`DeviceCoalesceBatchesExec`]: small batches made larger.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceId, DeviceRecordBatch, Error, Queue, TransferStats,
};
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result, Statistics};
use datafusion_execution::TaskContext;
use datafusion_physical_plan::execution_plan::CardinalityEffect;
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties};
use futures_core::Stream;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::child::execute_child;
use crate::children::{only, the_same};
use crate::memory::DeviceReservation;
use crate::metrics::{add_elsewhere, from_blocking, from_datafusion};
use crate::plan::DevicePlan;
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;
use crate::upload::can_join;

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
    input: Arc<dyn ExecutionPlan>,
    device: DeviceSpec,
    rows: usize,
}

impl DeviceCoalesceBatchesExec {
    /// Makes an operator above `input` whose batches have about `rows` rows: the session's `batch_size` is a good choice.
    /// `DeviceExec::new(Arc::new(...))` makes it a node.
    pub fn new(input: Arc<dyn ExecutionPlan>, device: impl Into<DeviceSpec>, rows: usize) -> Self {
        let device = device.into();
        Self {
            input,
            device,
            rows,
        }
    }

    /// Returns how many rows the batches are to have.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the node below.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

impl DevicePlan for DeviceCoalesceBatchesExec {
    fn name(&self) -> &str {
        "DeviceCoalesceBatchesExec"
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ", rows={}", self.rows)
    }

    fn describe_tree(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rows={}", self.rows)
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let input = only(self.name(), children)?;
        Ok(Arc::new(Self {
            input,
            ..self.clone()
        }))
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let stream = execute_child(&self.input, partition, device, context.clone())?;
        let schema = self.input.schema();
        let joins = schema.fields().iter().all(|f| can_join(f.data_type()));
        if !joins || self.input.boundedness().is_unbounded() {
            return Ok(stream);
        }
        let runtime = Handle::try_current().map_err(|e| {
            let name = self.name();
            DataFusionError::Execution(format!("{name} needs a Tokio runtime: {e}"))
        })?;
        let memory = DeviceReservation::new(&context, self.name(), partition, device);
        Ok(Box::pin(Joined {
            stream: Some(stream),
            schema,
            device: device.clone(),
            memory: Arc::new(memory),
            queue: None,
            runtime,
            joining: JoinSet::new(),
            rows: self.rows,
            small: Vec::new(),
            waiting: 0,
            bytes: 0,
            after: None,
        }))
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn statistics(&self, _: Option<usize>, inputs: &[Arc<Statistics>]) -> Result<Arc<Statistics>> {
        the_same(inputs)
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Equal
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }
}

type Item = arrow_device::Result<DeviceRecordBatch>;

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

impl Stream for Joined {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            let is_joining = !this.joining.is_empty();
            if is_joining || this.after.is_some() || this.stream.is_none() || this.is_full() {
                if let Some(joined) = ready!(this.poll_join(cx)) {
                    return Poll::Ready(Some(joined));
                }
                if let Some(after) = this.after.take() {
                    return Poll::Ready(Some(after));
                }
            }
            let Some(stream) = &mut this.stream else {
                return Poll::Ready(None);
            };
            let taken = match ready!(stream.as_mut().poll_next(cx)) {
                Some(batch) => batch.and_then(|batch| this.take(batch)),
                None => {
                    this.stream = None;
                    Ok(())
                }
            };
            if let Err(e) = taken {
                this.stream = None;
                this.after = Some(Err(e));
            }
        }
    }
}

impl DeviceRecordBatchStream for Joined {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device.id().device_type
    }
}
