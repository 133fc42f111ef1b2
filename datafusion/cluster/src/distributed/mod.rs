//! Device operators on the workers of [datafusion-distributed](https://docs.rs/datafusion-distributed).
//!
//! The coordinator plans a query and divides it into stages. Each worker runs tasks of stages. There are two ways for device operators
//! to get into the tasks:
//!
//! | | workers insert them | the coordinator inserts them |
//! | --- | --- | --- |
//! | who has the plugin's rules | workers: [`with_device_rules`](DeviceDistributedExt::with_device_rules) | the coordinator: [`with_device_plans`](DeviceDistributedExt::with_device_plans) |
//! | what travels | DataFusion's own plans | plans with device nodes: each plugin needs a [`DevicePlanCodec`](crate::codec::DevicePlanCodec) on both sides |
//! | workers without devices | run their tasks on the host | get no task with device nodes, by [`with_device_placement`](DeviceDistributedExt::with_device_placement) |
//! | tables on devices | no | by name: [`with_device_tables`](DeviceDistributedExt::with_device_tables) |
//! | joins and other operators that read a child as a whole | in all tasks of a stage, since the stages are those of DataFusion's operators | in stages of one task |
//! | `EXPLAIN` | DataFusion's operators; those of `EXPLAIN ANALYZE` may have the metrics of their neighbours | device operators, with their metrics |
//!
//! Let the workers insert them unless queries read tables on devices, or unless the coordinator must decide which worker runs what:
//! it needs the least, and a mixed cluster just works. Both can be combined.
//!
//! # Workers insert the operators
//!
//! The coordinator and the clients are set up as without devices. A worker:
//!
//! ```
//! # use std::sync::Arc;
//! use arrow_device::{ArrowDeviceType, Devices};
//! use arrow_device_cluster::distributed::DeviceDistributedExt;
//! use arrow_device_datafusion::{DeviceResolver, DeviceSpec, DeviceUploads};
//! # use datafusion::common::config::ConfigOptions;
//! use datafusion::error::DataFusionError;
//! use datafusion::physical_optimizer::PhysicalOptimizerRule;
//! # use datafusion::physical_plan::{ExecutionPlan, filter::FilterExec};
//! use datafusion_distributed::{Worker, WorkerQueryContext};
//! # #[derive(Debug)]
//! # struct MyRule;
//! # impl PhysicalOptimizerRule for MyRule {
//! #     fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> datafusion::error::Result<Arc<dyn ExecutionPlan>> {
//! #         Ok(plan)
//! #     }
//! #     fn name(&self) -> &str {
//! #         "MyRule"
//! #     }
//! #     fn schema_check(&self) -> bool {
//! #         true
//! #     }
//! # }
//! # fn supported(node: &Arc<dyn ExecutionPlan>) -> bool {
//! #     node.downcast_ref::<FilterExec>().is_some()
//! # }
//! # fn main() -> arrow_device::Result<()> {
//! let devices = DeviceResolver::of([Devices::simulated()?]); // opened once, at the start
//! let uploads = DeviceUploads::new(DeviceSpec::any(ArrowDeviceType::EXT_DEV), supported);
//! let rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> =
//!     vec![Arc::new(uploads.with_min_rows(100_000)), Arc::new(MyRule)];
//! let worker = Worker::from_session_builder(move |query: WorkerQueryContext| {
//!     let builder = query.builder.with_device_resolver(devices.clone());
//!     let builder = builder.with_device_rules(rules.clone());
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
//! # use arrow_device_datafusion::{DeviceResolver, DeviceSpec};
//! # use datafusion::error::DataFusionError;
//! use datafusion::execution::SessionStateBuilder;
//! # use datafusion::physical_optimizer::PhysicalOptimizerRule;
//! use datafusion_distributed::{DistributedExt, SessionStateBuilderExt, Worker, WorkerQueryContext, WorkerResolver};
//! # use url::Url;
//! # fn with(
//! #     rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>, my_codec: Arc<dyn DevicePlanCodec>, resolver: impl WorkerResolver + 'static,
//! #     with_gpu: Url, devices: DeviceResolver, tables: DeviceTables,
//! # ) {
//! let cuda = DeviceSpec::any(ArrowDeviceType::CUDA);
//! let codec = DeviceCodec::new().with_plan(my_codec);
//! let coordinator = SessionStateBuilder::new()
//!     .with_default_features()
//!     .with_device_plans(rules, codec.clone())
//!     .with_device_placement(DevicePlacement::of([(with_gpu, vec![cuda])]))
//!     .with_distributed_worker_resolver(resolver)
//!     .with_distributed_planner()
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
//! The coordinator opens no device and needs none. It applies the rules to the whole plan before it is divided. Exchanges between
//! partitions stay DataFusion's, since the stages begin and end there.
//!
//! # What happens when something fails
//!
//! | what | the query |
//! | --- | --- |
//! | an operation of a device fails, or its memory is exhausted | fails with the device's error; datafusion-distributed does not run tasks again |
//! | a rule panics, or changes the schema, partitions or order | fails with an error that names the rule; the worker goes on |
//! | a worker has no device for a task that wants one | fails with an error that names the operator and the devices that there are |
//! | no worker offers the device of a stage | fails before the stage starts, with placement; see [`DevicePlacement`] |
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
