//! Arrow C Device data interface for arrow-rs.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

pub mod abi;
pub mod device;
mod error;

pub use abi::ArrowDeviceType;
pub use device::DeviceId;
pub use error::{Error, Result};
