//! Device operators on the workers of [datafusion-distributed](https://docs.rs/datafusion-distributed).
//!
//! The coordinator plans a query and divides it into stages. Each worker runs tasks of stages. There are two ways for device operators
//! to get into the tasks:
//!
//! | | workers insert them | the coordinator inserts them |
//! | --- | --- | --- |
//! | who has the plugins | workers: [`with_device_rule`](DeviceDistributedExt::with_device_rule) | the coordinator: [`with_device_plans`](DeviceDistributedExt::with_device_plans) |
//! | what travels | DataFusion's own plans | plans with device nodes: each plugin needs a [`DevicePlanCodec`](crate::codec::DevicePlanCodec) on both sides |
//! | workers without devices | have no plugins, and run their tasks on the host | get no task with device nodes, by [`with_device_placement`](DeviceDistributedExt::with_device_placement) |
//! | tables on the workers' devices | no | by name: [`with_device_tables`](DeviceDistributedExt::with_device_tables) |
//! | dynamic task counts | yes | no |
//! | `display_plan_ascii`, `EXPLAIN ANALYZE` | show DataFusion's operators, and `EXPLAIN ANALYZE` counts some metrics at a neighbour of their node | show device operators, with their metrics |
//!
//! Let the workers insert them unless queries read tables on devices, or the coordinator must decide which worker runs what: it needs
//! the least, and a mixed cluster just works. Both can be combined: with tables on devices and plugins on the workers, the coordinator
//! takes `with_device_plans` without a rule.
//!
//! Either way the coordinator needs no device, and a query is divided at DataFusion's own operators, before device operators are inserted. So
//! joins, aggregations and limits are as correct as without devices. What the coordinator runs itself stays on the host: the last
//! stage, and all of a query that has one task per stage, as with a single worker. Between stages, rows are host batches
//! in Arrow IPC: a stage uploads what its device operators read, and downloads what they return.
//!
//! # Workers insert the operators
//!
//! The coordinator and the clients are set up as without devices. A worker:
//!
//! ```
//! # use std::sync::Arc;
//! use arrow_device::{ArrowDeviceType, Devices};
//! use arrow_device_cluster::distributed::DeviceDistributedExt;
//! use arrow_device_datafusion::{DeviceResolver, DeviceRule, DeviceSpec};
//! # use arrow_device_datafusion::{DeviceOperator, DevicePlugin, Verdict};
//! use datafusion::error::DataFusionError;
//! # use datafusion::physical_plan::ExecutionPlan;
//! use datafusion_distributed::{Worker, WorkerQueryContext};
//! # #[derive(Debug)]
//! # struct MyPlugin;
//! # impl DevicePlugin for MyPlugin {
//! #     fn can_run(&self, _: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
//! #         Verdict::Unknown
//! #     }
//! #     fn replace(&self, _: &Arc<dyn ExecutionPlan>) -> datafusion::error::Result<Arc<dyn DeviceOperator>> {
//! #         unreachable!()
//! #     }
//! # }
//! # fn main() -> arrow_device::Result<()> {
//! let devices = DeviceResolver::of([Devices::simulated()?]); // opened once, at the start
//! let rule = DeviceRule::default().with_plugin(Arc::new(MyPlugin)).with_uploads(DeviceSpec::any(ArrowDeviceType::EXT_DEV), 100_000);
//! let worker = Worker::from_session_builder(move |query: WorkerQueryContext| {
//!     let builder = query.builder.with_device_resolver(devices.clone());
//!     let builder = builder.with_device_rule(rule.clone());
//!     async move { Ok::<_, DataFusionError>(builder.build()) }
//! });
//! # let _ = worker;
//! # Ok(())
//! # }
//! ```
//!
//! # The coordinator inserts them
//!
//! ```
//! # use std::sync::Arc;
//! # use arrow_device::{ArrowDeviceType, Devices};
//! use arrow_device_cluster::codec::{DeviceCodec, DeviceTables};
//! # use arrow_device_cluster::codec::DevicePlanCodec;
//! use arrow_device_cluster::distributed::{DeviceDistributedExt, DevicePlacement};
//! # use arrow_device_datafusion::{DeviceResolver, DeviceRule, DeviceSpec};
//! # use datafusion::error::DataFusionError;
//! use datafusion::execution::SessionStateBuilder;
//! use datafusion_distributed::{DistributedExt, Worker, WorkerQueryContext, WorkerResolver};
//! # use url::Url;
//! # fn with(
//! #     rule: DeviceRule, my_codec: Arc<dyn DevicePlanCodec>, resolver: impl WorkerResolver + 'static,
//! #     with_gpu: Url, devices: DeviceResolver, tables: DeviceTables,
//! # ) {
//! let cuda = DeviceSpec::any(ArrowDeviceType::CUDA);
//! let codec = DeviceCodec::new().with_plan(my_codec);
//! let coordinator = SessionStateBuilder::new()
//!     .with_default_features()
//!     .with_distributed_worker_resolver(resolver)
//!     .with_device_plans(Some(rule), codec.clone()) // in place of with_distributed_planner
//!     .with_device_placement(DevicePlacement::of([(with_gpu, vec![cuda])]))
//!     .build();
//! let worker = Worker::from_session_builder(move |query: WorkerQueryContext| {
//!     let builder = query.builder.with_device_resolver(devices.clone());
//!     let builder = builder.with_device_codec(codec.clone()).with_device_tables(tables.clone());
//!     async move { Ok::<_, DataFusionError>(builder.build()) }
//! });
//! # let _ = (coordinator, worker);
//! # }
//! ```
//!
//! The coordinator applies the rule to each stage that workers run.
//!
//! # Tables on the workers' devices
//!
//! Each worker registers its tables by name. The coordinator registers what it must know to plan:
//! [`DeviceTable::declared`](arrow_device_datafusion::DeviceTable::declared), or a source with the orders and statistics that the table has. The
//! workers' tables must have the same rows: the tasks of a stage divide the partitions of a table among themselves, and each reads its own
//! from the table of its worker. A table of one partition is read by one task, which the engine may run on the coordinator; then the query
//! fails unless the coordinator has the table, too.
//!
//! # What happens when something fails
//!
//! | what | the query |
//! | --- | --- |
//! | an operation of a device fails, or its memory is exhausted | fails with the device's error; datafusion-distributed does not run tasks again |
//! | a rule panics, or changes the schema, partitions or order | fails with an error that names the rule; the worker goes on |
//! | a worker has no device for a task that wants one | fails with an error that names the operator and the devices that there are |
//! | no worker offers the device of a stage | with placement, fails before the stage starts; see [`DevicePlacement`] |
//! | a node has no codec, or a table no name | fails when it is planned |
//! | the codec, or a table, is missing on a worker | fails with an error that says what to register |
//! | the client goes, or cancels | the coordinator ends its streams, and the workers drop their tasks; their device memory is freed |
//! | a worker goes | fails with the error of the connection; a query after it needs a resolver that does not return that worker any more |
//!
//! Options for device nodes, [`DeviceOptions`](arrow_device_datafusion::DeviceOptions), travel from the coordinator with
//! `with_distributed_option_extension(DeviceOptions::default())`, and workers read them with
//! `with_distributed_option_extension_from_headers::<DeviceOptions>(&query.headers)`.

mod counts;
mod ext;
mod placement;
mod planner;
mod scans;
mod stage;

pub use ext::DeviceDistributedExt;
pub use placement::DevicePlacement;
