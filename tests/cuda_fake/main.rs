//! The CUDA backend on a stand-in for the driver library, without a GPU. A program of its own: the
//! stand-in takes the real driver's place in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "../cuda_suite/mod.rs"]
mod cuda_suite;
#[path = "../cuda_fake_self/fake.rs"]
mod fake;
mod places;
mod rig;
mod rigs;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support_c/mod.rs"]
mod support_c;

mod conformance;
mod contexts;
mod dlpack;
mod exports;
mod failures;
mod imports;
mod interop;
mod kernel;
mod memory;
#[path = "../stream_suite/mod.rs"]
mod stream_suite;
