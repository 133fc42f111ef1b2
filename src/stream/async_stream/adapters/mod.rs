//! Adapters to and from other streams and readers.

pub(super) mod blocking;
pub(super) mod host;
mod reader;
mod upload;

pub use blocking::BlockingReader;
pub use host::HostRecordBatchStream;
pub use reader::ReaderStream;
pub use upload::UploadingStream;
