//! Arrays and record batches in device memory.

mod access;
mod array;
pub(crate) mod batch;
pub(crate) mod build;
pub(crate) mod gather;
pub(crate) mod host;
pub(crate) mod layout;
mod loan;
mod memory_size;
mod nested;
pub(crate) mod nulls;
pub(crate) mod parts;
pub(crate) mod sizes;
pub(crate) mod tree;
mod validity;

pub use array::DeviceArray;
pub use batch::DeviceRecordBatch;
pub use loan::{DeviceBits, DeviceSlice};
pub use validity::Validity;
