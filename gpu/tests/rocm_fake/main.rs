//! The ROCm backend without a GPU: HIP's calls go to the stand-in for the CUDA driver. A program of its own:
//! the libraries take the real ones' places in the whole process. The engine, which the CUDA backend has
//! too, is tested by `cuda_fake`.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "../fake/mod.rs"]
mod fake;
#[path = "../gpu_suite/mod.rs"]
mod gpu_suite;
#[path = "../../../tests/it/support/mod.rs"]
mod support;
#[path = "../../../tests/it/support_c/mod.rs"]
mod support_c;

mod failures;
mod hip;
mod imports;
mod own;
mod vendor;
mod versions;

use fake::{block, given, places, rig};
