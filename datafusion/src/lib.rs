//! [DataFusion](https://datafusion.apache.org): device streams as tables, results of plans as device streams, and operators
//! whose batches stay on a device.
//!
//! ```text
//! DeviceToHostExec: device=sim            <- DeviceTransitions puts it where sides differ
//!   MyFilterExec: device=sim              <- a DevicePlan of yours, in a DeviceExec
//!     DeviceScanExec: device=sim, ...     <- a DeviceTable; only what is asked for is read
//! ```
//!
//! | | |
//! | --- | --- |
//! | [`DeviceTable`] | a table over device streams: batches that are there, readers, foreign C streams, anything async |
//! | [`execute_on_device`], [`export_plan`] | any plan's result as a device stream: to go on with, as a C stream, or through [`produce`](arrow_device::async_stream::produce) as an async one |
//! | [`DevicePlan`] in a [`DeviceExec`] | an operator: it reads its children's device streams ([`execute_child`]) and gives one |
//! | [`HostToDeviceExec`], [`DeviceToHostExec`] | the two ways between the host and a device |
//! | [`DeviceTransitions`] | the physical optimizer rule that puts them where sides differ, and takes away those that are not needed |
//!
//! DataFusion's plans are trees of `dyn ExecutionPlan`, in which a third party's trait cannot be found: so there is one
//! concrete node, [`DeviceExec`], around any [`DevicePlan`]. A parent on the same device takes its device stream; nobody ever sees
//! a `RecordBatch` with device addresses. Batches pass between operators on one device without a copy and without a wait:
//! a batch may be given before the work that fills it is done, as everywhere in `arrow-device`.
//!
//! # In a session
//!
//! ```
//! # use std::sync::Arc;
//! # use arrow_device::{DeviceRecordBatch, Devices};
//! # use arrow_device_datafusion::{DeviceTable, DeviceTransitions};
//! # use datafusion::{common::config::ConfigOptions, error::Result, physical_optimizer::PhysicalOptimizerRule};
//! # use datafusion::{execution::SessionStateBuilder, physical_plan::ExecutionPlan, prelude::SessionContext};
//! # #[derive(Debug)]
//! # struct MyRule;
//! # impl PhysicalOptimizerRule for MyRule {
//! #     fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
//! #         Ok(plan)
//! #     }
//! #     fn name(&self) -> &str {
//! #         "MyRule"
//! #     }
//! #     fn schema_check(&self) -> bool {
//! #         true
//! #     }
//! # }
//! # #[tokio::main]
//! # async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! # let batch = arrow_array::record_batch!(("a", Int64, [1, 1, 2]), ("b", Int64, [1, 2, 3]))?;
//! # let (device, schema) = (Devices::cpu(), batch.schema());
//! # let batches: Vec<DeviceRecordBatch> = vec![device.upload(&batch)?];
//! let state = SessionStateBuilder::new()
//!     .with_default_features()
//!     .with_physical_optimizer_rule(Arc::new(MyRule))              // makes device operators
//!     .with_physical_optimizer_rule(Arc::new(DeviceTransitions))   // and this comes after it
//!     .build();
//! let context = SessionContext::new_with_state(state);
//! context.register_table("t", Arc::new(DeviceTable::from_batches(schema, device, vec![batches])?))?;
//! context.sql("SELECT a, sum(b) FROM t GROUP BY a").await?.show().await?;
//! # Ok(())
//! # }
//! ```
//!
//! A table works without the rule too: its scan has a [`DeviceToHostExec`] above it from the start, which the rule takes away
//! under a device operator. (DataFusion may push a sort or a limit below it; the rule puts it back above the scan.) The README has
//! a whole operator; the example `sql` is a plugin whose filter runs on the device in real SQL.
//!
//! # Metrics
//!
//! Each node counts, for each partition, its rows and batches, the bytes that it moved each way, copies, waits given to queues
//! and waits of the host, and the host's time for its polls (`EXPLAIN ANALYZE`). They are its own, not its children's, and exact
//! though other queries use the device ([`TransferStats::scope`](arrow_device::TransferStats::scope)). Work that is done
//! on a reader's own thread is not attributed to any node, nor is the download below a host node that reads a device node
//! without a transition. Metrics never read an array.
//!
//! # Waits and errors
//!
//! Polling never blocks on a device, except for [`UploadingStream`](arrow_device::async_stream::UploadingStream). An error of a device
//! fails the query: [`DataFusionError::ArrowError`](datafusion_common::DataFusionError) around `arrow-device`'s ([`to_datafusion`]), with the device, the operation
//! and the text. DataFusion's own errors go through device operators and come out as they were. Dropping a stream
//! drops everything that it reads from.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod metrics;
mod plan;
mod rule;
mod sink;
mod source;
mod stream;
mod transitions;
mod upload;

pub use metrics::to_datafusion;
pub use plan::{DeviceExec, DevicePlan, execute_child};
pub use rule::DeviceTransitions;
pub use sink::{execute_on_device, export_plan};
pub use source::{DeviceScanExec, DeviceTable, OpenPartition};
pub use stream::SendableDeviceStream;
pub use transitions::{DeviceToHostExec, HostToDeviceExec};
