//! The suite of streams on WebGPU.
#![cfg(not(miri))]

mod rigs;
#[path = "../../../../tests/support/mod.rs"]
mod support;
#[path = "../support/webgpu.rs"]
mod webgpu;

#[path = "../../../../tests/stream_suite/mod.rs"]
mod stream_suite;
