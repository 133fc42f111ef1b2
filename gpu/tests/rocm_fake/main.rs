//! The ROCm backend without a GPU: HIP's calls go to the stand-in for the CUDA driver. A program of its own:
//! the libraries take the real ones' places in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "../gpu_fake/block.rs"]
mod block;
#[path = "../cuda_fake_self/fake.rs"]
mod fake;
#[path = "../gpu_fake/fork.rs"]
mod fork;
#[path = "../../../tests/it/support/fork_kit.rs"]
mod fork_kit;
#[path = "../gpu_fake/given.rs"]
mod given;
#[path = "../gpu_suite/mod.rs"]
mod gpu_suite;
#[path = "../hip_on_cuda/hip.rs"]
mod hip;
mod own;
#[path = "../gpu_fake/places.rs"]
mod places;
#[path = "../cuda_fake_self/raw.rs"]
mod raw;
#[path = "../gpu_fake/rig.rs"]
mod rig;
#[path = "../gpu_fake/rigs.rs"]
mod rigs;
#[path = "../../../tests/it/support/mod.rs"]
mod support;
#[path = "../../../tests/it/support_c/mod.rs"]
mod support_c;
mod vendor;
mod versions;

#[path = "../gpu_fake/calls.rs"]
mod calls;
#[path = "../gpu_fake/conformance.rs"]
mod conformance;
#[path = "../gpu_fake/devices.rs"]
mod devices;
#[path = "../gpu_fake/exports.rs"]
mod exports;
#[path = "../gpu_fake/failures.rs"]
mod failures;
#[path = "../gpu_fake/frees.rs"]
mod frees;
#[path = "../gpu_fake/imports.rs"]
mod imports;
#[path = "../gpu_fake/memory.rs"]
mod memory;
#[path = "../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
#[path = "../gpu_fake/waits.rs"]
mod waits;
