//! The async device stream: producers that push batches to consumers, both ways (feature `async`).
//!
//! ```
//! use arrow_array::record_batch;
//! use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, produce};
//! use arrow_device::{DeviceRecordBatches, Devices, ExportOptions, SyncPolicy};
//! use futures::StreamExt;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The consumer makes a handler, which requests up to 4 batches ahead, and a future of its stream.
//! // SAFETY: the producer below is this crate's.
//! let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(4, Default::default()) };
//! let consuming = async {
//!     let mut batches = opening.await?.into_host_stream(); // the schema is known
//!     let mut rows = 0;
//!     while let Some(batch) = batches.next().await {
//!         rows += batch?.num_rows();
//!     }
//!     Ok(rows)
//! };
//!
//! // The producer, often another library, sends its batches to the handler.
//! let batch = Devices::cpu().upload(&record_batch!(("id", Int64, [1, 2, 3]))?)?;
//! let (schema, device_type) = (batch.schema(), batch.device().id().device_type);
//! let batches = futures::stream::iter([Ok(batch)]);
//! let batches = DeviceRecordBatches::from_stream(batches, schema, device_type);
//! let options = ExportOptions::new(SyncPolicy::Event);
//! // SAFETY: the handler is this crate's, and goes to this producer alone.
//! let producing = unsafe { produce(batches, handler, options) };
//!
//! let (produced, rows): (_, arrow_device::Result<usize>) = futures::join!(producing, consuming);
//! produced?;
//! assert_eq!(rows?, 3);
//! # Ok(())
//! # }
//! ```
//!
//! In a C stream the consumer pulls: it calls the producer and waits. In the specification's async device stream the
//! producer calls the consumer's `ArrowAsyncDeviceStreamHandler`, and the consumer says how many batches it can take. This
//! module turns such streams into [`futures`](futures_core::Stream) streams, and streams into producers. It needs no
//! particular executor.
//!
//! | side | step | with |
//! | --- | --- | --- |
//! | consumer | makes a handler and a future of its stream | [`AsyncDeviceRecordBatchStream::handler`] |
//! | | gives the handler, a C struct, to any producer | [`produce`] |
//! | | awaits the schema, then batches with their metadata | the future, [`AsyncDeviceRecordBatchStream`] |
//! | producer | is given a handler and has a stream of device batches | [`produce`] |
//! | | polls the future that it returns on any executor | |
//!
//! # Streams and readers
//!
//! All streams here implement [`DeviceRecordBatchStream`]. Adapters make one of
//! - any [`Stream`](futures_core::Stream) of device batches:
//!   [`DeviceRecordBatches::from_stream`](crate::DeviceRecordBatches::from_stream);
//! - a stream of host batches, which are uploaded: [`upload_stream`](crate::upload_stream);
//! - a [`DeviceRecordBatchReader`](crate::DeviceRecordBatchReader), on a thread of its own:
//!   [`into_stream`](crate::DeviceRecordBatchReader::into_stream);
//!
//! and they make of one
//! - a stream of host batches, arrow-rs's [`RecordBatchStream`](arrow_array::nonblocking::RecordBatchStream):
//!   [`into_host_stream`](DeviceRecordBatchStream::into_host_stream).
//!
//! # Waiting
//!
//! Polling never blocks, except to upload a single batch of more than 128 MiB. A device that has finished wakes the task. A
//! batch may be returned before the device has filled it; it carries the event to wait for. All streams end after an error.

mod consumer;
mod demand;
mod foreign;
mod handler;
mod inbox;
mod producer;

/// Locks of the state that two sides race for. The model checker has its own.
mod sync {
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

    /// A number that no other living thread has.
    pub(crate) type ThreadKey = usize;

    pub(crate) fn this_thread() -> ThreadKey {
        thread_local!(static HERE: u8 = const { 0 });
        HERE.with(|here| std::ptr::from_ref(here).addr())
    }
}

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::mpsc::TryRecvError;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_array::nonblocking::RecordBatchStream;
use arrow_schema::{ArrowError, SchemaRef};
use futures_core::Stream;

pub use consumer::AsyncDeviceRecordBatchStream;
pub use producer::{Outcome, produce};

pub use crate::stream::reader::DeviceRecordBatchStream;

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::device::{FORKED, Queue, lock};
use crate::error::{Error, Result};
use crate::stream::ahead::Ahead;
use crate::stream::upload::Uploads;
use crate::stream::{DeviceRecordBatches, HostRecordBatchReader};
use crate::transfer::Download;

