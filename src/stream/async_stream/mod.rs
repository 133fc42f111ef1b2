//! The async device stream: producers that push batches to consumers, both ways (feature `async`).
//!
//! ```
//! use arrow_array::record_batch;
//! use arrow_device::async_stream::{
//!     AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, produce,
//! };
//! use arrow_device::{Devices, ExportOptions, SyncPolicy};
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
//! let batches = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
//! let producing = produce(batches, handler, ExportOptions::new(SyncPolicy::Event));
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
//! | | gives the handler to a producer of this crate, or its C struct to any other | [`produce`], [`AsyncStreamHandler::into_raw`] |
//! | | awaits the schema, then batches with their metadata | [`Opening`], [`AsyncDeviceRecordBatchStream`] |
//! | producer | is given a handler and has a stream of device batches | [`produce`], [`produce_at`] |
//! | | polls the future that they return on any executor | |
//!
//! # Streams and readers
//!
//! All streams here implement [`DeviceRecordBatchStream`]. Adapters make one of
//! - any [`Stream`](futures_core::Stream) of device batches: [`DeviceRecordBatchStreamAdapter`];
//! - a stream of host batches, which are uploaded: [`UploadingReader::from_stream`](crate::UploadingReader::from_stream);
//! - a [`DeviceRecordBatchReader`](crate::DeviceRecordBatchReader), on a thread of its own: [`ReaderStream`];
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
mod items;
mod producer;
mod reader;
mod sync;

pub use consumer::{AsyncDeviceRecordBatchStream, Opening};
pub use handler::AsyncStreamHandler;
pub use items::{DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter};
pub use producer::{Outcome, produce, produce_at};
pub use reader::ReaderStream;
