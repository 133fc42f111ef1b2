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

use arrow_schema::SchemaRef;
use futures_core::Stream;

pub use consumer::AsyncDeviceRecordBatchStream;
pub use producer::{Outcome, produce};

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::error::Result;
use crate::stream::HostRecordBatchReader;

/// A stream of batches of one schema on one type of device: arrow-rs's [`RecordBatchStream`] for device memory. Batches may
/// be on several devices of that type. All streams of this crate end after an error.
///
/// [`RecordBatchStream`]: arrow_array::nonblocking::RecordBatchStream
pub trait DeviceRecordBatchStream: Stream<Item = Result<DeviceRecordBatch>> {
    /// Returns the schema that all batches [fit](crate::DeviceRecordBatchReader#schemas).
    fn schema(&self) -> SchemaRef;

    /// Returns the type of device that all batches are on.
    fn device_type(&self) -> ArrowDeviceType;

    /// Returns key-value metadata of the whole stream, if there is any. An async device stream carries it
    /// (`ArrowAsyncProducer.additional_metadata`).
    fn metadata(&self) -> Option<&HashMap<String, String>> {
        None
    }

    /// Returns key-value metadata of the batch that was returned last, if there is any. An async device stream carries it with each
    /// batch (the argument of `on_next_task`).
    fn batch_metadata(&self) -> Option<&HashMap<String, String>> {
        None
    }

    /// Returns the stream as arrow-rs's [`RecordBatchStream`]. Memory that the host can read is not copied; other memory
    /// is downloaded, one batch ahead of the consumer. Polling never blocks. Metadata is dropped.
    ///
    /// [`RecordBatchStream`]: arrow_array::nonblocking::RecordBatchStream
    fn into_host_stream(self) -> HostRecordBatchReader<Pin<Box<Self>>>
    where
        Self: Sized,
    {
        let schema = self.schema();
        HostRecordBatchReader::new(Box::pin(self), schema)
    }
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
