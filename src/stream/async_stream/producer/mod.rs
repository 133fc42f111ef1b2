//! The producer: a task that fills a foreign handler.

mod demand;
mod foreign;
mod produce;
mod shared;

pub use produce::{Outcome, Produce, ProduceOptions, produce, produce_at};
