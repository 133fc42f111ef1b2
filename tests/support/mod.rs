//! What the integration tests share: every Arrow type, arrays of it, a comparison that reads values, property-test
//! strategies, planted differences and an allocation counter. All but the stream
//! producer uses arrow-rs only, nothing of this crate.
#![allow(dead_code, unused_imports)]

pub mod alloc;
pub mod cases;
pub mod compare;
pub mod r#gen;
pub mod plant;
pub mod producer;
pub mod prop;
mod rng;
pub mod types;
mod values;
pub mod variants;

pub use alloc::{CountingAllocator, count};
pub use compare::{assert_same, assert_same_batch, same, same_batch};
pub use r#gen::{
    Nulls, array, batch, boolean_with_tight_nulls, cases, whole_batch, wide_batch,
    zero_column_batch,
};
pub use plant::differences;
pub use prop::{ArrayCase, BatchCase, arb_array, arb_batch, arb_data_type};
pub use rng::Rng;
pub use types::{all_types, flat_types};
pub use variants::{Made, SAME_ROWS, Variant, batch_variants, variants};
