//! Streams of batches and arrays: device readers, C streams in and out, host staging.

#[cfg(feature = "async")]
pub mod async_stream;
mod export;
mod host;
pub(crate) mod import;
mod reader;
mod upload;

pub use export::export_reader;
pub use host::HostRecordBatchReader;
pub use import::{DeviceArrayStreamReader, DeviceRecordBatchStreamReader};
pub use reader::{
    DeviceArrayIterator, DeviceArrayReader, DeviceRecordBatchIterator, DeviceRecordBatchReader,
};
pub use upload::UploadingReader;
