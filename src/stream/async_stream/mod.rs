//! The async device stream.

mod adapters;
mod consumer;
mod items;
mod producer;
mod sync;

pub use adapters::{BlockingReader, HostRecordBatchStream, ReaderStream, UploadingStream};
pub use consumer::{AsyncDeviceRecordBatchStream, AsyncStreamHandler, Batches, Opening};
pub use items::{AsyncBatch, DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter};
pub use producer::{Outcome, Produce, ProduceOptions, produce, produce_at};
