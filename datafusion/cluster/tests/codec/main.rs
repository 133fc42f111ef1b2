//! Device plans as bytes: every node travels and gives the same rows, what cannot travel says so, and bytes that make no sense are errors.
#![cfg(feature = "codec")]

#[cfg(feature = "ballista")]
mod ballista_client;
#[allow(dead_code, unused_imports)]
#[path = "../../../examples/sql/device_filter/mod.rs"]
mod device_filter;
#[path = "../../examples/cluster/codec.rs"]
mod filter_codec;
mod hostile;
mod kit;
mod logical;
mod nodes;
mod refused;
mod tables;
