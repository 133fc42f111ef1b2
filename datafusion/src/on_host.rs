//! Device operators that run on the host after all, and why.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use datafusion_common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::{RecordBatchStream, SendableRecordBatchStream, TaskContext};
use datafusion_physical_plan::metrics::MetricBuilder;
use datafusion_physical_plan::{ExecutionPlan, replace_children_if_necessary};
use futures_core::Stream;

use super::exec::DeviceExec;
use super::ops::form::DeviceForm;
use super::options::DeviceOptions;
use super::transitions::below::{between, upload};
use super::transitions::to_host::DeviceToHostExec;

/// Returns which device operators of a plan that has run did their work on the host, and why: each once for each reason. `EXPLAIN ANALYZE` shows the same,
/// as metrics `on_host (reason)` that count partitions.
///
/// # Errors
/// None but those of walking the plan.
pub fn ran_on_host(plan: &Arc<dyn ExecutionPlan>) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    plan.apply(|node| {
        let metrics = DeviceExec::of(node).and_then(ExecutionPlan::metrics);
        for metric in metrics.iter().flat_map(|metrics| metrics.iter()) {
            let name = metric.value().name().strip_prefix("on_host (");
            if let Some(reason) = name.and_then(|name| name.strip_suffix(')')) {
                let one = (node.name().to_owned(), reason.to_owned());
                if !found.contains(&one) {
                    found.push(one);
                }
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}

/// A device operator and those below it up to where their rows come from, on the host.
#[derive(Clone)]
pub(super) struct OnHost {
    plan: Arc<dyn ExecutionPlan>,
    /// The device's nodes that it stands for.
    nodes: Vec<Arc<dyn ExecutionPlan>>,
    /// Whether a partition may run here while another one runs on the device.
    apart: bool,
    /// Whether what it reads may be read once more.
    again: bool,
}

impl OnHost {
    /// `None` if an operator cannot.
    pub(super) fn of(node: &Arc<dyn ExecutionPlan>) -> Result<Option<Self>> {
        let mut own = Self {
            plan: node.clone(),
            nodes: Vec::new(),
            apart: true,
            again: true,
        };
        let plan = own.moved(node)?;
        Ok(plan
            .filter(|_| !own.nodes.is_empty())
            .map(|plan| Self { plan, ..own }))
    }

    fn moved(&mut self, plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        if let Some(down) = plan.downcast_ref::<DeviceToHostExec>() {
            return self.moved(down.input());
        }
        if let Some(to) = between(plan) {
            return self.moved(to.input());
        }
        let Some(node) = DeviceExec::of(plan).filter(|_| upload(plan).is_none()) else {
            let input = upload(plan).map_or(plan, |up| up.input());
            self.again &= runs_again(input);
            return Ok(Some(input.clone()));
        };
        let Some(host) = node.plan().on_host() else {
            // Its rows are on the device.
            let is_leaf = plan.children().is_empty();
            return Ok(is_leaf.then(|| Arc::new(DeviceToHostExec::new(plan.clone())) as _));
        };
        let form = DeviceExec::operator::<DeviceForm>(plan);
        self.apart &= form.is_none_or(|form| !form.is_exchange());
        self.nodes.push(plan.clone());
        let children = plan.children().into_iter().map(|child| self.moved(child));
        let children = children.collect::<Result<Option<_>>>()?;
        let plan = children.map(|children| replace_children_if_necessary(host, children));
        plan.transpose()
    }

    /// Why the session wants it here.
    pub(super) fn wanted(&self, options: &DeviceOptions) -> Option<String> {
        if !options.enable {
            return Some("device.enable is false".into());
        }
        let mut names = options.disable.split(',').map(str::trim);
        let name = names.find(|name| self.nodes.iter().any(|node| node.name() == *name));
        name.map(|name| format!("device.disable has {name}"))
    }

    /// Whether a partition may run here whose device cannot be opened.
    pub(super) fn may_replace(&self, options: &DeviceOptions) -> bool {
        options.fallback && self.apart
    }

    pub(super) fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
        why: &str,
    ) -> Result<SendableRecordBatchStream> {
        for node in self.nodes.iter().filter_map(DeviceExec::of) {
            let name = format!("on_host ({why})");
            let count = MetricBuilder::new(node.metrics_set()).counter(name, partition);
            count.add(1);
        }
        self.plan.execute(partition, context)
    }

    /// A partition on the device that runs here if there is too little memory for its first batch.
    pub(super) fn instead_of(
        self,
        stream: SendableRecordBatchStream,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> SendableRecordBatchStream {
        match self.again {
            true => Box::pin(UntilFirst {
                stream,
                host: Some((self, partition, context)),
            }),
            false => stream,
        }
    }
}

/// Whether partitions of a plan may be executed twice, with the same rows.
fn runs_again(plan: &Arc<dyn ExecutionPlan>) -> bool {
    const NODES: [&str; 7] = [
        "CoalesceBatchesExec",
        "CooperativeExec",
        "DataSourceExec",
        "DeviceScanExec",
        "DeviceToHostExec",
        "FilterExec",
        "ProjectionExec",
    ];
    NODES.contains(&plan.name()) && plan.children().into_iter().all(runs_again)
}

struct UntilFirst {
    stream: SendableRecordBatchStream,
    /// `None` once there has been a batch.
    host: Option<(OnHost, usize, Arc<TaskContext>)>,
}

impl Stream for UntilFirst {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.stream.as_mut().poll_next(cx));
        let Some((host, partition, context)) = self.host.take() else {
            return Poll::Ready(next);
        };
        let why = match next {
            Some(Err(e)) if is_exhausted(&e) => e.to_string(),
            next => return Poll::Ready(next),
        };
        match host.execute(partition, context, &why) {
            Ok(stream) => self.stream = stream,
            Err(e) => return Poll::Ready(Some(Err(e))),
        }
        self.stream.as_mut().poll_next(cx)
    }
}

fn is_exhausted(e: &DataFusionError) -> bool {
    matches!(e.find_root(), DataFusionError::ResourcesExhausted(_))
}

impl RecordBatchStream for UntilFirst {
    fn schema(&self) -> SchemaRef {
        self.stream.schema()
    }
}
