//! What the integration tests share: every Arrow type, arrays of it, a comparison that reads values, property-test
//! strategies, planted differences, an allocation counter, and round trips. All except the stream
//! producer and the round trips uses arrow-rs only, nothing of this crate.
#![allow(dead_code, unused_imports)]

pub(crate) mod alloc;
pub(crate) mod c_stream;
pub(crate) mod cases;
pub(crate) mod compare;
#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) mod fork_kit;
pub(crate) mod r#gen;
pub(crate) mod plant;
pub(crate) mod producer;
pub(crate) mod prop;
mod rng;
pub(crate) mod round_trips;
pub(crate) mod types;
mod values;
pub(crate) mod variants;

pub(crate) use alloc::{CountingAllocator, count};
pub(crate) use cases::in_part;
pub(crate) use compare::{assert_same, assert_same_batch, same, same_batch};
pub(crate) use r#gen::{
    Nulls, array, batch, boolean_with_tight_nulls, cases, whole_batch, wide_batch,
    zero_column_batch,
};
pub(crate) use plant::differences;
pub(crate) use prop::{ArrayCase, BatchCase, arb_array, arb_batch, arb_data_type};
pub(crate) use rng::Rng;
pub(crate) use types::{all_types, flat_types};
pub(crate) use variants::{Made, SAME_ROWS, Variant, batch_variants, variants};
