//! What the tests against other implementations need of this one: the functions of the C library (`capi/`), arrays
//! of every type, comparisons and a simulated device, all behind C functions. One library, because simulated devices
//! are known only to the copy of the crate that made them.
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod cases;
mod cpp;
mod python;
mod sim;
#[path = "../../tests/it/support/mod.rs"]
mod support;

pub use arrow_device_capi::*;
pub use python::*;
