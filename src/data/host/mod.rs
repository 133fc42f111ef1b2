//! Conversion between arrow-rs data in host memory and trees, without copying values.

mod unwrap;
mod wrap;

pub(crate) use unwrap::{to_array, to_batch, unwrap};
pub(crate) use wrap::wrap_batch;
