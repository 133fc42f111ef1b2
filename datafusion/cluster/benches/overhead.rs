//! What device operators cost on a cluster of Ballista: a scheduler and two executors in this process.
//!
//! Where nothing moves: an operator on the CPU above each scan, which returns what it reads, against Ballista's own engine. Sides are
//! measured alternately, and the median of the ratios is printed, with its quartiles. And what moves to simulated devices and back, as
//! counted, for each stage.
//!
//! `--gate`: a ratio beyond its limit by more than a margin for the dev profile and a busy machine is an error.
//! `--lines`: prints tab-separated lines for the report.

#[allow(dead_code)]
#[path = "../examples/cluster/data.rs"]
mod data;
#[allow(dead_code, unused_imports)]
#[path = "../../examples/sql/device_filter/mod.rs"]
mod device_filter;
#[allow(dead_code)]
#[path = "../examples/cluster/ballista/nodes.rs"]
mod nodes;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{ArrowDeviceType, Device};
use arrow_device_cluster::ballista::{ClientPool, DeviceEngine};
use arrow_device_datafusion::{
    DeviceOperator, DevicePlugin, DeviceResolver, DeviceRule, DeviceSpec, DeviceTask,
    SendableDeviceStream, Verdict, to_datafusion,
};
use ballista_core::config::TaskSchedulingPolicy;
use ballista_executor::execution_engine::{DefaultExecutionEngine, ExecutionEngine};
use ballista_executor::executor_process::start_executor_process;
use ballista_scheduler::config::SchedulerConfig;
use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::error::ArrowError;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::prelude::SessionContext;
use device_filter::FilterPlugin;
use futures::StreamExt;
use tempfile::TempDir;

/// Rounds, in each of which each side is measured once.
const ROUNDS: usize = 30;
const POLICY: TaskSchedulingPolicy = TaskSchedulingPolicy::PushStaged;
/// One that reads most of the rows, one of many stages, and one that returns little.
const QUERIES: [&str; 3] = ["q01", "q03", "q06"];
/// Of the ratios.
const LIMIT: f64 = 1.05;
const GATE: f64 = 1.5;

/// Filters on the CPU as a device, where batches are uploaded without a copy, with DataFusion's own functions.
#[derive(Debug)]
struct FiltersExec;

impl DeviceOperator for FiltersExec {
    fn name(&self) -> &str {
        "FiltersExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let filter: Option<FilterExec> = task.node().downcast_ref().cloned();
        let filter = filter.ok_or_else(|| DataFusionError::Internal("no filter".into()))?;
        let device = task.device.clone();
        let kept = move |batch: RecordBatch| -> Result<RecordBatch> {
            let keep = filter
                .predicate()
                .evaluate(&batch)?
                .into_array(batch.num_rows())?;
            let kept = filter_record_batch(&batch, keep.as_boolean())?;
            Ok(match filter.projection().as_deref() {
                Some(columns) => kept.project(columns)?,
                None => kept,
            })
        };
        Ok(task.stream(task.input(0)?.map(move |batch| {
            let kept = kept(batch?.to_host()?).map_err(ArrowError::from)?;
            device.upload(&kept)
        })))
    }
}

/// The rule of a plugin for any device of a type, whatever the number of rows.
fn rule(plugin: Arc<dyn DevicePlugin>, device_type: ArrowDeviceType) -> DeviceRule {
    let rule = DeviceRule::default().with_plugin(plugin);
    rule.with_uploads(DeviceSpec::any(device_type), 0)
}

#[derive(Debug)]
struct Filters;

impl DevicePlugin for Filters {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, _: &DeviceSpec) -> Verdict {
        match node.is::<FilterExec>() {
            true => Verdict::Runs,
            false => Verdict::Unknown,
        }
    }

    fn replace(&self, _: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        Ok(Arc::new(FiltersExec))
    }
}

/// What the tasks of a stage have moved.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    tasks: usize,
    on_devices: usize,
    bytes_up: usize,
    bytes_down: usize,
    copies: usize,
}

type Stages = Arc<Mutex<BTreeMap<usize, Moved>>>;

