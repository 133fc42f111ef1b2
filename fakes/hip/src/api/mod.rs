//! HIP's functions. Parameters are named as in its documentation.
//!
//! All of them are `unsafe` to call as their originals are: pointers must be valid for what the
//! function reads or writes. Flags and numbers are CUDA's where nothing is said.

mod copies;
mod device;
mod errors;
mod memory;
mod pointers;
mod streams;
