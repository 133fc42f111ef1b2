//! Ballista: a scheduler and two executors, each a process.

#[allow(dead_code)]
mod nodes;

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{ArrowDeviceType, Device, Devices};
use arrow_device_cluster::ballista::DeviceEngine;
use arrow_device_datafusion::{DeviceResolver, DeviceRule, DeviceSpec, to_datafusion};
use ballista_core::config::TaskSchedulingPolicy;
use ballista_executor::executor_process::start_executor_process;
use ballista_scheduler::config::SchedulerConfig;
use datafusion::error::{DataFusionError, Result};
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::data;
use crate::device_filter::FilterPlugin;
use crate::processes::{Process, Tasks, ready};
use crate::report::{self, Task};

const ENGINE: &str = "ballista";
const WORKERS: [&str; 2] = ["executor 1", "executor 2"];
const POLICY: TaskSchedulingPolicy = TaskSchedulingPolicy::PushStaged;

/// Runs the queries on a new cluster. Returns whether all results are those of one process.
pub(crate) async fn run(
    queries: impl Iterator<Item = &'static (&'static str, &'static str)>,
) -> Result<bool> {
    let dir = tempfile::tempdir()?;
    println!(
        "Writing the tables of TPC-H, scale {}, as Parquet files ...",
        data::SCALE
    );
    data::write(dir.path())?;
    println!("Starting a scheduler and {} executors ...", WORKERS.len());
    let scheduler = Process::start(ENGINE, "the scheduler", &["scheduler"]).await?;
    scheduler.describe();
    let mut workers = Vec::new();
    for (number, name) in WORKERS.iter().enumerate() {
        let number = (number + 1).to_string();
        let role = ["executor", scheduler.address(), &number];
        let worker = Process::start(ENGINE, name, &role).await?;
        worker.describe();
        workers.push(worker);
    }

    let cluster = nodes::client(number_of(scheduler.address())?, true).await?;
    let one = SessionContext::new_with_config(SessionConfig::new().with_target_partitions(4));
    for context in [&cluster, &one] {
        data::register(context, dir.path()).await?;
    }
    let mut all_same = true;
    for (name, sql) in queries {
        println!("\n{name}");
        let start = Instant::now();
        let ours = cluster.sql(sql).await?.collect().await?;
        let middle = Instant::now();
        let single = one.sql(sql).await?.collect().await?;
        let times = [middle - start, middle.elapsed()];
        let mut tasks = Vec::new();
        for worker in &mut workers {
            tasks.push((worker.name().to_owned(), worker.tasks().await?));
        }
        report::stages(&tasks);
        all_same &= report::result(&ours, &single, times)?;
    }
    Ok(all_same)
}

/// Does what a process of the cluster does, until the one that has started it ends.
pub(crate) async fn role(role: &[String]) -> Result<()> {
    let role: Vec<&str> = role.iter().map(String::as_str).collect();
    match role[..] {
        ["scheduler"] => role_of_scheduler(20).await,
        // Where executors are killed, that should be noticed soon.
        ["scheduler", seconds] => role_of_scheduler(number_of(seconds)?).await,
        ["executor", port, number] => {
            // Opened once, before there is work for it.
            let device = Devices::open(&format!("sim:{number}"));
            executor(number_of(port)?, device.map_err(to_datafusion)?).await
        }
        // Where executors are killed, they should be at work.
        ["slow executor", port, bytes_per_second] => {
            let config = SimConfig {
                bytes_per_second: Some(number_of(bytes_per_second)?),
                ..SimConfig::default()
            };
            let device = SimDevice::new(config).and_then(|sim| Device::new(sim));
            executor(number_of(port)?, device.map_err(to_datafusion)?).await
        }
        _ => Err(DataFusionError::Configuration(format!("no role {role:?}"))),
    }
}

fn number_of<T: FromStr>(text: &str) -> Result<T> {
    let number = text.parse();
    number.map_err(|_| DataFusionError::Configuration(format!("{text} is no number")))
}

/// An executor that is silent for so long has ended.
async fn role_of_scheduler(executor_timeout_seconds: u64) -> Result<()> {
    let config = SchedulerConfig {
        executor_timeout_seconds,
        expire_dead_executor_interval_seconds: 1,
        ..SchedulerConfig::default().with_scheduler_policy(POLICY)
    };
    let (_scheduler, port) = nodes::start_scheduler(config).await?;
    ready(&port.to_string(), "no device");
    Tasks::default().answer().await
}

/// The plugin: filters go to the executor's simulated devices, whatever the number of rows.
pub(crate) fn rule() -> DeviceRule {
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
    rule.with_uploads(device, 0)
}

async fn executor(scheduler: u16, device: Device) -> Result<()> {
    let tasks = Tasks::default();
    let seen = tasks.clone();
    let engine = DeviceEngine::new(rule()).with_observer(move |task| {
        seen.add(Task {
            stage: task.stage_id(),
            bytes_up: task.sum("bytes_to_device"),
            bytes_down: task.sum("bytes_to_host"),
            copies: task.sum("copies"),
            operators: report::operators(task.plan()),
        });
    });
    let dir = tempfile::tempdir()?;
    let devices = DeviceResolver::of([device.clone()]);
    let config = nodes::executor(scheduler, POLICY, Arc::new(engine), devices, dir.path())?;
    let port = config.port;
    let process = tokio::spawn(start_executor_process(Arc::new(config)));
    // It has registered with the scheduler before it serves others.
    while tokio::net::TcpStream::connect(("127.0.0.1", port))
        .await
        .is_err()
    {
        if process.is_finished() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ready(&port.to_string(), &format!("device {}", device.id()));
    tokio::select! {
        ended = process => match ended {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(DataFusionError::External(Box::new(e))),
            Err(e) => Err(DataFusionError::External(Box::new(e))),
        },
        answered = tasks.answer() => answered,
    }
}
