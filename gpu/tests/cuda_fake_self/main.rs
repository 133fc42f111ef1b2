//! The stand-in for the CUDA driver does what the tests of the CUDA backend rely on.
#![cfg(all(target_os = "linux", not(miri)))]

mod clock;
mod context;
mod fake;
mod faults;
mod fork;
#[path = "../../../tests/it/support/fork_kit.rs"]
mod fork_kit;
mod kernels;
mod memory;
mod modes;
mod raw;
mod safe;
mod work;