fn counting(engine: DeviceEngine, stages: &Stages) -> Arc<dyn ExecutionEngine> {
    let stages = stages.clone();
    Arc::new(engine.with_observer(move |task| {
        let mut stages = stages.lock().unwrap();
        let moved = stages.entry(task.stage_id()).or_default();
        moved.tasks += 1;
        moved.on_devices += usize::from(task.is_on_device());
        moved.bytes_up += task.sum("bytes_to_device");
        moved.bytes_down += task.sum("bytes_to_host");
        moved.copies += task.sum("copies");
    }))
}

/// A cluster's client.
async fn cluster(
    tables: &Path,
    work: &TempDir,
    workers: Vec<(Arc<dyn ExecutionEngine>, DeviceResolver)>,
) -> Result<SessionContext> {
    let config = SchedulerConfig::default().with_scheduler_policy(POLICY);
    let (scheduler, port) = nodes::start_scheduler(config).await?;
    let count = workers.len();
    for (engine, devices) in workers {
        let config = nodes::executor(port, POLICY, engine, devices, work.path())?;
        tokio::spawn(start_executor_process(Arc::new(config)));
    }
    while nodes::executors(&scheduler).await < count {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let client = nodes::client(port, true).await?;
    data::register(&client, tables).await?;
    Ok(client)
}

/// What a query takes: time, and processor time of all threads. Other work on the machine changes the second one less.
struct Cost {
    time: Duration,
    /// Zero where it is not known.
    processor: Duration,
}

/// The processor time of this process, on Linux, in steps of 10 ms.
fn processor() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name, which may have spaces, the state is the first field.
    let fields = text.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks = fields.split(' ').skip(11).take(2);
    let ticks = ticks.filter_map(|ticks| ticks.parse::<u64>().ok());
    Duration::from_millis(10) * ticks.sum::<u64>() as u32
}

async fn run(context: &SessionContext, sql: &str) -> Result<(Cost, Vec<RecordBatch>)> {
    let (start, before) = (Instant::now(), processor());
    let result = context.sql(sql).await?.collect().await?;
    let (time, processor) = (start.elapsed(), processor() - before);
    Ok((Cost { time, processor }, result))
}

fn queries() -> impl Iterator<Item = (&'static str, &'static str)> {
    let queries = data::QUERIES.into_iter();
    queries.filter(|(name, _)| QUERIES.contains(name))
}

/// The ratios of the times, and of the processor times, of a query on two clusters. The first rounds warm up.
async fn ratios(ours: &SessionContext, other: &SessionContext, sql: &str) -> Result<[Vec<f64>; 2]> {
    let mut ratios = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS + 2 {
        let (with, result) = run(ours, sql).await?;
        let (without, expected) = run(other, sql).await?;
        let rows =
            |batches: &[RecordBatch]| batches.iter().map(RecordBatch::num_rows).sum::<usize>();
        assert_eq!(rows(&result), rows(&expected), "the same query");
        if round > 1 {
            ratios[0].push(with.time.as_secs_f64() / without.time.as_secs_f64());
            let processor = without.processor.as_secs_f64();
            ratios[1].extend((processor > 0.0).then(|| with.processor.as_secs_f64() / processor));
        }
    }
    ratios
        .iter_mut()
        .for_each(|ratios| ratios.sort_by(f64::total_cmp));
    Ok(ratios)
}

