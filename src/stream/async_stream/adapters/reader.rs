//! Readers as streams.

use std::pin::Pin;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use arrow_schema::SchemaRef;
use futures_core::Stream;

use crate::abi::{ArrowDeviceType, guard};
use crate::async_stream::DeviceRecordBatchStream;
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::stream::DeviceRecordBatchReader;

/// Makes a stream of a reader. A thread of its own reads it, so that a reader that blocks (the `get_next` of a foreign stream,
/// for example) does not block a thread of the executor. The thread ends with the reader, after an error, or at the next batch
/// after the stream has been dropped.
#[derive(Debug)]
pub struct ReaderStream {
    batches: Receiver<Result<DeviceRecordBatch>>,
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
    /// [`Error::Arrow`] with an [`IoError`](arrow_schema::ArrowError::IoError) if the thread cannot be started.
    pub fn spawn(
        reader: impl DeviceRecordBatchReader + Send + 'static,
        depth: usize,
    ) -> Result<Self> {
        let (schema, device_type) = (reader.schema(), reader.device_type());
        let task = Task::default();
        // A channel without room would block the thread before it wakes the task.
        let (sender, batches) = sync_channel(depth.clamp(1, 1 << 16));
        let to_wake = task.clone();
        let read = move || {
            let mut reader = reader;
            loop {
                let next = guard::callback("reading a stream", || Ok(reader.next()));
                let next = next.unwrap_or_else(|e| Some(Err(e)));
                let Some(batch) = next else { break };
                let over = batch.is_err();
                // If the stream was dropped, the batch comes back and is dropped here.
                let sent = guard::call_foreign("dropping a batch", || sender.send(batch).is_ok());
                wake(&to_wake);
                if over || !matches!(sent, Ok(true)) {
                    break;
                }
            }
            // A reader's drop may panic, too.
            let _ = guard::call_foreign("dropping a reader", || drop(reader));
            // Closed first, so that the task that is woken sees the end.
            drop(sender);
            wake(&to_wake);
        };
        let thread = thread::Builder::new().name("arrow-device reader".into());
        thread.spawn(read).map_err(|e| {
            Error::from(arrow_schema::ArrowError::IoError(
                format!("the thread of a reader could not be started: {e}"),
                e,
            ))
        })?;
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
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
