//! Reads record batches from files of every kind that arrow-rs knows, and from TPC-H's generator. For the program
//! `roundtrip` and the workspace's C library; nothing else should use it.

pub mod guard;
pub mod input;
mod ipc;
