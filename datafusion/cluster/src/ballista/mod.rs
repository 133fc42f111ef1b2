//! Device operators on the executors of [Ballista](https://datafusion.apache.org/ballista).
//!
//! Ballista's scheduler divides a query into stages, and a stage into tasks. An executor gets the plan of a task, and its
//! *execution engine* runs it. [`DeviceEngine`] is an execution engine that first puts device operators into the task's plan, those of
//! plugins, as [`DeviceRule::rewrite`](arrow_device_datafusion::DeviceRule::rewrite) does, and then lets another engine run it. The
//! scheduler and the clients are Ballista's own, as they are: plans travel without device nodes, so no codec is needed. That holds
//! for pull and push scheduling, with Ballista's adaptive planner and without.
//!
//! # Setting up an executor
//!
//! An executor needs an engine with a rule, and a configuration with its devices:
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use arrow_device::{ArrowDeviceType, Devices};
//! use arrow_device_cluster::ballista::DeviceEngine;
//! use arrow_device_datafusion::{DeviceResolver, DeviceRule, DeviceSpec};
//! # use arrow_device_datafusion::{DeviceOperator, DevicePlugin, Verdict};
//! use ballista_core::utils::default_config_producer;
//! use ballista_executor::executor_process::{ExecutorProcessConfig, start_executor_process};
//! # use datafusion::physical_plan::ExecutionPlan;
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
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let rule = DeviceRule::default().with_plugin(Arc::new(MyPlugin)).with_uploads(DeviceSpec::any(ArrowDeviceType::CUDA), 100_000);
//! let devices = Arc::new(DeviceResolver::of([Devices::open("cuda:0")?])); // opened once, at the start
//! let config = ExecutorProcessConfig {
//!     override_execution_engine: Some(Arc::new(DeviceEngine::new(rule))),
//!     override_config_producer: Some(Arc::new(move || {
//!         default_config_producer().with_extension(devices.clone())
//!     })),
//!     ..ExecutorProcessConfig::default()
//! };
//! start_executor_process(Arc::new(config)).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The configuration of a task's session starts with what the executor's producer returns, so the
//! [`DeviceResolver`](arrow_device_datafusion::DeviceResolver) reaches the operators that run there. The rule names a type of device
//! ([`DeviceSpec::any`](arrow_device_datafusion::DeviceSpec::any)), and the resolver gives partition `p` of a task the device `p % n` of the
//! executor's `n`. An executor without the engine, or whose plugins find nothing to do, runs its tasks on the host; both sorts may serve
//! one query. An executor whose rule inserts device operators, but whose resolver has no device, fails its tasks with an error that
//! names the operator and the devices that there are.
//!
//! # What happens when something fails
//!
//! | what | the query |
//! | --- | --- |
//! | an operation of a device fails, or its memory is exhausted | fails with the device's error, or the task is tried again: [`OnDeviceError`] |
//! | a plugin panics | fails with its text; the executor goes on |
//! | an operator panics | fails with Ballista's error; the executor goes on |
//! | a client goes, or cancels | Ballista aborts its tasks; their device memory is freed |
//! | an executor goes | Ballista runs its tasks on another one, once it notices (`executor_timeout_seconds` of the scheduler, 180 by default) |
//!
//! One case is Ballista's own. If an executor ends without a word (`kill -9`) after its part of a stage, while tasks on other executors
//! read it, the scheduler of 55.0 rolls the reading stage back and ignores the end of its tasks. If those held all vcores of the
//! other executors, nothing runs any more, and the query never ends: with Ballista's own engine in 4 of 8 tests with two executors of
//! two vcores. Clients should have a time limit.

mod clients;
mod engine;
mod errors;
mod shape;
mod stage;

pub use clients::ClientPool;
pub use engine::DeviceEngine;
pub use errors::OnDeviceError;
pub use stage::FinishedTask;