/// Prints the times where nothing moves. Returns whether the gates hold.
async fn times(tables: &Path, work: &TempDir, lines: bool) -> Result<bool> {
    let stages = Stages::default();
    let pool = || Arc::new(ClientPool::new(Duration::from_secs(30)));
    let plain = || Arc::new(DefaultExecutionEngine::with_client_pool(pool()));
    let ours = || {
        counting(
            DeviceEngine::new(rule(Arc::new(Filters), ArrowDeviceType::CPU)),
            &stages,
        )
    };
    let devices = DeviceResolver::of([]);
    let of = |engine: Arc<dyn ExecutionEngine>| (engine, devices.clone());
    let with = cluster(tables, work, vec![of(ours()), of(ours())]).await?;
    let without = cluster(tables, work, vec![of(plain()), of(plain())]).await?;
    let mut holds = true;
    for (name, sql) in queries() {
        stages.lock().unwrap().clear();
        let ratios = ratios(&with, &without, sql).await?;
        for (unit, ratios) in ["time", "processor time"].iter().zip(&ratios) {
            if ratios.is_empty() {
                continue;
            }
            let at = |part: f64| ratios[((ratios.len() - 1) as f64 * part).round() as usize];
            let [median, first, third, best] = [0.5, 0.25, 0.75, 0.0].map(at);
            let what =
                format!("Ballista, {name}, {unit}: an operator on the CPU above each scan / none");
            match lines {
                true => println!("DF5\t{what}\t{median}\t{LIMIT}\t{first}\t{third}\t{best}"),
                false => println!("{what}: {median:.4} ({first:.4} to {third:.4}), limit {LIMIT}"),
            }
            holds &= median <= GATE;
        }
        let stages = stages.lock().unwrap();
        let on_devices: usize = stages.values().map(|moved| moved.on_devices).sum();
        assert!(on_devices > 0, "no operators");
        let moved = |of: fn(&Moved) -> usize| stages.values().map(of).sum::<usize>();
        let (bytes, copies) = (
            moved(|moved| moved.bytes_up + moved.bytes_down),
            moved(|moved| moved.copies),
        );
        holds &= print_count(
            lines,
            &format!("{name} on the CPU: bytes moved"),
            bytes,
            Some(0),
        );
        holds &= print_count(
            lines,
            &format!("{name} on the CPU: copies"),
            copies,
            Some(0),
        );
    }
    Ok(holds)
}

/// Prints a count, as `DF6`. Returns whether its limit holds.
fn print_count(lines: bool, what: &str, here: usize, limit: Option<usize>) -> bool {
    let text = limit.map_or("inf".to_owned(), |limit| limit.to_string());
    match lines {
        true => println!("DF6\tBallista, {what}\t{here}\t{text}"),
        false => println!("Ballista, {what}: {here}, limit {text}"),
    }
    limit.is_none_or(|limit| here <= limit)
}

/// Prints what moves to simulated devices and back, for each stage.
async fn counts(tables: &Path, work: &TempDir, lines: bool) -> Result<()> {
    let stages = Stages::default();
    let worker = || -> arrow_device::Result<_> {
        let device = Device::new(SimDevice::new(SimConfig::default())?)?;
        let engine = counting(
            DeviceEngine::new(rule(
                Arc::new(FilterPlugin::default()),
                ArrowDeviceType::EXT_DEV,
            )),
            &stages,
        );
        Ok((engine, DeviceResolver::of([device])))
    };
    let workers = vec![
        worker().map_err(to_datafusion)?,
        worker().map_err(to_datafusion)?,
    ];
    let cluster = cluster(tables, work, workers).await?;
    for (name, sql) in queries() {
        stages.lock().unwrap().clear();
        run(&cluster, sql).await?;
        let stages = stages.lock().unwrap();
        for (stage, moved) in stages.iter() {
            let (tasks, of_device) = (moved.tasks, moved.on_devices);
            let what = format!(
                "{name}, stage {stage}, {of_device} of {tasks} tasks with device operators"
            );
            for (unit, count) in [
                ("bytes up", moved.bytes_up),
                ("bytes down", moved.bytes_down),
                ("copies", moved.copies),
            ] {
                print_count(lines, &format!("{what}: {unit}"), count, None);
            }
        }
    }
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let has = |name: &str| std::env::args().any(|arg| arg == name);
    let (gate, lines) = (has("--gate"), has("--lines"));
    let (tables, work) = (tempfile::tempdir()?, tempfile::tempdir()?);
    data::write(tables.path())?;
    let holds = times(tables.path(), &work, lines).await?;
    counts(tables.path(), &work, lines).await?;
    if gate && !holds {
        eprintln!("a row is beyond its gate");
        std::process::exit(1);
    }
    Ok(())
}
