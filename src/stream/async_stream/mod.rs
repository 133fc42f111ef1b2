//! The async device stream: producers that push batches to consumers, both ways (feature `async`).
//!
//! In a C stream the consumer pulls: it calls the producer and waits. In the specification's async device stream the
//! producer calls the consumer's `ArrowAsyncDeviceStreamHandler`, and the consumer says how many batches it can take. This
//! module turns such streams into [`futures`](futures_core::Stream) streams, and streams into producers. It needs no
//! particular executor.
//!
//! ```
//! use arrow_array::{RecordBatch, record_batch};
//! use arrow_device::async_stream::{
//!     AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, ProduceOptions, produce,
//! };
//! use arrow_device::{Devices, ExportOptions, SyncPolicy};
//! use futures::TryStreamExt;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let host = record_batch!(("id", Int64, [1, 2, 3]))?;
//! let batch = Devices::cpu().upload(&host)?;
//!
//! // The consumer makes a handler, which requests up to 4 batches ahead.
//! // SAFETY: the producer below is this crate's.
//! let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(4, Default::default()) };
//!
//! // The producer, usually a C library, sends its batches to the handler.
//! let (schema, device_type) = (batch.schema(), batch.device().id().device_type);
//! let batches = futures::stream::iter([Ok(batch)]);
//! let batches = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
//! let options = ProduceOptions::new(ExportOptions::new(SyncPolicy::Event));
//! let producing = produce(batches, handler.into_ffi(), options);
//!
//! // The consumer awaits the schema, then the batches: here as host batches, whatever device they are on.
//! let consuming = async {
//!     let stream = opening.await?;
//!     stream.into_host_stream().try_collect::<Vec<RecordBatch>>().await
//! };
//! let (produced, consumed) = futures::join!(producing, consuming);
//! produced?;
//! assert_eq!(consumed?, [host]);
//! # Ok(())
//! # }
//! ```
//!
//! | side | step | with |
//! | --- | --- | --- |
//! | consumer | makes a handler and a future of its stream | [`AsyncDeviceRecordBatchStream::handler`] |
//! | | gives the C struct to any producer | [`AsyncStreamHandler::into_raw`], [`into_ffi`](AsyncStreamHandler::into_ffi) |
//! | | awaits the schema, then batches with their metadata | [`Opening`], [`AsyncDeviceRecordBatchStream`] |
//! | producer | is given a handler and has a stream of device batches | [`produce`], [`produce_at`] |
//! | | polls the future on any executor | [`Produce`] |
//!
//! # Streams and readers
//!
//! All streams here implement [`DeviceRecordBatchStream`]. Adapters make one of
//! - any [`Stream`](futures_core::Stream) of device batches: [`DeviceRecordBatchStreamAdapter`];
//! - a stream of host batches, which are uploaded: [`UploadingStream`];
//! - a [`DeviceRecordBatchReader`](crate::DeviceRecordBatchReader), on a thread of its own: [`ReaderStream`];
//!
//! and they make of one
//! - a stream of host batches, arrow-rs's [`RecordBatchStream`](arrow_array::nonblocking::RecordBatchStream):
//!   [`into_host_stream`](DeviceRecordBatchStream::into_host_stream);
//! - a reader that blocks: [`into_blocking_reader`](DeviceRecordBatchStream::into_blocking_reader).
//!
//! # Waiting
//!
//! Polling never blocks, except to upload a single batch of more than 128 MiB: a device that has finished wakes the task. A
//! batch may be returned before the device has filled it; it carries the event to wait for. All streams end after an error.

mod adapters;
mod consumer;
mod items;
mod producer;
mod sync;

pub use adapters::{BlockingReader, HostRecordBatchStream, ReaderStream, UploadingStream};
pub use consumer::{AsyncDeviceRecordBatchStream, AsyncStreamHandler, Batches, Opening};
pub use items::{AsyncBatch, DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter};
pub use producer::{Outcome, Produce, ProduceOptions, produce, produce_at};
