//! The tests of the WebGPU backend. Those that need a process of their own start this program again.
#![cfg(not(miri))]

mod adoption;
mod bindings;
mod conformance;
mod failures;
mod handover;
mod hold;
mod kernels;
mod program;
mod random;
mod rigs;
mod wgsl;

#[path = "../../examples/column_math/shader.rs"]
mod shader;

#[path = "../../../vulkan/tests/it/timeline.rs"]
mod timeline;
