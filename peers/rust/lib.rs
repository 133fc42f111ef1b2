//! What the tests against other implementations need of this one: the functions of the example library `capi`, arrays
//! of every type, comparisons and a simulated device, all behind C functions. One library, because simulated devices
//! are known only to the copy of the crate that made them.
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

#[path = "../../examples/capi/lib.rs"]
mod capi;
mod cases;
mod cpp;
mod python;
mod sim;
#[path = "../../tests/support/mod.rs"]
mod support;

pub use capi::*;
pub use python::*;
