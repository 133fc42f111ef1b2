//! Arrays and batches in device memory.

mod access;
mod array;
mod batch;
pub(crate) mod build;
pub(crate) mod hidden;
pub(crate) mod host;
pub(crate) mod layout;
mod loan;
pub(crate) mod parts;
pub(crate) mod tree;
mod validity;

pub use array::DeviceArray;
pub use batch::DeviceRecordBatch;
pub use loan::{DeviceBits, DeviceSlice};
pub use validity::Validity;
