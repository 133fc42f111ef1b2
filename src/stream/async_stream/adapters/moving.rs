//! Device streams on another device.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use futures_core::Stream;

use crate::abi::ArrowDeviceType;
use crate::async_stream::DeviceRecordBatchStream;
use crate::async_stream::adapters::ahead::{Ahead, Coming};
use crate::data::DeviceRecordBatch;
use crate::device::{Completion, Device, Queue};
use crate::error::Result;
use crate::memory::MemoryBudget;
use crate::stream::host::CopyQueues;
use crate::stream::upload::Uploads;
use crate::transfer::Download;

/// Moves the batches of a device stream to one device: the asynchronous [`DeviceRecordBatch::to_device`].
///
/// - Batches that are on the device already are passed on, unchanged and at once.
/// - If the device reaches the memory of a batch's device, the batch is copied directly, after a read of sizes that are stored
///   in device memory. A batch of which the host has to rewrite some bytes, as
///   [`to_device`](crate::DeviceArray::to_device) describes, goes through the host.
/// - Batches of other devices go through the host: they are downloaded one ahead of the consumer, and then uploaded. Memory that
///   the host can read is uploaded from where it is, once it is ready.
///
/// The batches of one stream may be on several devices; they keep their order. A moved batch may be returned before its copies
/// are done. The next one is pending while 128 MiB or 64 batches are being copied to the device, until the oldest is done.
/// Polling does not block, except to upload a single batch that needs more staging memory than that. The stream ends after an
/// error. Metadata of batches is dropped.
///
/// ```
/// use arrow_array::record_batch;
/// use arrow_device::async_stream::{DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, MovingStream};
/// use arrow_device::Devices;
/// use futures::StreamExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> arrow_device::Result<()> {
/// let (from, to) = (Devices::cpu(), Devices::simulated()?);
/// let batch = from.upload(&record_batch!(("id", Int64, [1, 2, 3]))?)?;
/// let (schema, device_type) = (batch.schema(), from.id().device_type);
/// let batches = futures::stream::iter([Ok(batch)]);
/// let batches = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
///
/// let mut moved = MovingStream::new(batches, &to);
/// while let Some(batch) = moved.next().await {
///     assert_eq!(batch?.device(), &to);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MovingStream<S> {
    /// `None` after its end or an error.
    ahead: Option<Ahead<S, Moved>>,
    schema: SchemaRef,
    device: Device,
    sources: CopyQueues,
    /// Made for the first batch that is elsewhere.
    uploads: Option<Uploads>,
    /// The wait for the oldest upload.
    wait: Option<Completion>,
}

/// How far a batch has come.
#[derive(Debug)]
enum Moved {
    /// It was on the device.
    Passed(DeviceRecordBatch),
    /// It is there, or on the host.
    Copied(DeviceRecordBatch),
}

impl<S: DeviceRecordBatchStream> MovingStream<S> {
    /// Moves batches to `device`, on a queue of their own that is made for the first batch that is on another device.
    pub fn new(stream: S, device: &Device) -> Self {
        Self {
            schema: stream.schema(),
            ahead: Some(Ahead::new(stream)),
            device: device.clone(),
            sources: CopyQueues::default(),
            uploads: None,
            wait: None,
        }
    }

    /// Moves batches to the device of `queue`, on that queue.
    pub fn new_on(stream: S, queue: Queue) -> Self {
        Self {
            uploads: Some(Uploads::new(queue.clone())),
            ..Self::new(stream, queue.device())
        }
    }

    /// Asks `budget` before memory is allocated for a batch: device memory, and also host memory if it goes through the host.
    /// Batches ahead of the consumer count, too.
    #[must_use]
    pub fn with_budget(mut self, budget: Arc<dyn MemoryBudget>) -> Self {
        if let Some(ahead) = &mut self.ahead {
            ahead.budget = Some(budget);
        }
        self
    }
}

impl<S: DeviceRecordBatchStream> Stream for MovingStream<S> {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let (device, sources, uploads) = (&this.device, &mut this.sources, &mut this.uploads);
        let Some(ahead) = &mut this.ahead else {
            return Poll::Ready(None);
        };
        if let Some(uploads) = uploads {
            // The reader is done with the batch before.
            ahead.release();
            ready!(uploads.poll_room(&mut this.wait, cx));
        }
        let prefetch = ahead.prefetch;
        let next = ready!(ahead.poll_next(cx, |batch, reserved| {
            if batch.device() == device {
                return Ok(Coming::arrived(Moved::Passed(batch)));
            }
            let uploads = match uploads {
                Some(uploads) => uploads,
                None => uploads.insert(Uploads::new(device.new_queue()?)),
            };
            let queues = sources.of(batch.device(), prefetch)?;
            let copy = Download::towards(&batch, queues, uploads.queue(), Moved::Copied);
            Ok(Coming::started(copy.with_reserved(reserved)))
        }));
        let next = next.map(|moved| match (moved?, uploads) {
            (Moved::Copied(batch), Some(uploads)) => {
                uploads.bring(batch, &mut |bytes| ahead.reserve(bytes))
            }
            (Moved::Passed(batch) | Moved::Copied(batch), _) => Ok(batch),
        });
        if !matches!(next, Some(Ok(_))) {
            this.ahead = None;
        }
        Poll::Ready(next)
    }
}

impl<S: DeviceRecordBatchStream> DeviceRecordBatchStream for MovingStream<S> {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device.id().device_type
    }
}
