//! A DataFusion plugin, worked out: `WHERE` on a device.
//!
//! `DeviceFilterExec` filters batches where they are, [`PushFilterToDevice`] puts it in the place of DataFusion's own
//! filter in the plans of ordinary SQL, and the rule `DeviceTransitions` sees to what moves between the host
//! and the device. A session takes both rules, in this order:
//!
//! ```
//! # use std::sync::Arc;
//! use arrow_device_datafusion::DeviceTransitions;
//! use datafusion::execution::SessionStateBuilder;
//! let state = SessionStateBuilder::new()
//!     .with_default_features()
//!     .with_physical_optimizer_rule(Arc::new(PushFilterToDevice))
//!     .with_physical_optimizer_rule(Arc::new(DeviceTransitions))
//!     .build();
//! # let _ = state;
//! ```
//!
//! | file | what to read it for |
//! | --- | --- |
//! | `filter.rs` | an operator on a device |
//! | `rule.rs` | a rule that puts it into plans |
//! | `predicate.rs` | from DataFusion's expressions to what a kernel takes |
//! | `column.rs`, `kernels.rs` | giving columns to kernels, and taking columns from them |
//! | `sim.rs`, `cuda.rs`, `filter.ptx` | the kernels |
//! | `demo.rs` | a session, a table on a device, a query |

mod column;
#[cfg(feature = "cuda")]
mod cuda;
mod demo;
mod filter;
mod kernels;
mod predicate;
mod rule;
mod sim;

pub use demo::run;
pub use rule::PushFilterToDevice;

/// Whether there are kernels for this device: without them the rule leaves plans as they are.
///
/// # Errors
/// What the device says to its kernels.
pub fn has_kernels(device: &arrow_device::Device) -> arrow_device::Result<bool> {
    Ok(kernels::Kernels::of(device)?.is_some())
}
