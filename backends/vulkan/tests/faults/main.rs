//! Each call that the crate makes of Vulkan fails once: through an interposer, which takes the loader's place in the whole process.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "../support/interposer/mod.rs"]
mod interposer;
#[path = "../support/program.rs"]
mod program;
mod every_call;
mod stand_in;
