//! oneAPI devices on a real SYCL: Intel's CPU device.
//!
//! Without SYCL the tests say so and pass, unless ARROW_DEVICE_ONEAPI_REQUIRED is set.

#![cfg(target_os = "linux")]

mod conformance;
mod interop;
mod programs;
mod support;
mod traps;
