//! The async device stream: both sides, each against a hand-written C-style peer that misbehaves, and against
//! each other.

mod adapters;
mod both;
mod budget;
mod consumer;
mod consumer_errors;
mod consumer_tasks;
mod consumer_threads;
mod kit;
mod moving;
mod producer;
mod producer_device;
mod producer_errors;
mod producer_threads;
mod readers;
