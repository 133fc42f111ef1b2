//! arrow-select of the major version of arrow-rs that the core's tests run on: they compare with its results.

#[cfg(feature = "arrow-59")]
pub use arrow_select::{concat, take};
#[cfg(feature = "arrow-58")]
pub use arrow_select_58::{concat, take};
#[cfg(feature = "arrow-60")]
pub use arrow_select_60::{concat, take};
