//! Reads record batches from Arrow IPC, Parquet and CSV files, and generates the TPC-H tables, for
//! the program `roundtrip` and the workspace's C library.

pub mod guard;
pub mod input;
mod ipc;
pub mod parts;
