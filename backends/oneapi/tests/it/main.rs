//! The tests of the oneAPI backend on a real SYCL: Intel's CPU device. Those that fork or end their process start this program again.
//!
//! Without SYCL the tests say so and pass, unless ARROW_DEVICE_ONEAPI_REQUIRED is set.

mod absent;

#[cfg(target_os = "linux")]
mod conformance;
#[cfg(target_os = "linux")]
mod ends;
#[cfg(target_os = "linux")]
mod exit;
#[cfg(target_os = "linux")]
#[path = "../../../../tests/support/fork_kit.rs"]
mod fork_kit;
#[cfg(target_os = "linux")]
mod gate;
#[cfg(target_os = "linux")]
mod interop;
#[cfg(target_os = "linux")]
mod programs;
#[cfg(target_os = "linux")]
mod rigs;
#[cfg(target_os = "linux")]
mod transfer;
#[cfg(target_os = "linux")]
mod traps;
#[cfg(target_os = "linux")]
mod wakers;

/// Every type of Arrow's, as the tests of arrow-device make them.
#[allow(dead_code, unused_imports)]
#[path = "."]
mod kit {
    #[path = "../../../../tests/support/cases.rs"]
    pub(crate) mod cases;
    #[path = "../../../../tests/support/compare.rs"]
    pub(crate) mod compare;
    #[path = "../../../../tests/support/gen.rs"]
    pub(crate) mod r#gen;
    #[path = "../../../../tests/support/rng.rs"]
    mod rng;
    #[path = "../../../../tests/support/types.rs"]
    pub(crate) mod types;
    #[path = "../../../../tests/support/values.rs"]
    mod values;
    #[path = "../../../../tests/support/variants.rs"]
    pub(crate) mod variants;

    pub(crate) use rng::Rng;
}
