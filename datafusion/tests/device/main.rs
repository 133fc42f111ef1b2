//! What must hold of plans with device operators in them.

mod errors;
mod kit;
mod lifetime;
mod merged;
mod operator;
mod plans;
mod runtimes;
mod schemas;
mod sink;
mod small;
mod transfers;

/// What the core's own tests use, too.
#[allow(dead_code, unreachable_pub, unused_imports)]
#[path = "."]
mod support {
    #[path = "../../../tests/support/cases.rs"]
    mod cases;
    #[path = "../../../tests/support/compare.rs"]
    pub(crate) mod compare;
    #[path = "../../../tests/support/gen.rs"]
    pub(crate) mod r#gen;
    #[path = "../../../tests/support/rng.rs"]
    mod rng;
    #[path = "../../../tests/support/types.rs"]
    pub(crate) mod types;
    #[path = "../../../tests/support/values.rs"]
    mod values;
    #[path = "../../../tests/support/variants.rs"]
    mod variants;
}
