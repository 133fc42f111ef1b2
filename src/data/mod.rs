//! Arrays and batches in device memory.

mod access;
mod array;
mod batch;
pub(crate) mod build;
pub(crate) mod hidden;
pub(crate) mod host;
pub(crate) mod layout;
pub(crate) mod parts;
pub(crate) mod tree;
mod validity;

pub use access::{DeviceBits, DeviceSlice};
pub use array::DeviceArray;
pub use batch::DeviceRecordBatch;
pub use validity::Validity;
