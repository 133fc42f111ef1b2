//! The CUDA backend on a stand-in for the driver library, without a GPU. A program of its own: the
//! stand-in takes the real driver's place in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "../gpu_fake/block.rs"]
mod block;
#[path = "../cuda_suite/mod.rs"]
mod cuda_suite;
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
#[path = "../gpu_fake/places.rs"]
mod places;
#[path = "../gpu_fake/rig.rs"]
mod rig;
#[path = "../gpu_fake/rigs.rs"]
mod rigs;
#[path = "../../../tests/it/support/mod.rs"]
mod support;
#[path = "../../../tests/it/support_c/mod.rs"]
mod support_c;
mod vendor;

#[path = "../gpu_fake/calls.rs"]
mod calls;
#[path = "../gpu_fake/conformance.rs"]
mod conformance;
mod contexts;
#[path = "../gpu_fake/devices.rs"]
mod devices;
mod dlpack;
#[path = "../gpu_fake/exports.rs"]
mod exports;
#[path = "../gpu_fake/failures.rs"]
mod failures;
#[path = "../gpu_fake/frees.rs"]
mod frees;
#[path = "../gpu_fake/imports.rs"]
mod imports;
mod interop;
mod kernel;
#[path = "../../../tests/it/kernel_suite/mod.rs"]
mod kernel_suite;
mod loading;
mod managed;
#[path = "../gpu_fake/memory.rs"]
mod memory;
mod pending;
#[path = "../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
#[path = "../gpu_fake/waits.rs"]
mod waits;
