#![doc = include_str!("../README.md")]
//!
//! # Layout
//!
//! | file | contents |
//! | --- | --- |
//! | `sys.rs`, `codes.rs`, `object.rs` | the runtime's functions, loaded at run time; its error codes; references to its objects |
//! | `platform.rs` | the devices of all platforms, and what each offers |
//! | `context.rs` | a device in a context |
//! | `event.rs`, `cells.rs` | what is asked of an event, and how a queue waits for any; the places that `sync_event` points to |
//! | `memory.rs` | the kinds of memory |
//! | `queues.rs`, `shared.rs` | what the queues of a device share: the work of all, memory for reuse |
//! | `queue.rs`, `device.rs` | the implementations of the traits |
//! | `config.rs`, `registry.rs` | how devices are opened, and found by imports |
#![deny(unsafe_op_in_unsafe_fn)]

mod cells;
mod codes;
mod config;
mod context;
mod device;
mod event;
mod memory;
mod object;
mod platform;
mod queue;
mod queues;
mod registry;
mod shared;
mod sys;

pub use config::OpenClConfig;
pub use device::OpenClDevice;
pub use memory::OpenClMemory;
pub use opencl_sys;
pub use platform::{OpenClDeviceInfo, devices};
pub use queue::OpenClQueue;
pub use registry::{OpenClDevices, register};
