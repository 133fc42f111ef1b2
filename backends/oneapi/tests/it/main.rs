//! The tests of the oneAPI backend on a real SYCL: Intel's CPU device. Those that fork or end their process start this program again.
//!
//! Without SYCL the tests say so and pass, unless ARROW_DEVICE_ONEAPI_REQUIRED is set.
#![cfg(target_os = "linux")]

mod absent;
mod conformance;
mod ends;
#[path = "../../../support/exit.rs"]
mod exit;
mod interop;
mod kit;
mod rigs;
#[path = "../../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
#[path = "../../../support/mod.rs"]
mod suite;
#[path = "../../../../tests/it/support/mod.rs"]
mod support;
mod traps;

use support::fork_kit;
