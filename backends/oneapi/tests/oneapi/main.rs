//! oneAPI devices on a real SYCL: Intel's CPU device.
//!
//! Without SYCL the tests say so and pass, unless ARROW_DEVICE_ONEAPI_REQUIRED is set.

#![cfg(target_os = "linux")]

mod conformance;
mod ends;
#[path = "../../../../tests/it/support/fork_kit.rs"]
mod fork_kit;
mod gate;
mod interop;
mod programs;
mod support;
mod transfer;
mod traps;
mod wakers;

/// Every type of Arrow's, as the tests of arrow-device make them.
#[allow(dead_code, unused_imports)]
#[path = "."]
mod kit {
    #[path = "../../../../tests/it/support/cases.rs"]
    pub(crate) mod cases;
    #[path = "../../../../tests/it/support/compare.rs"]
    pub(crate) mod compare;
    #[path = "../../../../tests/it/support/gen.rs"]
    pub(crate) mod r#gen;
    #[path = "../../../../tests/it/support/rng.rs"]
    mod rng;
    #[path = "../../../../tests/it/support/types.rs"]
    pub(crate) mod types;
    #[path = "../../../../tests/it/support/values.rs"]
    mod values;
    #[path = "../../../../tests/it/support/variants.rs"]
    pub(crate) mod variants;

    pub(crate) use rng::Rng;
}
