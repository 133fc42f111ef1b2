//! The core's test arrays: one of every type, the same rows in other layouts, and copies with one
//! difference.
#![allow(dead_code, unreachable_pub, unused_imports)]

#[path = "../../../tests/support/cases.rs"]
mod cases;
#[path = "../../../tests/support/gen.rs"]
mod r#gen;
#[path = "../../../tests/support/plant.rs"]
mod plant;
#[path = "../../../tests/support/rng.rs"]
mod rng;
#[path = "../../../tests/support/types.rs"]
mod types;
#[path = "../../../tests/support/values.rs"]
mod values;
#[path = "../../../tests/support/variants.rs"]
mod variants;

pub(crate) use r#gen::{Nulls, array};
pub(crate) use plant::differences;
pub(crate) use types::all_types;
pub(crate) use variants::{Variant, variants};
