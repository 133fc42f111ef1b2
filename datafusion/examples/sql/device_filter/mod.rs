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
//! A filter of a host table, such as a Parquet file, stays on the host unless a rule before this one uploads its rows:
//! `PushFilterToDevice::uploads`.
//!
//! | file | shows |
//! | --- | --- |
//! | `rule.rs` | a rule that inserts device operators into plans, and what is worth an upload |
//! | `filter.rs` | an operator on a device |
//! | `predicate.rs`, `key.rs` | how DataFusion's expressions become arguments of kernels |
//! | `column.rs` | how kernels read columns of all layouts |
//! | `select.rs` | how kernels make new columns, in memory of just their size |
//! | `join.rs`, `held.rs` | how small results become one, and how the memory that waits for that is limited and reserved |
//! | `kernels.rs`, `cache.rs` | what kernels there are, and how a device's are loaded once |
//! | `sim.rs`, `cuda.rs`, `filter.cu`, `filter.ptx` | the kernels |
//! | `demo.rs` | sessions, a table on a device, a Parquet table, queries |

pub(crate) mod cache;
mod column;
#[cfg(feature = "cuda")]
mod cuda;
mod demo;
pub(crate) mod filter;
mod held;
mod join;
mod kernels;
mod key;
mod predicate;
mod rule;
mod select;
mod sim;

pub(crate) use demo::run;
pub(crate) use rule::PushFilterToDevice;

/// Returns whether there are kernels for this device. Filters over the batches of other devices stay with DataFusion.
pub(crate) fn has_kernels(device: &arrow_device::Device) -> bool {
    cache::exist_for(device.id().device_type)
}
