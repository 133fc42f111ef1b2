//! The core's test arrays: one of every type, the same rows in other layouts, and copies with one
//! difference.
#![allow(dead_code, unreachable_pub, unused_imports)]

#[path = "../../../tests/it/support/cases.rs"]
mod cases;
#[path = "../../../tests/it/support/gen.rs"]
mod r#gen;
#[path = "../../../tests/it/support/plant.rs"]
mod plant;
#[path = "../../../tests/it/support/rng.rs"]
mod rng;
#[path = "../../../tests/it/support/types.rs"]
mod types;
#[path = "../../../tests/it/support/values.rs"]
mod values;
#[path = "../../../tests/it/support/variants.rs"]
mod variants;

pub(crate) use r#gen::{Nulls, array};
pub(crate) use plant::differences;
pub(crate) use types::all_types;
pub(crate) use variants::{Variant, variants};
