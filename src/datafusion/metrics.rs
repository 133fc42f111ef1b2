//! What an operator costs, without a look at any array.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use arrow_schema::{ArrowError, SchemaRef};
use datafusion_common::DataFusionError;
use datafusion_physical_plan::metrics::{Count, ExecutionPlanMetricsSet, MetricBuilder, Time};
use futures_core::Stream;

use super::plan::SendableDeviceStream;
use crate::abi::ArrowDeviceType;
use crate::async_stream::DeviceRecordBatchStream;
use crate::data::DeviceRecordBatch;
use crate::device::TransferStats;
use crate::error::{Error, Result};

/// One of this crate's errors, as DataFusion carries it.
pub(super) fn to_datafusion(e: Error) -> DataFusionError {
    from_arrow(ArrowError::from(e))
}

/// As above; one of DataFusion's own, which came through a device stream, is itself again.
pub(super) fn from_arrow(e: ArrowError) -> DataFusionError {
    let e = match e {
        ArrowError::ExternalError(e) => match e.downcast() {
            Ok(own) => return *own,
            Err(e) => ArrowError::ExternalError(e),
        },
        e => e,
    };
    DataFusionError::ArrowError(Box::new(e), None)
}

/// And back: one of ours is itself again.
pub(super) fn from_datafusion(e: DataFusionError) -> Error {
    match e {
        DataFusionError::ArrowError(e, _) => Error::from(*e),
        e => Error::from(ArrowError::ExternalError(Box::new(e))),
    }
}

/// An operator's numbers for one partition: what its own polls counted, not its children's.
#[derive(Debug)]
pub(super) struct DeviceMetrics {
    rows: Count,
    batches: Count,
    time: Time,
    bytes_to_device: Count,
    bytes_to_host: Count,
    bytes_on_device: Count,
    copies: Count,
    queue_waits: Count,
    host_waits: Count,
}

impl DeviceMetrics {
    pub(super) fn new(set: &ExecutionPlanMetricsSet, partition: usize) -> Self {
        let count = |name| MetricBuilder::new(set).counter(name, partition);
        Self {
            rows: MetricBuilder::new(set).output_rows(partition),
            batches: count("output_batches"),
            time: MetricBuilder::new(set).elapsed_compute(partition),
            bytes_to_device: count("bytes_to_device"),
            bytes_to_host: count("bytes_to_host"),
            bytes_on_device: count("bytes_on_device"),
            copies: count("copies"),
            queue_waits: count("queue_waits"),
            host_waits: count("host_waits"),
        }
    }

    /// Counts a poll. Its time is the host's, children included: the device works on after it.
    pub(super) fn poll<T>(
        &self,
        poll: impl FnOnce() -> Poll<Option<T>>,
        rows: impl FnOnce(&T) -> usize,
    ) -> Poll<Option<T>> {
        let start = Instant::now();
        let (polled, cost) = TransferStats::scope(poll);
        self.time.add_elapsed(start);
        for (count, n) in [
            (&self.bytes_to_device, cost.bytes_to_device),
            (&self.bytes_to_host, cost.bytes_to_host),
            (&self.bytes_on_device, cost.bytes_on_device),
            (&self.copies, cost.copies),
            (&self.queue_waits, cost.queue_waits),
            (&self.host_waits, cost.host_waits),
        ] {
            if n > 0 {
                count.add(usize::try_from(n).unwrap_or(usize::MAX));
            }
        }
        if let Poll::Ready(Some(item)) = &polled {
            self.rows.add(rows(item));
            self.batches.add(1);
        }
        polled
    }
}

/// An operator's stream, measured.
pub(super) struct Measured {
    stream: SendableDeviceStream,
    metrics: Arc<DeviceMetrics>,
}

impl Measured {
    pub(super) fn new(
        stream: SendableDeviceStream,
        set: &ExecutionPlanMetricsSet,
        partition: usize,
    ) -> Self {
        let metrics = Arc::new(DeviceMetrics::new(set, partition));
        Self { stream, metrics }
    }
}

impl Stream for Measured {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { stream, metrics } = &mut *self;
        let rows = |batch: &Self::Item| batch.as_ref().map_or(0, DeviceRecordBatch::num_rows);
        metrics.poll(|| stream.as_mut().poll_next(cx), rows)
    }
}

impl DeviceRecordBatchStream for Measured {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.stream.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.stream.device_type()
    }
}
