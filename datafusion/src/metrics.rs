//! Metrics and errors of operators.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use arrow_schema::ArrowError;
use datafusion_common::DataFusionError;
use datafusion_physical_plan::metrics::{Count, ExecutionPlanMetricsSet, MetricBuilder, Time};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use arrow_device::{Error, TransferStats};

/// Makes an error of `arrow-device` one of DataFusion. An error of DataFusion or of arrow-rs that has passed through a device stream
/// is unwrapped again.
///
/// | error | becomes |
/// | --- | --- |
/// | [`Error::OutOfMemory`], and a refused reservation | [`DataFusionError::ResourcesExhausted`] |
/// | any other of `arrow-device` | [`DataFusionError::External`] around it |
///
/// ```
/// use arrow_device_datafusion::to_datafusion;
/// use datafusion::error::Result;
/// fn rows(device: &arrow_device::Device, batch: &arrow_array::RecordBatch) -> Result<usize> {
///     let on_device = device.upload(batch).map_err(to_datafusion)?;
///     Ok(on_device.num_rows())
/// }
/// let batch = arrow_array::record_batch!(("a", Int64, [1, 2]))?;
/// assert_eq!(rows(&arrow_device::Devices::cpu(), &batch)?, 2);
/// # Ok::<(), datafusion::error::DataFusionError>(())
/// ```
pub fn to_datafusion(e: Error) -> DataFusionError {
    from_arrow(ArrowError::from(e))
}

fn from_arrow(e: ArrowError) -> DataFusionError {
    let carried = |e| DataFusionError::ArrowError(Box::new(e), None);
    let e = match e {
        ArrowError::ExternalError(e) => e,
        ArrowError::MemoryError(reason) => return DataFusionError::ResourcesExhausted(reason),
        e => return carried(e),
    };
    let e = match e.downcast::<DataFusionError>() {
        Ok(own) => return *own,
        Err(e) => e,
    };
    match e.downcast::<Error>().map(|e| *e) {
        Ok(Error::Arrow(e)) => match Arc::try_unwrap(e) {
            Ok(e) => from_arrow(e),
            Err(e) => carried(ArrowError::ExternalError(Box::new(Error::Arrow(e)))),
        },
        Ok(e @ Error::OutOfMemory { .. }) => DataFusionError::ResourcesExhausted(e.to_string()),
        Ok(e) => DataFusionError::External(Box::new(e)),
        Err(e) => carried(ArrowError::ExternalError(e)),
    }
}

/// Wraps an error of DataFusion for a device stream. An error of `arrow-device` is unwrapped again. What exhausts resources is a
/// lack of memory at a C boundary, too.
pub(super) fn from_datafusion(e: DataFusionError) -> Error {
    match e {
        DataFusionError::ArrowError(e, _) => Error::from(*e),
        DataFusionError::External(e) if e.is::<Error>() => {
            Error::from(ArrowError::ExternalError(e))
        }
        DataFusionError::ResourcesExhausted(reason) => Error::from(ArrowError::MemoryError(reason)),
        e => Error::from(ArrowError::ExternalError(Box::new(e))),
    }
}

/// An error of a device with the name of the node in which it happened, unless it has another's.
pub(super) fn named(
    e: DataFusionError,
    node: &str,
    partition: usize,
    device: &dyn fmt::Display,
) -> DataFusionError {
    let who = || format!("{node}, partition {partition}, on {device}");
    match e {
        DataFusionError::External(e) if e.is::<Error>() => {
            DataFusionError::External(e).context(who())
        }
        // As the device's own error begins.
        DataFusionError::ResourcesExhausted(e) if e.starts_with("out of memory on ") => {
            DataFusionError::ResourcesExhausted(format!("{}: {e}", who()))
        }
        e => e,
    }
}

/// What a poll costs.
#[derive(Clone, Copy, Default)]
struct Cost {
    counts: TransferStats,
    time: Duration,
    /// What another thread did for this poll.
    elsewhere: TransferStats,
}

thread_local! {
    /// The cost of polls within the poll that is being measured on this thread.
    static WITHIN: Cell<Cost> = Cell::default();
}

