//! Columns as DLPack tensors, out and in, on every device there is without hardware.

mod kit;
mod lifetime;
mod malformed;
mod out;
mod shapes;
#[cfg(all(target_os = "linux", not(miri)))]
mod simulated;
mod streams;
