//! Streams of operators.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, DeviceRecordBatch};
use arrow_schema::SchemaRef;
use datafusion_physical_plan::metrics::ExecutionPlanMetricsSet;
use futures_core::Stream;

use super::memory::DeviceReservation;
use super::metrics::{DeviceMetrics, from_datafusion, to_datafusion};

/// The stream of an operator: batches on a device. Polling it does not block.
pub type SendableDeviceStream =
    Pin<Box<dyn DeviceRecordBatchStream<Item = arrow_device::Result<DeviceRecordBatch>> + Send>>;

/// An operator's stream with its metrics. It ends after an error, and is as cooperative as
/// DataFusion's own streams.
pub(super) struct Measured {
    /// `None` after its end or an error, which drops what it reads from.
    stream: Option<SendableDeviceStream>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    metrics: DeviceMetrics,
    /// What the polls have allocated on the device since they returned a batch.
    allocated: usize,
    /// What of that is the batch's that was returned last.
    memory: DeviceReservation,
}

impl Measured {
    pub(super) fn new(
        stream: SendableDeviceStream,
        set: &ExecutionPlanMetricsSet,
        partition: usize,
        memory: DeviceReservation,
    ) -> Self {
        Self {
            schema: stream.schema(),
            device_type: stream.device_type(),
            metrics: DeviceMetrics::new(set, partition),
            stream: Some(stream),
            allocated: 0,
            memory,
        }
    }
}

impl Stream for Measured {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // A stream that is always ready must not occupy its task's thread for ever.
        let budget = ready!(tokio::task::coop::poll_proceed(cx));
        let this = &mut *self;
        ready!(this.memory.poll_turn(cx));
        this.memory.shrink(usize::MAX);
        let poll = || match &mut this.stream {
            Some(stream) => stream.as_mut().poll_next(cx),
            None => Poll::Ready(None),
        };
        let (next, allocated) = this.metrics.poll(poll, DeviceRecordBatch::num_rows);
        this.allocated = this.allocated.saturating_add(allocated);
        let mut next = ready!(next);
        budget.made_progress();
        if let Some(Ok(batch)) = &next {
            let own = std::mem::take(&mut this.allocated).min(batch.get_array_memory_size());
            if let Err(e) = this.memory.grow(own) {
                next = Some(Err(from_datafusion(e)));
            }
        }
        if !matches!(next, Some(Ok(_))) {
            this.stream = None;
            this.memory.end_turn();
        }
        let named = |e| from_datafusion(this.memory.named(to_datafusion(e)));
        Poll::Ready(next.map(|next| next.map_err(named)))
    }
}

impl DeviceRecordBatchStream for Measured {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
