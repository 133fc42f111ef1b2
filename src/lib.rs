//! Arrow C Device data interface for arrow-rs.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

pub mod abi;
#[cfg(feature = "conformance")]
pub mod conformance;
mod data;
pub mod device;
mod error;
mod interchange;
mod memory;
mod stream;
mod transfer;

pub use abi::{ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};
pub use data::{DeviceArray, DeviceBits, DeviceRecordBatch, DeviceSlice};
pub use device::{Device, DeviceId, Devices, Queue, SyncEvent, TransferStats};
pub use error::{Error, Result};
pub use interchange::{
    ExportOptions, ImportOptions, NullCounts, ReleasePolicy, SyncPolicy, Validation,
};
pub use memory::{DeviceBuffer, DeviceBufferMut, HostSlab, Loan};
pub use stream::{
    DeviceArrayIterator, DeviceArrayReader, DeviceArrayStreamReader, DeviceRecordBatchIterator,
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, HostRecordBatchReader, UploadingReader,
    export_reader,
};
