//! What the tasks of a query have done, and the output.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow_device_datafusion::DeviceExec;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::Result;
use datafusion::physical_plan::{ExecutionPlan, displayable};

/// The most rows of a result that are printed.
const SHOWN: usize = 4;

/// What a task has done.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Task {
    pub(crate) stage: usize,
    pub(crate) bytes_up: usize,
    pub(crate) bytes_down: usize,
    pub(crate) copies: usize,
    /// The device operators of its plan, as text.
    pub(crate) operators: Vec<String>,
}

impl Task {
    pub(crate) fn to_line(&self) -> String {
        let numbers = [self.stage, self.bytes_up, self.bytes_down, self.copies];
        let mut fields = vec!["task".to_owned()];
        fields.extend(numbers.map(|n| n.to_string()));
        fields.extend(
            self.operators
                .iter()
                .map(|text| text.replace(['\t', '\n'], " ")),
        );
        fields.join("\t")
    }

    pub(crate) fn from_line(line: &str) -> Option<Self> {
        let mut fields = line.strip_prefix("task\t")?.split('\t');
        let mut number = || fields.next()?.parse().ok();
        Some(Self {
            stage: number()?,
            bytes_up: number()?,
            bytes_down: number()?,
            copies: number()?,
            operators: fields.map(str::to_owned).collect(),
        })
    }
}

/// The device operators of a plan, as in `EXPLAIN`.
pub(crate) fn operators(plan: &Arc<dyn ExecutionPlan>) -> Vec<String> {
    let mut found = Vec::new();
    let walked = plan.apply(|node| {
        if DeviceExec::of(node).is_some() || node.name() == "DeviceToHostExec" {
            let line = displayable(&**node).one_line().to_string();
            found.push(line.trim().to_owned());
        }
        Ok(TreeNodeRecursion::Continue)
    });
    // The closure never fails.
    let _ = walked;
    found
}

/// Prints the stages of a query that have device operators, given the name and the tasks of each worker.
pub(crate) fn stages(workers: &[(String, Vec<Task>)]) {
    let mut stages: BTreeMap<usize, BTreeMap<&str, Vec<&Task>>> = BTreeMap::new();
    for (worker, tasks) in workers {
        for task in tasks {
            let stage = stages.entry(task.stage).or_default();
            stage.entry(worker).or_default().push(task);
        }
    }
    for (number, workers) in &stages {
        let of_device = |tasks: &Vec<&Task>| {
            let mut tasks = tasks.iter();
            tasks
                .find(|task| !task.operators.is_empty())
                .copied()
                .cloned()
        };
        let Some(example) = workers.values().find_map(of_device) else {
            let tasks: usize = workers.values().map(Vec::len).sum();
            println!("  stage {number}: {tasks} task(s) on the host");
            continue;
        };
        println!("  stage {number}, with device operators:");
        for operator in &example.operators {
            println!("      {operator}");
        }
        for (worker, tasks) in workers {
            let sum = |of: fn(&Task) -> usize| tasks.iter().map(|task| of(task)).sum::<usize>();
            let on_device = tasks.iter().filter(|task| !task.operators.is_empty());
            println!(
                "    {worker}: {} task(s), {} of them with device operators; {} bytes up, {} bytes down, {} copies",
                tasks.len(),
                on_device.count(),
                sum(|task| task.bytes_up),
                sum(|task| task.bytes_down),
                sum(|task| task.copies),
            );
        }
    }
}

/// Prints the result of the cluster beside that of one process. Returns whether they are the same.
pub(crate) fn result(
    cluster: &[RecordBatch],
    single: &[RecordBatch],
    times: [Duration; 2],
) -> Result<bool> {
    let rows = |batches: &[RecordBatch]| batches.iter().map(RecordBatch::num_rows).sum::<usize>();
    let lines = |batches: &[RecordBatch]| -> Result<Vec<String>> {
        let text = pretty_format_batches(batches)?.to_string();
        Ok(text.lines().map(str::to_owned).collect())
    };
    let (ours, theirs) = (lines(cluster)?, lines(single)?);
    let mut sorted = [ours.clone(), theirs.clone()];
    sorted.iter_mut().for_each(|lines| lines.sort());
    let same = sorted[0] == sorted[1];
    for (name, lines, time) in [
        ("the cluster", &ours, times[0]),
        ("one process without devices", &theirs, times[1]),
    ] {
        let more = lines.len().saturating_sub(4 + SHOWN);
        println!("  {name}, {time:.2?}:");
        let shown = lines.iter().take(3 + SHOWN);
        shown.for_each(|line| println!("    {line}"));
        if more > 0 {
            println!("    ... and {more} more");
        }
    }
    let verdict = if same { "the same" } else { "DIFFERENT" };
    println!("  {} rows, {verdict}", rows(cluster));
    Ok(same)
}
