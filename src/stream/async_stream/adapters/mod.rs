//! Adapters to and from other streams and readers.

mod ahead;
pub(super) mod host;
mod moving;
mod reader;
mod upload;

pub use host::HostRecordBatchStream;
pub use moving::MovingStream;
pub use reader::ReaderStream;
pub use upload::UploadingStream;
