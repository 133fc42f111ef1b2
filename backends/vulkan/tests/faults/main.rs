//! Each call that the crate makes of Vulkan fails once: through an interposer, which takes the loader's place in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

mod account;
mod interpose;
mod loader;
#[path = "../support/program.rs"]
mod program;
mod stand_in;
