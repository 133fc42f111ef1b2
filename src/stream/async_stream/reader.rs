//! Readers as streams.

use std::pin::Pin;
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use arrow_schema::SchemaRef;
use futures_core::Stream;

use crate::abi::{ArrowDeviceType, guard};
use crate::async_stream::DeviceRecordBatchStream;
use crate::data::DeviceRecordBatch;
use crate::error::Result;
use crate::stream::DeviceRecordBatchReader;
use crate::stream::ahead::{Ahead, ahead};

/// Makes a stream of a reader. A thread of its own reads it, so that a reader that blocks (the `get_next` of a foreign stream,
/// for example) does not block a thread of the executor. The thread ends with the reader, after an error, or at the next batch
/// after the stream has been dropped.
#[derive(Debug)]
pub struct ReaderStream {
    batches: Ahead<DeviceRecordBatch>,
    task: Task,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
}

/// The waker of the task that waits for a batch.
type Task = Arc<Mutex<Option<Waker>>>;

impl ReaderStream {
    /// Starts the thread. It reads ahead until `depth` batches (at least 1) wait to be taken, and then one more.
    ///
    /// # Errors
    /// [`Error::Arrow`](crate::Error::Arrow) with an [`IoError`](arrow_schema::ArrowError::IoError) if the thread cannot be started.
    pub fn spawn(
        reader: impl DeviceRecordBatchReader + Send + 'static,
        depth: usize,
    ) -> Result<Self> {
        let (schema, device_type) = (reader.schema(), reader.device_type());
        let task = Task::default();
        let to_wake = task.clone();
        let batches = ahead(reader, depth, move || wake(&to_wake))?;
        Ok(Self {
            batches,
            task,
            schema,
            device_type,
        })
    }
}

fn wake(task: &Task) {
    let waker = task.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(waker) = waker {
        // A waker may panic, which must not end this thread early.
        let _ = guard::call_foreign("waking a task", || waker.wake());
    }
}

impl Drop for ReaderStream {
    fn drop(&mut self) {
        // The thread, which may outlive the stream by far, must not keep the task.
        let task = self
            .task
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(task);
    }
}

impl Stream for ReaderStream {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = |e| match e {
            TryRecvError::Empty => Poll::Pending,
            TryRecvError::Disconnected => Poll::Ready(None),
        };
        let first = self
            .batches
            .try_recv()
            .map_or_else(next, |b| Poll::Ready(Some(b)));
        if first.is_ready() {
            return first;
        }
        let new = cx.waker().clone();
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        let old = task.replace(new);
        drop(task);
        drop(old);
        // A batch may have come before the waker was registered.
        self.batches
            .try_recv()
            .map_or_else(next, |b| Poll::Ready(Some(b)))
    }
}

impl DeviceRecordBatchStream for ReaderStream {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