/// Runs `poll` and returns its cost, without that of polls measured within it.
fn measured<T>(poll: impl FnOnce() -> T) -> (T, Cost) {
    let start = Instant::now();
    let outer = WITHIN.take();
    let (polled, counts) = TransferStats::scope(poll);
    let time = start.elapsed();
    let within = WITHIN.replace(Cost {
        counts: outer.counts + counts,
        time: outer.time + time,
        ..outer
    });
    let own = Cost {
        counts: counts.since(&within.counts) + within.elsewhere,
        time: time.saturating_sub(within.time),
        ..within
    };
    (polled, own)
}

/// Runs work whose allocations somebody has reserved, so that the node that is being polled need not. All else that it does counts.
pub(super) fn reserved<T>(work: impl FnOnce() -> T) -> T {
    let before = WITHIN.get();
    let (done, counts) = TransferStats::scope(work);
    let mut within = WITHIN.get();
    within.counts.allocated_bytes = before.counts.allocated_bytes + counts.allocated_bytes;
    within.elsewhere.allocated_bytes = before.elsewhere.allocated_bytes;
    WITHIN.set(within);
    done
}

/// Does work that may wait for a device on a thread of the runtime where that holds up no task, and attributes it to the poll that awaits it. Its
/// panic goes on there. Dropped before the work begins, this does not begin it; what has begun goes on.
pub(super) async fn on_blocking_thread<T: Send + 'static>(
    runtime: &Handle,
    operation: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let mut task = JoinSet::new();
    task.spawn_blocking_on(|| TransferStats::scope(work), runtime);
    match task.join_next().await {
        Some(Ok((done, counts))) => {
            let outer = WITHIN.get();
            let elsewhere = outer.elsewhere + counts;
            WITHIN.set(Cost { elsewhere, ..outer });
            Ok(done)
        }
        Some(Err(e)) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
        _ => Err(Error::Cancelled { operation }),
    }
}

/// Polls a node on the host, whose cost is not attributed to the operator that polls it.
pub(super) fn poll_host<T>(poll: impl FnOnce() -> Poll<T>) -> Poll<T> {
    measured(poll).0
}

/// An operator's metrics for one partition, without those of its children.
#[derive(Debug)]
pub(super) struct DeviceMetrics {
    rows: Count,
    batches: Count,
    time: Time,
    moved: [Count; 6],
}

/// What was moved and waited for, with the names of the metrics.
fn moved(cost: &TransferStats) -> [(&'static str, u64); 6] {
    [
        ("bytes_to_device", cost.bytes_to_device),
        ("bytes_to_host", cost.bytes_to_host),
        ("bytes_on_device", cost.bytes_on_device),
        ("copies", cost.copies),
        ("queue_waits", cost.queue_waits),
        ("host_waits", cost.host_waits),
    ]
}

impl DeviceMetrics {
    pub(super) fn new(set: &ExecutionPlanMetricsSet, partition: usize) -> Self {
        let count = |(name, _)| MetricBuilder::new(set).counter(name, partition);
        Self {
            rows: MetricBuilder::new(set).output_rows(partition),
            batches: MetricBuilder::new(set).output_batches(partition),
            time: MetricBuilder::new(set).elapsed_compute(partition),
            moved: moved(&TransferStats::default()).map(count),
        }
    }

    /// Counts a poll, without polls of other nodes within it. The time is the host's; the device
    /// may continue after it. Returns also how many bytes the node has allocated on a device that nobody has reserved.
    pub(super) fn poll<T, E>(
        &self,
        poll: impl FnOnce() -> Poll<Option<std::result::Result<T, E>>>,
        rows: impl FnOnce(&T) -> usize,
    ) -> (Poll<Option<std::result::Result<T, E>>>, usize) {
        let (polled, own) = measured(poll);
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        self.time.add_duration(own.time);
        for (count, (_, n)) in self.moved.iter().zip(moved(&own.counts)) {
            count.add(number(n));
        }
        if let Poll::Ready(Some(Ok(batch))) = &polled {
            self.rows.add(rows(batch));
            self.batches.add(1);
        }
        (polled, number(own.counts.allocated_bytes))
    }
}
