//! [`Download`]: a copy to the host that was started.

use std::convert::identity;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::SchemaRef;

use crate::data::host::{to_array, to_batch};
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::Queue;
use crate::error::Result;
use crate::transfer::arriving::Arriving;
use crate::transfer::planner::Extent;
use crate::transfer::to_slab::DownloadQueues;

/// A copy of an array (`T` is [`ArrayRef`]) or of a batch ([`RecordBatch`]) to the host that was started and may still be
/// running. [`DeviceArray::start_to_host`] and [`DeviceRecordBatch::start_to_host`] make one.
///
/// Poll it ([`is_ready`](Self::is_ready)), block on it ([`wait`](Self::wait)) or await it: it is a [`Future`], which the device
/// wakes on any executor and whose polls never block. Dropping it gives up the data; the memory that the copies use stays alive
/// until they have completed.
///
/// ```
/// use arrow_array::record_batch;
/// use arrow_device::Devices;
/// # fn main() -> arrow_device::Result<()> {
/// let device = Devices::simulated()?;
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let download = device.upload(&batch)?.start_to_host()?; // nothing waits yet
/// // ... other work of this thread ...
/// assert_eq!(download.wait()?, batch);
/// # Ok(())
/// # }
/// ```
#[must_use = "the data is lost if the download is dropped"]
pub struct Download<T> {
    arriving: Arriving,
    target: Target<T>,
}

/// What becomes of the array. The functions do not change what they are given: they say what `T` is.
enum Target<T> {
    Array(fn(ArrayRef) -> T),
    Batch(SchemaRef, fn(RecordBatch) -> T),
}

impl Download<ArrayRef> {
    /// Starts a download on `queue`, a queue of the array's device. Does not block.
    pub(super) fn of_array(array: DeviceArray, queue: Queue) -> Result<Self> {
        let mut arriving = Arriving::new(array, Extent::Rows, queue);
        arriving.start()?;
        let target = Target::Array(identity);
        Ok(Self { arriving, target })
    }
}

impl Download<RecordBatch> {
    /// As [`of_array`](Download::of_array), for a batch.
    pub(super) fn of_batch(batch: &DeviceRecordBatch, queue: Queue) -> Result<Self> {
        let mut this = Self::lazy(batch, queue);
        this.arriving.start()?;
        Ok(this)
    }

    /// Makes a download of a batch that starts with its first poll.
    pub(crate) fn lazy(batch: &DeviceRecordBatch, queues: impl Into<DownloadQueues>) -> Self {
        Self {
            arriving: Arriving::new(batch.as_struct().clone(), Extent::Rows, queues),
            target: Target::Batch(batch.schema(), identity),
        }
    }

    /// Makes a download of a batch whose copies are queued when this returns. Blocks for sizes that are stored in device memory.
    pub(crate) fn queued(batch: &DeviceRecordBatch, queues: DownloadQueues) -> Result<Self> {
        let mut this = Self::lazy(batch, queues);
        this.arriving.queue_copies()?;
        Ok(this)
    }
}

impl<T> Download<T> {
    /// Returns whether [`wait`](Self::wait) would return at once. Never blocks. Once sizes that are stored in device memory have
    /// been read, this starts the copies.
    ///
    /// # Errors
    /// Returns the errors that the device reports, and [`Error::InvalidInput`](crate::Error::InvalidInput) if a size that is
    /// stored in device memory is impossible. The download may be over then: later calls return an error.
    pub fn is_ready(&mut self) -> Result<bool> {
        self.arriving.advance()
    }

    /// Blocks this thread until the data has arrived, and returns it. That is one host wait for the copies, none if
    /// [`is_ready`](Self::is_ready) has returned `true`, and one more for each read of sizes that is still running or not started.
    ///
    /// # Errors
    /// As [`DeviceArray::to_host`].
    pub fn wait(self) -> Result<T> {
        self.target.make(&self.arriving.wait()?)
    }
}

impl<T> Target<T> {
    fn make(&self, array: &DeviceArray) -> Result<T> {
        match self {
            Self::Array(of) => to_array(array).map(of),
            Self::Batch(schema, of) => to_batch(schema, array).map(of),
        }
    }
}

impl<T> Future for Download<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let this = &mut *self;
        let arrived = std::task::ready!(this.arriving.poll(cx));
        Poll::Ready(arrived.and_then(|array| this.target.make(&array)))
    }
}

impl<T> fmt::Debug for Download<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.arriving.fmt(f)
    }
}
