//! The producer: a task that fills a consumer's handler.

mod demand;
mod foreign;
mod produce;
mod shared;

pub use produce::{Outcome, Produce, ProduceOptions, produce, produce_at};
