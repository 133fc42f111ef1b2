//! datafusion-distributed: a coordinator, which is this process, and two workers, each a process. First the workers insert the device
//! operators, and then the coordinator does.

#[allow(dead_code)]
mod nodes;

use std::sync::Arc;
use std::time::Instant;

use arrow_device::Devices;
use arrow_device_cluster::distributed::{DeviceDistributedExt, DevicePlacement};
use arrow_device_datafusion::{DeviceResolver, to_datafusion};
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::{ExecutionPlan, collect};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_distributed::{DistributedLeafExec, NetworkBoundaryExt};
use url::Url;

use crate::data;
use crate::processes::{Process, Tasks, ready};
use crate::report::{self, Task};
use nodes::{Parts, SIM, Urls, Way};

const ENGINE: &str = "distributed";
const WORKERS: [&str; 2] = ["worker 1", "worker 2"];
const WAYS: [(Way, &str, &str); 2] = [
    (
        Way::Workers,
        "workers",
        "the workers insert the device operators",
    ),
    (
        Way::Coordinator,
        "coordinator",
        "the coordinator inserts the device operators",
    ),
];

/// Runs the queries on new clusters. Returns whether all results are those of one process.
pub(crate) async fn run(
    queries: impl Iterator<Item = &'static (&'static str, &'static str)>,
) -> Result<bool> {
    let dir = tempfile::tempdir()?;
    println!(
        "Writing the tables of TPC-H, scale {}, as Parquet files ...",
        data::SCALE
    );
    data::write(dir.path())?;
    let one = SessionContext::new_with_config(SessionConfig::new().with_target_partitions(4));
    data::register(&one, dir.path()).await?;
    let queries: Vec<_> = queries.collect();
    let mut all_same = true;
    for (way, role, what) in WAYS {
        println!("\nStarting {} workers; {what} ...", WORKERS.len());
        let (mut workers, mut urls) = (Vec::new(), Vec::new());
        for (number, name) in WORKERS.iter().enumerate() {
            let number = (number + 1).to_string();
            let worker = Process::start(ENGINE, name, &["worker", role, &number]).await?;
            worker.describe();
            urls.push(url(worker.address())?);
            workers.push(worker);
        }
        let with_device = urls.iter().map(|url| (url.clone(), vec![SIM]));
        let placement = DevicePlacement::of(with_device);
        let cluster = nodes::coordinator(way, Urls(urls), |builder| {
            builder.with_device_placement(placement)
        })?;
        data::register(&cluster, dir.path()).await?;
        for (name, sql) in &queries {
            println!("\n{name}, {what}");
            let start = Instant::now();
            let plan = cluster.sql(sql).await?.create_physical_plan().await?;
            let ours = collect(plan.clone(), cluster.task_ctx()).await?;
            let middle = Instant::now();
            let single = one.sql(sql).await?.collect().await?;
            let times = [middle - start, middle.elapsed()];
            let stages = stages(&plan)?;
            let mut tasks = Vec::new();
            for worker in &mut workers {
                let mut of_worker = worker.tasks().await?;
                for task in &mut of_worker {
                    let mut stages = stages.iter();
                    let stage = stages.find(|(_, shape)| *shape == task.stage);
                    task.stage = stage.map_or(0, |(number, _)| *number);
                }
                tasks.push((worker.name().to_owned(), of_worker));
            }
            report::stages(&tasks);
            all_same &= report::result(&ours, &single, times)?;
        }
    }
    Ok(all_same)
}

fn url(address: &str) -> Result<Url> {
    Url::parse(address).map_err(|e| DataFusionError::External(Box::new(e)))
}

/// The stages of a coordinator's plan: their numbers and shapes. A worker does not learn the number of a task's stage.
fn stages(plan: &Arc<dyn ExecutionPlan>) -> Result<Vec<(usize, usize)>> {
    let mut stages = Vec::new();
    plan.apply(|node| {
        if let Some(boundary) = node.as_network_boundary() {
            let stage = boundary.input_stage();
            for plan in node.children() {
                stages.push((stage.num(), shape(plan)?));
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(stages)
}

/// A number for the nodes and columns of a stage, with or without its device operators.
fn shape(stage: &Arc<dyn ExecutionPlan>) -> Result<usize> {
    let mut text = String::new();
    stage.apply(|node| {
        if node.is_network_boundary() {
            text.push_str("another stage");
            return Ok(TreeNodeRecursion::Jump);
        }
        let leaf = node.downcast_ref().map(DistributedLeafExec::original);
        match leaf.unwrap_or(node).name() {
            "DeviceToHostExec" | "HostToDeviceExec" => {}
            name => {
                text.push_str(name.strip_prefix("Device").unwrap_or(name));
                let schema = node.schema();
                let columns = schema.fields().iter().map(|field| field.name().as_str());
                text.extend(columns);
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    // Not of the standard library, whose hashes may differ between processes.
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Ok(hash as usize)
}

/// Does what a process of the cluster does, until the one that has started it ends.
pub(crate) async fn role(role: &[String]) -> Result<()> {
    let role: Vec<&str> = role.iter().map(String::as_str).collect();
    let ["worker", way, number] = role[..] else {
        return Err(DataFusionError::Configuration(format!("no role {role:?}")));
    };
    let way = WAYS.into_iter().find(|(_, name, _)| *name == way);
    let Some((way, ..)) = way else {
        return Err(DataFusionError::Configuration(format!("no role {role:?}")));
    };
    // Opened once, before there is work for it.
    let device = Devices::open(&format!("sim:{number}")).map_err(to_datafusion)?;
    let tasks = Tasks::default();
    let seen = tasks.clone();
    let mut parts = Parts::new(way, DeviceResolver::of([device.clone()]));
    parts.observe = Arc::new(move |event| {
        let plan = event.plan.clone();
        seen.add_later(move || task(&plan));
    });
    let url = nodes::start_worker(parts).await?;
    ready(url.as_str(), &format!("device {}", device.id()));
    tasks.answer().await
}

/// What a task has done so far.
fn task(plan: &Arc<dyn ExecutionPlan>) -> Task {
    let mut task = Task {
        operators: report::operators(plan),
        ..Task::default()
    };
    let mut add = |node: &Arc<dyn ExecutionPlan>| {
        let metrics = node.metrics();
        let sum = |name| {
            let sum = metrics
                .as_ref()
                .and_then(|metrics| metrics.sum_by_name(name));
            sum.map_or(0, |sum| sum.as_usize())
        };
        task.bytes_up += sum("bytes_to_device");
        task.bytes_down += sum("bytes_to_host");
        task.copies += sum("copies");
        Ok(TreeNodeRecursion::Continue)
    };
    // Neither fails.
    let walked = plan.apply(&mut add);
    task.stage = walked.and_then(|_| shape(plan)).unwrap_or_default();
    task
}
