//! What must hold of tables on devices, of plans with device operators in them, and of their results.

mod asked;
mod errors;
mod guide;
mod joined;
mod kept;
mod kit;
mod lifetime;
mod memory;
mod merged;
mod nodes;
mod on_host;
mod operator;
mod ops;
mod placed;
mod plans;
mod plugin;
mod prelude;
mod queries;
mod readers;
mod reserved;
mod runtimes;
mod sink;
mod slt;
mod source;
mod spec;
mod tpch;
mod transfers;
mod uploaded;

/// The example's plugin.
#[allow(dead_code, unused_imports)]
#[path = "../../examples/sql/device_filter/mod.rs"]
mod device_filter;

/// What the core's own tests use, too.
#[allow(dead_code, unreachable_pub, unused_imports)]
#[path = "."]
mod support {
    #[path = "../../../tests/it/support/cases.rs"]
    mod cases;
    #[path = "../../../tests/it/support/compare.rs"]
    pub(crate) mod compare;
    #[path = "../../../tests/it/support/gen.rs"]
    pub(crate) mod r#gen;
    #[path = "../../../tests/it/support/rng.rs"]
    mod rng;
    #[path = "../../../tests/it/support/types.rs"]
    pub(crate) mod types;
    #[path = "../../../tests/it/support/values.rs"]
    mod values;
    #[path = "../../../tests/it/support/variants.rs"]
    mod variants;
}
