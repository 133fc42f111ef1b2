//! Every call of the runtime fails once: through the stand-in for OpenCL's loader (`fakes/opencl`), which passes all others on.
//! The suite of streams runs here, too. A program of its own: the stand-in takes the loader's place in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

mod calls;
mod endings;
mod every_call;
mod fake;
#[path = "../../../../tests/it/support/fork_kit.rs"]
mod fork_kit;
mod forks;
#[path = "../support/opencl.rs"]
mod opencl;
mod rigs;
#[path = "../../../../tests/it/support/mod.rs"]
mod support;

#[path = "../../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
