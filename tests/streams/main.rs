//! Streams in and out: the suite on simulated devices.

mod arrays;
mod devices;
mod overlap;
mod parallel;
mod read_ahead;
mod rigs;
#[path = "../simkit/mod.rs"]
mod simkit;
#[path = "../stream_suite/mod.rs"]
mod stream_suite;
#[path = "../support/mod.rs"]
mod support;
