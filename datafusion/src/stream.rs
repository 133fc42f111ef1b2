//! Streams of operators, and their download.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_device::async_stream::{DeviceRecordBatchStream, HostRecordBatchStream, MovingStream};
use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch, LiveBytes};
use arrow_schema::SchemaRef;
use datafusion_common::Result;
use datafusion_execution::{RecordBatchStream, SendableRecordBatchStream};
use datafusion_physical_plan::coop::make_cooperative;
use datafusion_physical_plan::metrics::ExecutionPlanMetricsSet;
use futures_core::Stream;

use super::memory::DeviceReservation;
use super::metrics::{DeviceMetrics, from_arrow, from_datafusion, reserved};

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
    /// What the polls have allocated for the batch that is being made, or was returned last, and
    /// has not been freed.
    live: LiveBytes,
    /// That, as of the last poll.
    memory: DeviceReservation,
    /// The last poll returned a batch.
    returned: bool,
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
            live: LiveBytes::default(),
            memory,
            returned: false,
        }
    }
}

impl Stream for Measured {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // A stream that is always ready must not occupy its task's thread for ever.
        let budget = ready!(tokio::task::coop::poll_proceed(cx));
        let this = &mut *self;
        if std::mem::take(&mut this.returned) {
            this.memory.shrink(usize::MAX);
            // What lives on is the reader's, or the operator has reserved it.
            this.live = LiveBytes::default();
        }
        let poll = || match &mut this.stream {
            Some(stream) => this.live.scope(|| stream.as_mut().poll_next(cx)),
            None => Poll::Ready(None),
        };
        let next = this.metrics.poll(poll, DeviceRecordBatch::num_rows);
        let next = match (this.memory.resize(this.live.get()), next) {
            (Err(e), _) => Some(Err(from_datafusion(e))),
            (Ok(()), next) => ready!(next),
        };
        budget.made_progress();
        this.returned = matches!(next, Some(Ok(_)));
        if !this.returned {
            this.stream = None;
            this.memory.shrink(usize::MAX);
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

/// Returns the stream with its batches on `device`. Those that are there already are passed on.
pub(super) fn on_device(
    stream: SendableDeviceStream,
    device: &Device,
    memory: DeviceReservation,
) -> SendableDeviceStream {
    let moved = MovingStream::new(stream, device);
    Box::pin(Reserved(Box::pin(moved.with_budget(Arc::new(memory)))))
}

/// A stream that reserves what it allocates.
pub(super) struct Reserved<S>(pub(super) Pin<Box<S>>);

impl<S: Stream> Stream for Reserved<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        reserved(|| self.0.as_mut().poll_next(cx))
    }
}

impl<S: DeviceRecordBatchStream> DeviceRecordBatchStream for Reserved<S> {
    type Batch = S::Batch;

    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device_type()
    }
}

/// Downloads a device stream for DataFusion.
pub(super) fn host_stream(
    stream: SendableDeviceStream,
    metrics: Option<DeviceMetrics>,
    memory: DeviceReservation,
) -> SendableRecordBatchStream {
    let schema = stream.schema();
    let stream = stream.into_host_stream().with_separate_columns();
    let stream = stream.with_budget(Arc::new(memory));
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
