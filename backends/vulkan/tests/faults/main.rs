//! Each call that the crate makes of Vulkan fails once: through an interposer, which takes the loader's place in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

mod every_call;
mod foreign;
#[path = "../support/interposer/mod.rs"]
mod interposer;
#[path = "../support/program.rs"]
mod program;
mod stand_in;
#[path = "../support/vulkan.rs"]
mod vulkan;
