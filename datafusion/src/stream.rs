//! Streams of operators, and those that begin anew on the host.

use std::pin::Pin;
use std::task::{Poll, ready};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches};
use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::SendableRecordBatchStream;
use datafusion_physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion_physical_plan::stream::RecordBatchStreamAdapter;
use futures::stream::{Stream, StreamExt, poll_fn};

use super::memory::DeviceReservation;
use super::metrics::{DeviceMetrics, from_datafusion, to_datafusion};

/// The stream of an operator: batches on a device. Polling it does not block.
pub type SendableDeviceStream = Pin<Box<dyn DeviceRecordBatchStream<Item = Item> + Send>>;

pub(super) type Item = arrow_device::Result<DeviceRecordBatch>;

/// Makes a stream of these batches. Their end or an error drops all that they read from, and what is reserved for them.
pub(super) fn device_stream(
    batches: impl Stream<Item = Item> + Send + 'static,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
) -> SendableDeviceStream {
    let stream = DeviceRecordBatches::from_stream(batches, schema, device_type);
    Box::pin(stream)
}

/// An operator's stream with its metrics, which is as cooperative as DataFusion's own streams. What its polls have allocated on the device for the
/// batch that was returned last is reserved.
pub(super) fn measured(
    mut stream: SendableDeviceStream,
    set: &ExecutionPlanMetricsSet,
    partition: usize,
    memory: DeviceReservation,
) -> SendableDeviceStream {
    let (schema, device_type) = (stream.schema(), stream.device_type());
    // Since a batch was returned.
    let mut allocated = 0_usize;
    let metrics = DeviceMetrics::new(set, partition);
    let batches = poll_fn(move |cx| {
        // A stream that is always ready must not occupy its task's thread for ever.
        let budget = ready!(tokio::task::coop::poll_proceed(cx));
        ready!(memory.poll_turn(cx));
        memory.shrink(usize::MAX);
        let poll = || stream.as_mut().poll_next(cx);
        let (next, more) = metrics.poll(poll, DeviceRecordBatch::num_rows);
        allocated = allocated.saturating_add(more);
        let next = ready!(next);
        budget.made_progress();
        let allocated = std::mem::take(&mut allocated);
        Poll::Ready(next.map(|batch| {
            let batch = batch.map_err(to_datafusion).and_then(|batch| {
                let own = (allocated > 0).then(|| allocated.min(batch.get_array_memory_size()));
                memory.grow(own.unwrap_or(0)).map(|()| batch)
            });
            batch.map_err(|e| from_datafusion(memory.named(e)))
        }))
    });
    device_stream(batches, schema, device_type)
}

/// A partition on a device, which `host` starts on the host, for a reason, if there is too little memory for its start or its first batch.
pub(super) fn until_first(
    started: Result<SendableRecordBatchStream>,
    host: impl FnOnce(&str) -> Result<SendableRecordBatchStream> + Send + 'static,
) -> Result<SendableRecordBatchStream> {
    let mut stream = match started {
        Err(e) if is_exhausted(&e) => return host(&e.to_string()),
        started => started?,
    };
    let (schema, mut host) = (stream.schema(), Some(host));
    let batches = poll_fn(move |cx| {
        let next = ready!(stream.poll_next_unpin(cx));
        match (&next, host.take()) {
            (Some(Err(e)), Some(host)) if is_exhausted(e) => match host(&e.to_string()) {
                Ok(started) => stream = started,
                Err(e) => return Poll::Ready(Some(Err(e))),
            },
            _ => return Poll::Ready(next),
        }
        stream.poll_next_unpin(cx)
    });
    Ok(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
}

/// Whether it is a lack of memory.
fn is_exhausted(e: &DataFusionError) -> bool {
    matches!(e.find_root(), DataFusionError::ResourcesExhausted(_))
}
