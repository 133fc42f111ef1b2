//! Device data in [DataFusion](https://datafusion.apache.org): device streams as tables, results of
//! plans as device streams, and operators whose batches stay on a device.
//!
//! ```
//! # use std::sync::Arc;
//! # use arrow_device::{DeviceRecordBatch, Devices};
//! # use arrow_device_datafusion::{DeviceOperator, DevicePlugin, DeviceRule, DeviceSpec, DeviceTable, Verdict};
//! # use datafusion::{error::Result, execution::SessionStateBuilder, physical_plan::ExecutionPlan, prelude::SessionContext};
//! # #[derive(Debug)]
//! # struct MyPlugin;
//! # impl DevicePlugin for MyPlugin {
//! #     fn can_run(&self, _: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
//! #         Verdict::Unknown
//! #     }
//! #     fn replace(&self, _: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
//! #         unreachable!()
//! #     }
//! # }
//! # #[tokio::main]
//! # async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! # let batch = arrow_array::record_batch!(("a", Int64, [1, 1, 2]), ("b", Int64, [1, 2, 3]))?;
//! # let (device, schema) = (Devices::cpu(), batch.schema());
//! # let batches: Vec<DeviceRecordBatch> = vec![device.upload(&batch)?];
//! let rule = DeviceRule::default().with_plugin(Arc::new(MyPlugin)); // which nodes run on a device, and how
//! let state = SessionStateBuilder::new()
//!     .with_default_features()
//!     .with_physical_optimizer_rule(Arc::new(rule))
//!     .build();
//! let context = SessionContext::new_with_state(state);
//! context.register_table("t", Arc::new(DeviceTable::from_batches(schema, device, vec![batches])?))?;
//! context.sql("SELECT a, sum(b) FROM t GROUP BY a").await?.show().await?;
//! # Ok(())
//! # }
//! ```
//!
//! The plan of such a query, with a filter as the device operator:
//!
//! ```text
//! DeviceToHostExec: device=sim            <- inserted by the rule
//!   MyFilterExec: device=sim              <- your DeviceOperator, in a DeviceExec
//!     DeviceScanExec: device=sim, ...     <- a DeviceTable; reads only the columns and rows that are needed
//! ```
//!
//! A table works without the rule, too: a node on the host that reads a device node gets batches of the host. The rule makes the
//! download a node of its own. The guide
//! (`docs/guide/datafusion.md`) has a complete operator, a complete plugin and a table. The example `sql` is a larger plugin.
//!
//! # Contents
//!
//! | | |
//! | --- | --- |
//! | [`DeviceTable`] | a table over device streams: batches in memory, readers, foreign C streams, any async stream |
//! | [`DeviceSource`] | what a table is made of, for readers of files and other libraries: declares partitions, orders, constraints and statistics; gets columns, filters and limits; takes rows of `INSERT INTO` |
//! | [`execute_on_device`], [`export_plan`] | the result of any plan as a device stream, as a C stream, or through [`produce`](arrow_device::async_stream::produce) as an async C stream |
//! | [`DeviceRule`] | the physical optimizer rule that does the rest for [`DevicePlugin`]s: puts their operators into plans, with uploads, downloads and moves |
//! | [`DevicePlugin`], [`Verdict`] | says which of DataFusion's nodes run on a device, and makes their operators |
//! | [`DeviceOperator`] in a [`DeviceExec`] | runs in the place of a node: it reads its children's device streams ([`DeviceTask`]) and returns one |
//! | [`DeviceSpec`], [`DeviceResolver`] | which device a node uses, and who opens it where the plan runs |
//! | [`HostToDeviceExec`], [`DeviceToHostExec`], [`DeviceToDeviceExec`] | upload, download, and move between devices |
//! | [`DeviceRule::rewrite`] | the rule over the plan of a task, on a worker of a distributed engine |
//! | [`DeviceForm`], [`DeviceCoalesceBatchesExec`] | operators that need no kernel: projection of columns, union, limits, partitions; joining small batches |
//! | [`DeviceReservation`], [`DevicePools`] | what an operator keeps, in the device's memory pool |
//! | [`DeviceOptions`] | options of a session, such as the size of uploads, or `SET device.enable = false` |
//! | [`ran_on_host`], [`declined`] | which operators did their work on the host after all, and which nodes stayed there, and why |
//!
//! DataFusion's plans are trees of `dyn ExecutionPlan`, which cannot be downcast to a third party's
//! trait. So there is one concrete node, [`DeviceExec`], around any [`DeviceOperator`]. A parent on the
//! same device reads its device stream. No `RecordBatch` ever has device addresses. Batches pass
//! between operators on one device without a copy and without a wait: as everywhere in
//! `arrow-device`, a batch may be returned before the work that fills it is done.
//!
//! # Metrics
//!
//! For each partition, each node counts its rows and batches, the bytes that it moved each way,
//! copies, waits given to queues and waits of the host, and the host's time for its polls
//! (`EXPLAIN ANALYZE`). The counts do not include its children, and they are exact even if other
//! queries use the device ([`TransferStats::scope`](arrow_device::TransferStats::scope)). Work done
//! on a reader's own thread is not attributed to any node, nor is the download below a host node
//! that reads a device node without a transition. Metrics never read an array.
//!
//! # Memory
//!
//! Device memory and page-locked host memory are reserved in a pool of the device ([`DevicePools`]), apart from the session's own, for each
//! node and partition (`HostToDeviceExec[0]`). Uploads,
//! downloads and moves reserve the bytes of each batch, an estimate, before they copy it (of text or lists those of all rows, in
//! proportion), correct that once the batch has arrived, and keep it until their reader asks for the next batch, those ahead of the
//! reader included. A [`DeviceExec`] reserves what its operator has
//! allocated on the device for the batch that it returned last. What an operator keeps longer, or needs beside its result, it reserves
//! itself, as DataFusion asks of consumers: [`DeviceReservation`]. Batches that are passed on without a copy reserve nothing.
//!
//! `SET device.memory = ...` limits what is reserved on a device. Then queries take turns there, one at a time or as many as
//! `device.queries` says: each keeps its turn until the streams that it reads from the device have ended, so that a query which fits
//! alone waits for others instead of failing beside them. A query that has not been polled for a second is not waited for.
//!
//! A reservation beyond the limit fails the query with
//! [`DataFusionError::ResourcesExhausted`](datafusion_common::DataFusionError), which names the node, the partition, the device and
//! the bytes. `peak_mem_used` in `EXPLAIN ANALYZE` is the most that a node had reserved. Each column of a downloaded batch has
//! memory of its own, so that a node that keeps one column keeps no other's memory; except that columns of less than 16 KiB, or of
//! less than 1/64 of the batch, share pieces of about that size, and keep each other's memory.
//!
//! Small host batches are joined before they are uploaded; [`DeviceOptions`] say how far (`SET device.upload_rows = ...`).
//!
//! # Waits and errors
//!
//! Polling does not wait for what a device computes or copies, except as described for
//! [`upload_reader`](arrow_device::upload_reader), and outside a Tokio runtime, where a direct move between devices waits for
//! sizes that are on a device. A device error fails the query: with
//! [`DataFusionError::ResourcesExhausted`](datafusion_common::DataFusionError) if the device has not enough memory, and else with
//! [`DataFusionError::External`](datafusion_common::DataFusionError) around the error of `arrow-device` as its root
//! ([`find_root`](datafusion_common::DataFusionError::find_root)). Its text names the node, the partition and the device. DataFusion's own
//! errors pass through device operators unchanged. Dropping a stream drops everything that it reads
//! from.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod coalesce;
mod exec;
mod form;
mod inputs;
mod joining;
mod memory;
mod metrics;
mod options;
mod place;
mod plugin;
mod pool;
mod results;
mod rule;
mod source;
mod spec;
mod stream;
mod timer;
mod transfer;
mod transitions;
mod upload;

pub use coalesce::DeviceCoalesceBatchesExec;
pub use exec::DeviceExec;
pub use form::DeviceForm;
pub use memory::DeviceReservation;
pub use metrics::to_datafusion;
pub use options::{DeviceMemory, DeviceOptions};
pub use plugin::{DeviceOperator, DevicePlugin, DeviceTask, Verdict};
pub use pool::DevicePools;
pub use results::{BlockingReader, execute_on_device, export_plan};
pub use rule::{DeviceRule, declined, ran_on_host};
pub use source::contract::{DeviceSink, DeviceSource, InsertRequest, ScanRequest};
pub use source::insert::DeviceInsertExec;
pub use source::scan::DeviceScanExec;
pub use source::table::DeviceTable;
pub use spec::{DeviceResolver, DeviceSpec};
pub use stream::SendableDeviceStream;
pub use transitions::to_device::{DeviceToDeviceExec, HostToDeviceExec};
pub use transitions::to_host::DeviceToHostExec;

/// The programs of the page, which are tested as they stand.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/datafusion.md")]
mod page {}
