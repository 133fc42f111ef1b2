//! Columns as DLPack tensors, out and in, on every device there is without hardware.

mod kit;
mod lifetime;
mod malformed;
mod out;
mod shapes;
#[cfg(target_os = "linux")]
#[cfg(target_os = "linux")]
mod simulated;
mod streams;
