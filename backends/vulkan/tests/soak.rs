//! Many small batches through streams to the device and back: memory, open files, threads and Vulkan objects stay level.
//! `ARROW_DEVICE_SOAK_BATCHES=100000` asks for more of them.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "support/interposer/mod.rs"]
mod interposer;
#[path = "support/program.rs"]
mod program;
#[path = "../../../examples/soak/streams.rs"]
mod streams;
#[path = "../../../examples/soak/watch.rs"]
mod watch;
