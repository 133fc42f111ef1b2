//! The tests of the Vulkan backend. Those that fork or that end their process start this program again.
#![cfg(not(miri))]

mod adoption;
mod conformance;
mod ends;
mod faults;
mod foreign;
mod program;
mod rigs;
mod watched;

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
#[path = "../../../support/soak.rs"]
mod soak;
#[allow(dead_code)] // the example prints more
#[cfg(target_os = "linux")]
#[path = "../../../../examples/soak/streams.rs"]
mod streams;
#[cfg(target_os = "linux")]
mod waits;
#[cfg(target_os = "linux")]
#[path = "../../../../examples/soak/watch.rs"]
mod watch;

use support::fork_kit;
