//! The CUDA backend on the real driver. Needs nothing but the driver: no network, no toolkit, no cargo.
//!
//! Without a device every test passes and one line says why. `ARROW_DEVICE_REQUIRE=cuda` makes that a
//! failure; it is a list, separated by commas.
#![cfg(not(miri))]

#[path = "../cuda_suite/mod.rs"]
mod cuda_suite;
mod example;
mod failed;
#[path = "../gpu_suite/mod.rs"]
mod gpu_suite;
#[path = "../../../tests/it/kernel_suite/mod.rs"]
#[allow(dead_code)] // the stand-in's tests use all of it
mod kernel_suite;
mod places;
#[cfg(target_os = "linux")]
mod processes;
mod skip;
#[path = "../../../tests/it/support/mod.rs"]
mod support;
#[cfg(target_os = "linux")]
#[allow(dead_code)] // what the tests of other devices need, too
#[path = "../../../share/tests/it/two.rs"]
mod two;
#[path = "../cuda_suite/vendor.rs"]
mod vendor;
