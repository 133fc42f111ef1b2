//! The tests of the WebGPU backend. Those that fork or end their process start this program again.
#![cfg(not(miri))]

mod adoption;
mod bindings;
mod column_math;
mod conformance;
mod copies;
mod failures;
mod handover;
mod kernels;
mod polling;
mod program;
mod random;
mod rigs;
mod transfer;
mod wgsl;

#[path = "../../../../tests/stream_suite/mod.rs"]
mod stream_suite;
#[path = "../../../../tests/support/mod.rs"]
mod support;

// Of the example.
#[path = "../../examples/column_math/chart.rs"]
mod chart;
#[path = "../../examples/column_math/cpu.rs"]
mod cpu;
#[path = "../../examples/column_math/input.rs"]
mod input;
#[path = "../../examples/column_math/query.rs"]
mod query;
#[path = "../../examples/column_math/shader.rs"]
mod shader;

#[cfg(target_os = "linux")]
mod exit;
#[cfg(target_os = "linux")]
mod fork;
#[cfg(target_os = "linux")]
#[path = "../../../../tests/support/fork_kit.rs"]
mod fork_kit;
#[cfg(target_os = "linux")]
mod soak;
#[allow(dead_code)] // the example prints more
#[cfg(target_os = "linux")]
#[path = "../../../../examples/soak/watch.rs"]
mod watch;

/// What the watch needs.
#[cfg(target_os = "linux")]
mod streams {
    pub(crate) use crate::Result;
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
