//! The CUDA backend on a stand-in for the driver library, without a GPU. A program of its own: the
//! stand-in takes the real driver's place in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "../cuda_suite/mod.rs"]
mod cuda_suite;
#[path = "../fake/mod.rs"]
mod fake;
#[path = "../gpu_suite/mod.rs"]
mod gpu_suite;
#[path = "../../../tests/it/kernel_suite/mod.rs"]
mod kernel_suite;
#[path = "../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
#[path = "../../../tests/it/support/mod.rs"]
mod support;
#[path = "../../../tests/it/support_c/mod.rs"]
mod support_c;

#[allow(dead_code)] // what the tests of other devices need, too
#[path = "../../../share/tests/it/two.rs"]
mod two;

mod calls;
mod conformance;
mod contexts;
mod controls;
mod devices;
mod dlpack;
mod failures;
mod fork;
mod frees;
mod imports;
mod interop;
mod kernel;
mod loading;
mod memory;
mod pending;
mod processes;
mod rigs;
mod shared;
mod vendor;
mod world;

use fake::{block, given, places, rig};
