//! Tests of the CUDA and ROCm devices (`tests`), and of the guide's kernels, which are compiled here.

#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/kernels.md")]
mod page {}
