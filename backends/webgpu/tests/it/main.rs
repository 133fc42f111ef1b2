//! The tests of the WebGPU backend. Those that fork or end their process start this program again.
#![cfg(not(miri))]

mod adoption;
mod bindings;
mod conformance;
mod failures;
mod handover;
mod kernels;
mod program;
mod random;
mod rigs;
mod wgsl;

#[path = "../../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
#[path = "../../../support/mod.rs"]
mod suite;
#[path = "../../../../tests/it/support/mod.rs"]
mod support;

#[path = "../../examples/column_math/shader.rs"]
mod shader;

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
#[allow(dead_code)] // the example prints more
#[cfg(target_os = "linux")]
#[path = "../../../../examples/soak/watch.rs"]
mod watch;

use support::fork_kit;
