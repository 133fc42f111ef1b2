//! Streams of operators, and their download.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_device::async_stream::{DeviceRecordBatchStream, HostRecordBatchStream};
use arrow_device::{ArrowDeviceType, DeviceRecordBatch};
use arrow_schema::SchemaRef;
use datafusion_common::Result;
use datafusion_execution::{RecordBatchStream, SendableRecordBatchStream};
use datafusion_physical_plan::coop::make_cooperative;
use datafusion_physical_plan::metrics::ExecutionPlanMetricsSet;
use futures_core::Stream;

use super::metrics::{DeviceMetrics, from_arrow};

/// The stream of an operator: batches on a device. Polling it does not block.
pub type SendableDeviceStream = Pin<
    Box<
        dyn DeviceRecordBatchStream<
                Batch = DeviceRecordBatch,
                Item = arrow_device::Result<DeviceRecordBatch>,
            > + Send,
    >,
>;

/// An operator's stream with its metrics. It ends after an error, and is as cooperative as
/// DataFusion's own streams.
pub(super) struct Measured {
    /// `None` after its end or an error, which drops what it reads from.
    stream: Option<SendableDeviceStream>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    metrics: DeviceMetrics,
}

impl Measured {
    pub(super) fn new(
        stream: SendableDeviceStream,
        set: &ExecutionPlanMetricsSet,
        partition: usize,
    ) -> Self {
        Self {
            schema: stream.schema(),
            device_type: stream.device_type(),
            metrics: DeviceMetrics::new(set, partition),
            stream: Some(stream),
        }
    }
}

impl Stream for Measured {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // A stream that is always ready must not occupy its task's thread for ever.
        let budget = ready!(tokio::task::coop::poll_proceed(cx));
        let Self {
            stream, metrics, ..
        } = &mut *self;
        let poll = || match stream {
            Some(stream) => stream.as_mut().poll_next(cx),
            None => Poll::Ready(None),
        };
        let next = ready!(metrics.poll(poll, DeviceRecordBatch::num_rows));
        budget.made_progress();
        if !matches!(next, Some(Ok(_))) {
            self.stream = None;
        }
        Poll::Ready(next)
    }
}

impl DeviceRecordBatchStream for Measured {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

/// Downloads a device stream for DataFusion.
pub(super) fn host_stream(
    stream: SendableDeviceStream,
    metrics: Option<DeviceMetrics>,
) -> SendableRecordBatchStream {
    let schema = stream.schema();
    let stream = stream.into_host_stream();
    make_cooperative(Box::pin(Staged {
        schema,
        stream,
        metrics,
    }))
}

/// Batches that are downloaded.
struct Staged {
    schema: SchemaRef,
    stream: HostRecordBatchStream<SendableDeviceStream>,
    metrics: Option<DeviceMetrics>,
}

impl Stream for Staged {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self {
            stream, metrics, ..
        } = &mut *self;
        let mut poll = || Pin::new(&mut *stream).poll_next(cx);
        let polled = match metrics {
            Some(metrics) => metrics.poll(poll, RecordBatch::num_rows),
            None => poll(),
        };
        polled.map_err(from_arrow)
    }
}

impl RecordBatchStream for Staged {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}