/// Uploads the batches of a stream on `queue`, as [`upload_reader`](crate::upload_reader) does. All of them must [fit](crate::DeviceRecordBatchReader#schemas)
/// `schema`. Errors are arrow-rs's or this crate's. Polls do not block, except to upload a single batch that needs more than 128 MiB of
/// staging memory; while too much is being uploaded, they are pending.
///
/// ```
/// # use arrow_array::RecordBatch;
/// # use arrow_device::async_stream::DeviceRecordBatchStream;
/// # use arrow_device::{Device, upload_stream};
/// # use arrow_schema::SchemaRef;
/// # use futures::Stream;
/// fn up(
///     batches: impl Stream<Item = Result<RecordBatch, arrow_schema::ArrowError>>,
///     schema: SchemaRef,
///     device: &Device,
/// ) -> impl DeviceRecordBatchStream {
///     upload_stream(batches, schema, device.default_queue())
/// }
/// ```
pub fn upload_stream<S, E>(
    stream: S,
    schema: SchemaRef,
    queue: Queue,
) -> impl DeviceRecordBatchStream + Unpin + use<S, E>
where
    S: Stream<Item = Result<RecordBatch, E>>,
    E: Into<Error>,
{
    let device_type = queue.device().id().device_type;
    let uploading = Uploading {
        stream: Box::pin(stream),
        uploads: Uploads::new(schema.clone(), queue),
    };
    DeviceRecordBatches::of(uploading, schema, device_type)
}

impl<S: DeviceRecordBatchStream + ?Sized> DeviceRecordBatchStream for Pin<Box<S>> {
    fn schema(&self) -> SchemaRef {
        (**self).schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        (**self).device_type()
    }

    fn metadata(&self) -> Option<&HashMap<String, String>> {
        (**self).metadata()
    }

    fn batch_metadata(&self) -> Option<&HashMap<String, String>> {
        (**self).batch_metadata()
    }
}

impl<S: Stream> DeviceRecordBatches<Pin<Box<S>>> {
    /// Wraps a stream whose batches all [fit](crate::DeviceRecordBatchReader#schemas) `schema` and are on devices of `device_type`. This
    /// is not checked here, but where batches are exported ([`produce`](produce)) or staged to the host.
    pub fn from_stream(stream: S, schema: SchemaRef, device_type: ArrowDeviceType) -> Self {
        Self::of(Box::pin(stream), schema, device_type)
    }

    /// Sets the [metadata](DeviceRecordBatchStream::metadata) of the whole stream.
    #[must_use]
    pub fn with_metadata(mut self, metadata: HashMap<String, String>) -> Self {
        self.metadata = Some(metadata);
        self
    }
}

impl<S: Stream<Item = Result<DeviceRecordBatch>> + Unpin> Stream for DeviceRecordBatches<S> {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(batches) = &mut self.batches else {
            return Poll::Ready(None);
        };
        let next = ready!(Pin::new(batches).poll_next(cx));
        Poll::Ready(self.ended(next))
    }
}

impl<S> DeviceRecordBatchStream for DeviceRecordBatches<S>
where
    S: Stream<Item = Result<DeviceRecordBatch>> + Unpin,
{
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.metadata.as_ref()
    }
}

impl<S: Stream<Item = Result<DeviceRecordBatch>> + Unpin> Stream for HostRecordBatchReader<S> {
    type Item = Result<RecordBatch, ArrowError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            // Batches at hand start first, so that their copies overlap with the making of the next one.
            for coming in &mut this.coming {
                let arrived = coming.as_mut().map(|download| download.poll_arrived(cx));
                if let Ok(Poll::Ready(Err(e))) = arrived {
                    *coming = Err(e);
                }
            }
            let before = this.coming.len();
            while let Some(reader) = this.wanted() {
                let Poll::Ready(next) = Pin::new(reader).poll_next(cx) else {
                    break;
                };
                this.take(next, |batch, queues| Ok(Download::lazy(batch, queues)));
            }
            if this.coming.len() == before {
                break;
            }
        }
        match this.coming.front() {
            None if this.reader.is_some() => return Poll::Pending,
            Some(Ok(oldest)) if !oldest.has_arrived() => return Poll::Pending,
            _ => {}
        }
        let oldest = this.coming.pop_front();
        Poll::Ready(oldest.map(|oldest| this.give(oldest)))
    }
}

impl<S: Stream<Item = Result<DeviceRecordBatch>> + Unpin> RecordBatchStream
    for HostRecordBatchReader<S>
{
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }
}

/// A stream whose batches are uploaded.
struct Uploading<S> {
    stream: Pin<Box<S>>,
    uploads: Uploads,
}

impl<S, E> Stream for Uploading<S>
where
    S: Stream<Item = Result<RecordBatch, E>>,
    E: Into<Error>,
{
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        ready!(self.uploads.make_room(|oldest| oldest.poll(cx)));
        let next = ready!(self.stream.as_mut().poll_next(cx));
        Poll::Ready(next.map(|batch| self.uploads.upload(&batch.map_err(E::into)?)))
    }
}

impl<T> Stream for Ahead<T> {
    type Item = Result<T>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = || match self.items.try_recv() {
            _ if !self.process.is_this() => Poll::Ready(Some(Err(Error::argument(FORKED)))),
            Ok(item) => Poll::Ready(Some(item)),
            Err(TryRecvError::Disconnected) => Poll::Ready(None),
            Err(TryRecvError::Empty) => Poll::Pending,
        };
        let first = next();
        if first.is_ready() {
            return first;
        }
        let new = cx.waker().clone();
        let old = lock(&self.task).replace(new);
        drop(old);
        // An item may have come before the waker was registered.
        next()
    }
}
