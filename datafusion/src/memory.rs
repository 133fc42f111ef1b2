//! Reservations in a device's memory pool.

use std::cmp::min;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};

use datafusion_common::{DataFusionError, Result, resources_datafusion_err};
use datafusion_execution::TaskContext;
use datafusion_execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, Gauge, MetricBuilder};

use super::metrics::{from_datafusion, named};
use super::options::DeviceOptions;
use super::pool::{DevicePools, Shared, Turn};
use super::timer::{unpoisoned, wake_at};
use arrow_device::Device;

/// Bytes of a device that a partition of a device operator has reserved, in the device's pool ([`DevicePools`](super::DevicePools)). They are
/// given back when the reservation is dropped.
///
/// The nodes of this crate reserve what passes through them: uploads, downloads and moves the memory of each batch, from before
/// they copy it, when its size is an estimate that is corrected on arrival, until their reader asks for the next batch; a [`DeviceExec`](super::DeviceExec) what its operator has allocated on
/// the device for the batch that it returned last. As DataFusion's own nodes do, **an operator that keeps batches or tables longer
/// reserves them itself**, with this type and before it has them, and so does one that needs much memory beside its result.
///
/// ```
/// use arrow_device::{DeviceBuffer, DeviceBufferMut, DeviceRecordBatch, Queue};
/// use arrow_device_datafusion::{DeviceReservation, to_datafusion};
/// use datafusion::error::Result;
///
/// /// The build side of a join, on a device.
/// struct BuildSide {
///     batches: Vec<DeviceRecordBatch>,
///     table: Option<DeviceBuffer>,
///     memory: DeviceReservation,
/// }
///
/// impl BuildSide {
///     // In `DeviceOperator::execute(task)`, `task.reservation()`:
///     fn new(memory: DeviceReservation) -> Self {
///         Self { batches: Vec::new(), table: None, memory }
///     }
///
///     fn keep(&mut self, batch: DeviceRecordBatch, bytes: usize) -> Result<()> {
///         self.memory.grow(bytes)?; // `ResourcesExhausted` if the device's limit is reached
///         self.batches.push(batch);
///         Ok(())
///     }
///
///     // In a poll of the operator's stream:
///     fn build(&mut self, queue: &Queue, bytes: usize) -> Result<()> {
///         self.memory.grow(bytes)?;
///         let table = DeviceBufferMut::allocate(queue, bytes).and_then(DeviceBufferMut::freeze);
///         self.table = Some(table.map_err(to_datafusion)?);
///         Ok(())
///     }
/// }
/// # use arrow_device_datafusion::DeviceOptions;
/// # use datafusion::prelude::{SessionConfig, SessionContext};
/// # use datafusion::error::DataFusionError;
/// # let mut options = DeviceOptions::default();
/// # options.memory = "1000".parse()?;
/// # let config = SessionConfig::new().with_option_extension(options);
/// # let context = SessionContext::new_with_config(config).task_ctx();
/// # let cpu = arrow_device::Devices::cpu();
/// # let batch = cpu.upload(&arrow_array::record_batch!(("a", Int64, [1, 2]))?).unwrap();
/// # let mut side = BuildSide::new(DeviceReservation::new(&context, "MyJoinExec", 0, &cpu));
/// # side.keep(batch.clone(), 900)?;
/// # assert!(side.build(&cpu.default_queue(), 101).is_err() && side.table.is_none());
/// # side.build(&cpu.default_queue(), 64)?;
/// # assert_eq!(side.memory.size(), 964);
/// # side.memory.shrink(64);
/// # assert!(matches!(side.keep(batch, 101), Err(DataFusionError::ResourcesExhausted(_))));
/// # assert_eq!(side.batches.len(), 1);
/// # assert_eq!(context.memory_pool().reserved(), 0, "the host's");
/// # Ok::<(), DataFusionError>(())
/// ```
///
/// A reservation cannot spill. The nodes on the host lose nothing by it, since the session's own pool does not count it.
#[derive(Debug)]
pub struct DeviceReservation {
    reservation: MemoryReservation,
    pool: Arc<dyn MemoryPool>,
    /// Of the pool's bytes.
    limit: Option<usize>,
    shared: Arc<Shared>,
    /// Its task context, which one query's partitions share. Weak, so that no other context has the same address.
    query: Weak<TaskContext>,
    options: DeviceOptions,
    /// `None` while it waits.
    turn: Mutex<Option<Arc<Turn>>>,
    node: String,
    partition: usize,
    device: Device,
    peak: Option<Gauge>,
}

impl DeviceReservation {
    /// Makes an empty reservation of a partition of the node of this name. The pool calls it `name[partition]`.
    pub fn new(context: &Arc<TaskContext>, node: &str, partition: usize, device: &Device) -> Self {
        let consumer = MemoryConsumer::new(format!("{node}[{partition}]"));
        let (options, shared) = (DeviceOptions::of_task(context), Shared::of(device));
        let own = context.session_config().get_extension::<DevicePools>();
        let pool = own.map_or_else(|| shared.pool.clone(), |own| (own.0)(device));
        Self {
            reservation: consumer.register(&pool),
            pool,
            limit: options.memory.of(device),
            shared,
            query: Arc::downgrade(context),
            options,
            turn: Mutex::default(),
            node: node.to_owned(),
            partition,
            device: device.clone(),
            peak: None,
        }
    }

