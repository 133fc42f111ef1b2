//! The functions of the driver. Parameters are named as in its documentation.
//!
//! All of them are `unsafe` to call as their originals are: pointers must be valid for what the
//! function reads or writes. Handles may be anything.

mod context;
mod copies;
mod device;
mod events;
mod home;
mod ipc;
mod memory;
mod modules;
mod pointers;
mod pools;
mod streams;
mod virtual_memory;
