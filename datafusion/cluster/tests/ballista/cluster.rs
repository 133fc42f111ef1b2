//! Clusters, and what their workers have done.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{ArrowDeviceType, Device};
use arrow_device_cluster::ballista::{DeviceEngine, OnDeviceError};
use arrow_device_datafusion::{DeviceResolver, DeviceSpec};
use ballista_core::config::TaskSchedulingPolicy;
use ballista_executor::execution_engine::{DefaultExecutionEngine, ExecutionEngine};
use ballista_executor::executor_process::start_executor_process;
use ballista_scheduler::config::SchedulerConfig;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::row::{RowConverter, SortField};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::prelude::{SessionConfig, SessionContext};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;

use crate::data;
use crate::device_filter::PushFilterToDevice;
use crate::nodes::{self, Scheduler};

pub(crate) type Rule = Arc<dyn PhysicalOptimizerRule + Send + Sync>;

/// How long a query may take. More than enough, on a slow machine with other work.
const LONG: Duration = Duration::from_secs(90);

pub(crate) const PUSH: TaskSchedulingPolicy = TaskSchedulingPolicy::PushStaged;
pub(crate) const PULL: TaskSchedulingPolicy = TaskSchedulingPolicy::PullStaged;

/// The tables, written once.
pub(crate) fn tables() -> &'static Path {
    static TABLES: LazyLock<TempDir> = LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        data::write(dir.path()).unwrap();
        dir
    });
    TABLES.path()
}

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

/// The rules of the plugin: every filter that the kernels support goes to a device.
pub(crate) fn plugin() -> Vec<Rule> {
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    vec![
        Arc::new(PushFilterToDevice::uploads(device)),
        Arc::new(PushFilterToDevice::default()),
    ]
}

impl Worker {
    /// With a device and the plugin.
    pub(crate) fn new() -> Self {
        Self::with(SimConfig::default(), plugin(), OnDeviceError::Fail)
    }

    pub(crate) fn with(config: SimConfig, rules: Vec<Rule>, policy: OnDeviceError) -> Self {
        let sim = SimDevice::new(config).unwrap();
        let device = Device::new(sim.clone()).unwrap();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let list = seen.clone();
        let engine = DeviceEngine::new(rules).with_on_device_error(policy);
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
        let end = Instant::now() + LONG;
        loop {
            // An injected failure may be what it reports.
            let _ = self.device.synchronize();
            self.device.trim();
            let (stats, report) = (self.device.stats(), self.sim.report());
            assert_eq!(report.violations, [""; 0]);
            if stats.allocations == stats.frees && report.live_allocations == 0 {
                return;
            }
            assert!(Instant::now() < end, "{stats:?}\n{report:#?}");
            std::thread::sleep(Duration::from_millis(1));
        }
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
        let config = SchedulerConfig {
            executor_timeout_seconds: 5,
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

/// The result of a query, or an error if it hangs.
pub(crate) async fn query(context: &SessionContext, sql: &str) -> Result<Vec<RecordBatch>> {
    let work = async { context.sql(sql).await?.collect().await };
    let hangs = |_| DataFusionError::Internal(format!("no end after {LONG:?}: {sql}"));
    tokio::time::timeout(LONG, work).await.map_err(hangs)?
}

/// The text of a query's error, which must not be that it hangs.
pub(crate) async fn error(context: &SessionContext, sql: &str) -> String {
    let error = query(context, sql).await.unwrap_err().to_string();
    assert!(!error.contains("no end after"), "{error}");
    error
}

/// A query's result in one process, without devices. Each is computed once.
pub(crate) async fn expected(sql: &str) -> Arc<Vec<RecordBatch>> {
    type Results = Mutex<HashMap<String, Arc<OnceCell<Arc<Vec<RecordBatch>>>>>>;
    static RESULTS: LazyLock<Results> = LazyLock::new(Results::default);
    let cell = RESULTS
        .lock()
        .unwrap()
        .entry(sql.to_owned())
        .or_default()
        .clone();
    let compute = async || {
        let config = SessionConfig::new().with_target_partitions(4);
        let context = SessionContext::new_with_config(config);
        data::register(&context, tables()).await.unwrap();
        Arc::new(query(&context, sql).await.unwrap())
    };
    cell.get_or_init(compute).await.clone()
}

/// The same rows, in any order. Values are compared exactly, floats by their bits.
#[track_caller]
pub(crate) fn assert_same(found: &[RecordBatch], expected: &[RecordBatch], what: &str) {
    let rows = |batches: &[RecordBatch]| {
        let Some(first) = batches.first() else {
            return Vec::new();
        };
        let types = first
            .columns()
            .iter()
            .map(|c| SortField::new(c.data_type().clone()));
        let converter = RowConverter::new(types.collect()).unwrap();
        let mut rows = Vec::new();
        for batch in batches {
            let batch = converter.convert_columns(batch.columns()).unwrap();
            rows.extend(batch.iter().map(|row| row.owned()));
        }
        rows.sort();
        rows
    };
    let types = |batches: &[RecordBatch]| -> Vec<_> {
        let columns = batches.first().map(|batch| batch.schema().fields().clone());
        let columns = columns.iter().flatten();
        columns
            .map(|f| (f.name().clone(), f.data_type().clone()))
            .collect()
    };
    assert_eq!(types(found), types(expected), "{what}");
    let same = rows(found) == rows(expected);
    let text = |batches| pretty_format_batches(batches).unwrap();
    assert!(
        same,
        "{what}\n{}\ninstead of\n{}",
        text(found),
        text(expected)
    );
}
