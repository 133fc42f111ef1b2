//! Streams in and out: the suite on simulated devices.

mod rigs;
#[path = "../stream_suite/mod.rs"]
mod stream_suite;
#[path = "../support/mod.rs"]
mod support;
