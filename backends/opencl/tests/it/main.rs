//! The tests of the OpenCL backend. Those that fork, replace OpenCL's loader or need another environment start this program again.
#![cfg(not(miri))]

mod adoption;
mod conformance;
mod failed_events;
#[cfg(unix)]
mod interop;
mod rigs;

#[path = "../../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
#[path = "../../../support/mod.rs"]
mod suite;
#[path = "../../../../tests/it/support/mod.rs"]
mod support;

#[cfg(target_os = "linux")]
#[path = "../../../support/exit.rs"]
mod exit;
#[cfg(target_os = "linux")]
mod fake;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod loading;

use support::fork_kit;
