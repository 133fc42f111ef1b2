//! A complete DataFusion plugin: `WHERE`, decimal arithmetic and aggregates on a device.
//!
//! `DeviceFilterExec` filters batches on their device, `DeviceArithmeticExec` computes columns, and `DeviceAggregateExec` groups rows.
//! [`FilterPlugin`] puts them in the place of DataFusion's own nodes in the plans of ordinary SQL, and the session's `DeviceRule` does the rest:
//!
//! ```
//! # use std::sync::Arc;
//! use arrow_device_datafusion::DeviceRule;
//! use datafusion::execution::SessionStateBuilder;
//! let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::whole()));
//! let state = SessionStateBuilder::new()
//!     .with_default_features()
//!     .with_physical_optimizer_rule(Arc::new(rule))
//!     .build();
//! # let _ = state;
//! ```
//!
//! A filter of a host table, such as a Parquet file, stays on the host unless the rule uploads its rows: `DeviceRule::with_uploads`.
//!
//! | file | shows |
//! | --- | --- |
//! | `rule.rs` | a plugin, and what is worth an upload |
//! | `filter.rs`, `arithmetic.rs`, `group.rs` | operators on a device |
//! | `predicate.rs`, `key.rs`, `aggregate.rs` | how DataFusion's expressions and aggregates become parameters of kernels |
//! | `column.rs` | how kernels read columns of all layouts |
//! | `select.rs` | how kernels make new columns, in memory of just their size |
//! | `chunks.rs`, `held.rs` | how the host waits for several batches at once, and how the memory that waits for that is limited and reserved |
//! | `kernels.rs`, `cache.rs` | how kernels are launched, how a batch is lent to them once for all of its buffers, and how a device's are loaded once |
//! | `sim.rs`, `cuda.rs`, `filter.cu`, `filter.ptx` | the kernels |
//! | `demo.rs` | sessions, a table on a device, a table on the host, queries |

mod aggregate;
mod arithmetic;
pub(crate) mod cache;
mod chunks;
mod column;
#[cfg(feature = "cuda")]
mod cuda;
mod demo;
pub(crate) mod filter;
mod group;
mod held;
mod kernels;
mod key;
mod predicate;
mod rule;
mod select;
mod sim;

pub(crate) use demo::run;
pub(crate) use rule::FilterPlugin;
