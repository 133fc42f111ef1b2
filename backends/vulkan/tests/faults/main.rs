//! Each call that the crate makes of Vulkan fails once: through an interposer, which takes the loader's place in the whole process.
//! The suite of streams runs here, too.
#![cfg(all(target_os = "linux", not(miri)))]

mod barriers;
mod every_call;
mod foreign;
#[path = "../support/interposer/mod.rs"]
mod interposer;
mod polls;
#[path = "../support/program.rs"]
mod program;
mod rigs;
mod stand_in;
#[path = "../../../../tests/it/support/mod.rs"]
mod support;
#[path = "../support/vulkan.rs"]
mod vulkan;

#[path = "../../../../tests/it/stream_suite/mod.rs"]
mod stream_suite;
