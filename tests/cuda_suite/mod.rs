//! What must hold on every CUDA driver beside `gpu_suite`: cudarc's types, kernels, managed memory.

#[path = "../../examples/cuda_kernel/work.rs"]
pub mod example;
mod interop;
pub mod kernels;
mod managed;
