//! The suite of streams on WebGPU.
#![cfg(not(miri))]

mod rigs;
#[path = "../../../../tests/it/support/mod.rs"]
mod support;
#[path = "../support/webgpu.rs"]
mod webgpu;

#[path = "../../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
