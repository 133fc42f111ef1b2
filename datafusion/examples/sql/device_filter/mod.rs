//! A complete DataFusion plugin: `WHERE` on a device.
//!
//! `DeviceFilterExec` filters batches on their device. [`PushFilterToDevice`] replaces DataFusion's
//! own filter with it in the plans of ordinary SQL. The rule `DeviceTransitions` inserts the
//! uploads and downloads. A session takes both rules, in this order:
//!
//! ```
//! # use std::sync::Arc;
//! use arrow_device_datafusion::DeviceTransitions;
//! use datafusion::execution::SessionStateBuilder;
//! let state = SessionStateBuilder::new()
//!     .with_default_features()
//!     .with_physical_optimizer_rule(Arc::new(PushFilterToDevice::default()))
//!     .with_physical_optimizer_rule(Arc::new(DeviceTransitions))
//!     .build();
//! # let _ = state;
//! ```
//!
//! | file | shows |
//! | --- | --- |
//! | `filter.rs` | an operator on a device |
//! | `rule.rs` | a rule that inserts it into plans |
//! | `predicate.rs` | how DataFusion's expressions become arguments of a kernel |
//! | `column.rs`, `kernels.rs` | how kernels read columns and make new ones |
//! | `sim.rs`, `cuda.rs`, `filter.cu`, `filter.ptx` | the kernels |
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

pub(crate) use demo::run;
pub(crate) use rule::PushFilterToDevice;

/// Returns whether there are kernels for this device. Without them the rule does not change plans.
///
/// # Errors
/// Returns an error if the device cannot load the kernels.
pub(crate) fn has_kernels(device: &arrow_device::Device) -> arrow_device::Result<bool> {
    Ok(kernels::Kernels::of(device)?.is_some())
}
