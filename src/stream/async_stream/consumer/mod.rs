//! The consumer: a handler for a producer, and the stream that comes of it.

mod handler;
mod inbox;
mod stream;
mod task;

pub use handler::AsyncStreamHandler;
pub use stream::{AsyncDeviceRecordBatchStream, Batches, Opening};
