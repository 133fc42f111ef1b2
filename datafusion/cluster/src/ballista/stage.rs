//! What an executor runs: the task of a stage, with device operators.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceToHostExec};
use ballista_core::JobId;
use ballista_core::serde::protobuf::{
    RuntimeStatsReport, ShuffleWritePartition, TaskColumnStats, WindowStateReport,
};
use ballista_executor::execution_engine::QueryStageExecutor;
use datafusion::common::tree_node::TreeNode;
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::metrics::MetricsSet;

use super::errors::OnDeviceError;
use super::shape::Shape;

/// A task that has ended, as an observer of a [`DeviceEngine`](super::DeviceEngine) sees it.
#[derive(Debug)]
pub struct FinishedTask<'a> {
    pub(super) task: &'a Task,
    pub(super) metrics: &'a [MetricsSet],
    pub(super) failed: bool,
}

/// Which task it is.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) job_id: JobId,
    pub(super) stage_id: usize,
    pub(super) task_id: usize,
    /// As it runs, with the shuffle writer.
    pub(super) plan: Arc<dyn ExecutionPlan>,
}

impl FinishedTask<'_> {
    /// Returns the query's id.
    pub fn job_id(&self) -> &JobId {
        &self.task.job_id
    }

    /// Returns the number of the stage within the query.
    pub fn stage_id(&self) -> usize {
        self.task.stage_id
    }

    /// Returns the number of the task within the stage.
    pub fn task_id(&self) -> usize {
        self.task.task_id
    }

    /// Returns whether the task has failed.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Returns the plan that ran, with its device operators, below the shuffle writer. Its nodes do not have the metrics of the run.
    pub fn plan(&self) -> &Arc<dyn ExecutionPlan> {
        &self.task.plan
    }

    /// Returns whether a node of the plan is on a device.
    pub fn is_on_device(&self) -> bool {
        let is = |node: &Arc<dyn ExecutionPlan>| {
            Ok(DeviceExec::of(node).is_some() || node.is::<DeviceToHostExec>())
        };
        self.task.plan.exists(is).unwrap_or_default()
    }

    /// Returns the sets of metrics of the run, one for each node of the plan that has metrics, the parents first.
    pub fn metrics(&self) -> &[MetricsSet] {
        self.metrics
    }

    /// Returns the sum of a metric over all nodes and partitions, such as `bytes_to_device`, `bytes_to_host` or `copies`.
    pub fn sum(&self, metric: &str) -> usize {
        let sets = self.metrics.iter();
        let sums = sets.filter_map(|set| set.sum_by_name(metric));
        sums.map(|sum| sum.as_usize()).sum()
    }
}

pub(super) type Observer = dyn Fn(&FinishedTask<'_>) + Send + Sync;

/// Runs a task in another engine.
pub(super) struct DeviceStage {
    pub(super) inner: Arc<dyn QueryStageExecutor>,
    pub(super) task: Task,
    pub(super) shape: Shape,
    pub(super) on_device_error: OnDeviceError,
    pub(super) observer: Option<Arc<Observer>>,
}

#[async_trait::async_trait]
impl QueryStageExecutor for DeviceStage {
    async fn execute_query_stage(
        &self,
        task_id: usize,
        context: Arc<TaskContext>,
    ) -> Result<Vec<ShuffleWritePartition>> {
        let done = self.inner.execute_query_stage(task_id, context).await;
        if let Some(observer) = &self.observer {
            observer(&FinishedTask {
                task: &self.task,
                metrics: &self.inner.collect_plan_metrics(),
                failed: done.is_err(),
            });
        }
        done.map_err(|e| self.on_device_error.apply(e))
    }

    fn collect_plan_metrics(&self) -> Vec<MetricsSet> {
        // A panic here would be the end of the task without a word to the scheduler, which would wait for it.
        let sets = catch_unwind(AssertUnwindSafe(|| self.inner.collect_plan_metrics()));
        self.shape.fit(&sets.unwrap_or_default())
    }

    fn collect_runtime_stats_reports(&self) -> Vec<RuntimeStatsReport> {
        self.inner.collect_runtime_stats_reports()
    }

    fn collect_window_state_reports(&self) -> Result<Vec<WindowStateReport>> {
        self.inner.collect_window_state_reports()
    }

    fn collect_column_stats(&self) -> Vec<TaskColumnStats> {
        self.inner.collect_column_stats()
    }
}

impl fmt::Debug for DeviceStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceStage")
            .field("inner", &self.inner)
            .field("shape", &self.shape)
            .field("on_device_error", &self.on_device_error)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for DeviceStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
