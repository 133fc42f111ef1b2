//! The async device stream: both sides, each against a hand-written C-style peer that misbehaves, and against
//! each other.

#[cfg(not(miri))]
mod adapters;
mod both;
mod consumer;
mod consumer_tasks;
mod consumer_threads;
pub(crate) mod kit;
pub(crate) mod producer;
#[cfg(not(miri))]
mod producer_device;
mod producer_threads;
mod readers;
