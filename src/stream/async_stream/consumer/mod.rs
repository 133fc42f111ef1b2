//! The consumer: a handler for a producer, and the stream that it fills.

mod handler;
mod inbox;
mod shared;
mod stream;
mod task;

pub use handler::AsyncStreamHandler;
pub use stream::{AsyncDeviceRecordBatchStream, Batches, Opening};
