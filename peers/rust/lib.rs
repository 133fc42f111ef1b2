//! What the tests against other implementations need of this one: the functions of the C library (`capi/`), arrays
//! of every type, comparisons and simulated devices, all behind C functions. One library, because simulated devices
//! are known only to the copy of the crate that made them.
//!
//! Functions answer 0, an errno or -1 (values differ); `peers_last_error` has the text. A type and a variant of it are
//! given by number, a device by its name as in `arrow_device.h`, or `metal`.
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod answer;
mod async_streams;
mod cases;
mod exchange;
mod live;
mod python;
mod sim;
mod spelling;
#[path = "../../tests/it/support/mod.rs"]
mod support;

pub use arrow_device_capi::*;
pub use python::*;
