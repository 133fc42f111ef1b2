//! The tests of the oneAPI backend on a real SYCL: Intel's CPU device. Those that need a process of their own start this program again.
//!
//! Without SYCL the tests say so and pass, unless ARROW_DEVICE_ONEAPI_REQUIRED is set.
#![cfg(target_os = "linux")]

mod absent;
mod conformance;
mod ends;
mod interop;
mod kit;
mod rigs;
mod traps;
