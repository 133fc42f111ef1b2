//! What must hold on every CUDA driver beside `gpu_suite`: cudarc's types, kernels, managed memory.

#[path = "../../../examples/cuda_kernel/work.rs"]
pub(crate) mod example;
pub(crate) mod interop;
pub(crate) mod kernels;
mod managed;