    /// Keeps the most bytes that were reserved as a metric of the node, `peak_mem_used`.
    #[must_use]
    pub fn with_metrics(mut self, set: &ExecutionPlanMetricsSet) -> Self {
        let metric = MetricBuilder::new(set);
        self.peak = Some(metric.peak_memory_usage("peak_mem_used", self.partition));
        self
    }

    /// Reserves so many bytes more, for batches that the operator has got from a child and keeps, or for what it is about to allocate.
    ///
    /// # Errors
    /// Returns [`DataFusionError::ResourcesExhausted`], with the names of node, partition and device, if the pool has too little
    /// left. The reservation is what it was. No bytes are never refused.
    pub fn grow(&self, bytes: usize) -> Result<()> {
        // A pool beyond its limit refuses even that.
        if bytes == 0 {
            return Ok(());
        }
        // Within a limit, nobody else reserves meanwhile.
        let _growing = self.limit.map(|_| unpoisoned(&self.shared.growing));
        let reserved = self.pool.reserved();
        let grown = match self.limit {
            Some(limit) if reserved.saturating_add(bytes) > limit => {
                Err(resources_datafusion_err!(
                    "{reserved} of the {limit} bytes of device.memory are reserved"
                ))
            }
            _ => self.reservation.try_grow(bytes),
        };
        grown.map_err(|e| self.refused(bytes, e))?;
        if let Some(peak) = &self.peak {
            peak.set_max(self.reservation.size());
        }
        Ok(())
    }

    /// Is pending while as many other queries as may run at once on a device with a limit do so. One that has not been polled for a
    /// while does not count: it may be waiting for this one.
    pub(super) fn poll_turn(&self, cx: &Context<'_>) -> Poll<()> {
        if self.limit.is_none() || self.options.queries == 0 {
            return Poll::Ready(());
        }
        if let Some(turn) = &*unpoisoned(&self.turn) {
            turn.goes_on();
            return Poll::Ready(());
        }
        // No lock is held where a waker is called, or a turn ends.
        match self.shared.turn(&self.query, &self.options, cx.waker()) {
            Ok(turn) => {
                turn.goes_on();
                let before = unpoisoned(&self.turn).replace(turn);
                drop(before);
                Poll::Ready(())
            }
            Err(free) => {
                free.into_iter().for_each(|free| wake_at(free, cx.waker()));
                Poll::Pending
            }
        }
    }

    /// Reserves this many bytes altogether.
    pub(super) fn resize(&self, bytes: usize) -> Result<()> {
        let size = self.size();
        self.shrink(size.saturating_sub(bytes));
        self.grow(bytes.saturating_sub(size))
    }

    /// Gives so many bytes back, at most all.
    pub fn shrink(&self, bytes: usize) {
        let mut bytes = min(bytes, self.size());
        // Another thread may have given some of them back meanwhile.
        while bytes > 0 && self.reservation.try_shrink(bytes).is_err() {
            bytes = min(bytes, self.size());
        }
    }

    /// Returns how many bytes are reserved.
    pub fn size(&self) -> usize {
        self.reservation.size()
    }

    /// The error with the node's name, the partition and the device, unless it has those of a node below.
    pub(super) fn named(&self, e: DataFusionError) -> DataFusionError {
        named(e, &self.node, self.partition, &self.device)
    }

    fn refused(&self, bytes: usize, e: DataFusionError) -> DataFusionError {
        let (node, partition, device) = (&self.node, self.partition, &self.device);
        let reason = match e {
            DataFusionError::ResourcesExhausted(reason) => reason,
            e => e.to_string(),
        };
        DataFusionError::ResourcesExhausted(format!(
            "{node}, partition {partition}: {bytes} bytes for a batch of {device} are more than the device's memory limit leaves; \
             raise the limit, or use smaller batches, fewer partitions or fewer queries at once: {reason}"
        ))
    }
}

/// Bytes of a reservation that are one batch's, until this is dropped.
pub(super) struct Share {
    memory: Arc<DeviceReservation>,
    pub(super) bytes: usize,
}

impl Share {
    pub(super) fn new(memory: &Arc<DeviceReservation>, bytes: usize) -> arrow_device::Result<Self> {
        let memory = memory.clone();
        let mut share = Self { memory, bytes: 0 };
        share.resize(bytes)?;
        Ok(share)
    }

    /// Reserves this many bytes instead.
    pub(super) fn resize(&mut self, bytes: usize) -> arrow_device::Result<()> {
        let more = self.memory.grow(bytes.saturating_sub(self.bytes));
        more.map_err(from_datafusion)?;
        self.memory.shrink(self.bytes.saturating_sub(bytes));
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.memory.shrink(self.bytes);
    }
}
