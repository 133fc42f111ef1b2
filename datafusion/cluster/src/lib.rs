//! Device operators on the workers of distributed DataFusion engines.
//!
//! A plugin for [`arrow_device_datafusion`] puts device operators into the plans of one process. This crate takes them to the
//! workers of a cluster. The workers use their own devices; whoever plans the query needs none.
//!
//! | feature | engine | module |
//! | --- | --- | --- |
//! | `ballista` | [Ballista](https://datafusion.apache.org/ballista) 55 | [`ballista`] |
//! | `distributed` | [datafusion-distributed](https://docs.rs/datafusion-distributed) 4 | [`distributed`] |
//! | `codec`, part of `distributed` | plans with device nodes as bytes, for others, too | [`codec`] |
//!
//! Between the stages of a query, batches are on the host: both engines exchange them as Arrow IPC, through files or streams. So
//! each stage uploads what its device operators read, and downloads what they return.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]
#![warn(missing_debug_implementations, unreachable_pub)]

#[cfg(feature = "ballista")]
pub mod ballista;
#[cfg(feature = "codec")]
pub mod codec;
#[cfg(feature = "distributed")]
pub mod distributed;
