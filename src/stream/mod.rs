//! Streams of batches and arrays: device readers, C streams in and out, host staging.

mod export;
pub(crate) mod import;
mod reader;

pub use export::export_reader;
pub use import::{DeviceArrayStreamReader, DeviceRecordBatchStreamReader};
pub use reader::{
    DeviceArrayIterator, DeviceArrayReader, DeviceRecordBatchIterator, DeviceRecordBatchReader,
    HostRecordBatchReader, UploadingReader,
};
