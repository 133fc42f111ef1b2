//! The tests of the oneAPI backend on a real SYCL: Intel's CPU device. Those that fork or end their process start this program again.
//!
//! Without SYCL the tests say so and pass, unless ARROW_DEVICE_ONEAPI_REQUIRED is set.

mod absent;

#[cfg(target_os = "linux")]
mod conformance;
#[cfg(target_os = "linux")]
mod ends;
#[cfg(target_os = "linux")]
#[cfg(target_os = "linux")]
#[path = "../../../support/exit.rs"]
mod exit;
#[cfg(target_os = "linux")]
mod first;
#[cfg(target_os = "linux")]
mod gate;
#[cfg(target_os = "linux")]
mod interop;
#[cfg(target_os = "linux")]
mod programs;
#[cfg(target_os = "linux")]
mod rigs;
#[cfg(target_os = "linux")]
#[cfg(target_os = "linux")]
#[path = "../../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
#[cfg(target_os = "linux")]
#[path = "../../../support/mod.rs"]
mod suite;
#[cfg(target_os = "linux")]
#[path = "../../../../tests/it/support/mod.rs"]
mod support;
#[cfg(target_os = "linux")]
mod traps;
#[cfg(target_os = "linux")]
mod waits;

use support::fork_kit;
