//! Clusters, and what their workers have done.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{ArrowDeviceType, Device};
use arrow_device_cluster::ballista::{DeviceEngine, OnDeviceError};
use arrow_device_datafusion::{DeviceResolver, DeviceRule, DeviceSpec};
use ballista_core::config::TaskSchedulingPolicy;
use ballista_executor::execution_engine::{DefaultExecutionEngine, ExecutionEngine};
use ballista_executor::executor_process::start_executor_process;
use ballista_scheduler::config::SchedulerConfig;
use datafusion::prelude::{SessionConfig, SessionContext};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::data;
use crate::device_filter::FilterPlugin;
use crate::nodes::{self, Scheduler};
use crate::support::{self, LONG};
pub(crate) use crate::support::{assert_same, error, expected, query, tables};

pub(crate) const PUSH: TaskSchedulingPolicy = TaskSchedulingPolicy::PushStaged;
pub(crate) const PULL: TaskSchedulingPolicy = TaskSchedulingPolicy::PullStaged;

/// What a task has done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) on_device: bool,
    pub(crate) bytes_up: usize,
    pub(crate) bytes_down: usize,
}

/// An executor, with a device or without.
pub(crate) struct Worker {
    pub(crate) device: Device,
    pub(crate) sim: Arc<SimDevice>,
    seen: Arc<Mutex<Vec<Seen>>>,
    engine: Arc<dyn ExecutionEngine>,
    resolver: DeviceResolver,
    /// What it runs on, with all of its tasks, once it has started.
    runtime: Option<Runtime>,
    dir: TempDir,
}

/// The plugin: every filter that the kernels support goes to a device.
pub(crate) fn plugin() -> DeviceRule {
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
    rule.with_uploads(device, 0)
}

impl Worker {
    /// With a device and the plugin.
    pub(crate) fn new() -> Self {
        Self::with(SimConfig::default(), plugin(), OnDeviceError::Fail)
    }

    pub(crate) fn with(config: SimConfig, rule: DeviceRule, policy: OnDeviceError) -> Self {
        let sim = SimDevice::new(config).unwrap();
        let device = Device::new(sim.clone()).unwrap();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let list = seen.clone();
        let engine = DeviceEngine::new(rule).with_on_device_error(policy);
        let engine = engine.with_observer(move |task| {
            list.lock().unwrap().push(Seen {
                on_device: task.is_on_device(),
                bytes_up: task.sum("bytes_to_device"),
                bytes_down: task.sum("bytes_to_host"),
            });
        });
        Self {
            resolver: DeviceResolver::of([device.clone()]),
            device,
            sim,
            seen,
            engine: Arc::new(engine),
            runtime: None,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Without the plugin, or anything else of this crate.
    pub(crate) fn plain() -> Self {
        Self::new().running(DefaultExecutionEngine::new())
    }

    /// With the plugin, but without a device.
    pub(crate) fn without_device() -> Self {
        let mut this = Self::new();
        this.resolver = DeviceResolver::of([]);
        this
    }

    pub(crate) fn running(mut self, engine: impl ExecutionEngine + 'static) -> Self {
        self.engine = Arc::new(engine);
        self
    }

    fn start(&mut self, scheduler: u16, policy: TaskSchedulingPolicy) {
        let (engine, devices) = (self.engine.clone(), self.resolver.clone());
        let config = nodes::executor(scheduler, policy, engine, devices, self.dir.path());
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(2).enable_all().build().unwrap();
        runtime.spawn(start_executor_process(Arc::new(config.unwrap())));
        self.runtime = Some(runtime);
    }

    /// Ends it in the middle of its work.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// The tasks that have ended since this was last asked.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }

    /// Waits until nothing is left on the device, and checks that nothing was done wrong there.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        support::assert_clean(&self.device, &self.sim);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A scheduler and its executors. The scheduler runs on the test's own runtime.
pub(crate) struct Cluster {
    pub(crate) workers: Vec<Worker>,
    port: u16,
    scheduler: Scheduler,
}

impl Cluster {
    pub(crate) async fn start(policy: TaskSchedulingPolicy, mut workers: Vec<Worker>) -> Self {
        // Writing them takes seconds, in which nobody else should wait for this thread.
        tokio::task::spawn_blocking(tables).await.unwrap();
        let config = SchedulerConfig {
            // A shorter time may pass on a busy machine. The scheduler would end an executor, and with it, by a flag of the whole
            // process, those of all tests.
            executor_timeout_seconds: 20,
            expire_dead_executor_interval_seconds: 1,
            ..SchedulerConfig::default().with_scheduler_policy(policy)
        };
        let (scheduler, port) = nodes::start_scheduler(config).await.unwrap();
        for worker in &mut workers {
            worker.start(port, policy);
        }
        let all = async {
            while nodes::executors(&scheduler).await < workers.len() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let registered = tokio::time::timeout(LONG, all).await;
        registered.expect("the executors do not register");
        Self {
            workers,
            port,
            scheduler,
        }
    }

    /// A client with the tables.
    pub(crate) async fn client(&self, adaptive: bool) -> SessionContext {
        let client = nodes::client(self.port, adaptive).await.unwrap();
        data::register(&client, tables()).await.unwrap();
        client
    }

    pub(crate) async fn client_with(&self, config: SessionConfig) -> SessionContext {
        let client = nodes::client_with(self.port, config).await.unwrap();
        data::register(&client, tables()).await.unwrap();
        client
    }

    /// Cancels all queries.
    pub(crate) async fn cancel_all(&self) {
        let running = self.scheduler.state.task_manager.get_running_job_cache();
        for job in running.keys() {
            self.scheduler.cancel_job(job.clone()).await.unwrap();
        }
    }

    /// The tasks that have ended since this was last asked, of all workers.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.workers.iter().flat_map(Worker::seen).collect()
    }

    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        self.workers.iter().for_each(Worker::assert_clean);
    }
}
