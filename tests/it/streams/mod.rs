//! Streams in and out: the suite on simulated devices.

mod arrays;
mod devices;
mod overlap;
mod parallel;
mod read_ahead;
pub(crate) mod rigs;
