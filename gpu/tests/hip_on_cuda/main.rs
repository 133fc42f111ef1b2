//! HIP's runtime library on the stand-in for the CUDA driver does what the tests of the ROCm backend
//! rely on.
#![cfg(all(target_os = "linux", not(miri)))]

mod devices;
mod errors;
#[path = "../cuda_fake_self/fake.rs"]
mod fake;
mod hip;
mod memory;
mod no_driver;
#[path = "../cuda_fake_self/raw.rs"]
mod raw;
mod work;
