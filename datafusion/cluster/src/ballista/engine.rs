//! [`DeviceEngine`]: the execution engine.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use arrow_device_datafusion::DeviceRule;
use ballista_core::JobId;
use ballista_core::execution_plans::RuntimeStatsExec;
use ballista_executor::execution_engine::{
    DefaultExecutionEngine, ExecutionEngine, QueryStageExecutor,
};
use datafusion::common::tree_node::TreeNode;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::{ExecutionPlan, replace_children_if_necessary};
use datafusion::prelude::SessionConfig;

use super::clients::ClientPool;
use super::errors::OnDeviceError;
use super::shape::Shape;
use super::stage::{DeviceStage, FinishedTask, Observer, Task};

/// How long executor processes of Ballista keep idle connections, by default.
const IDLE: Duration = Duration::from_secs(30);

/// An execution engine for Ballista's executors, which puts device operators into the plans of tasks. Another engine runs them.
///
/// The module [`ballista`](super) shows how to give it to an executor. Nothing else of a cluster changes.
///
/// The plan of a task is a shuffle writer above the operators of the stage. The rule sees what is below the writer; where Ballista
/// measures the rows of a stage (`RuntimeStatsExec`, in window functions over several partitions), they see what is below that, since
/// Ballista must find it from the writer on. The sets of metrics that the scheduler gets have the shape that it expects; what a
/// transition copies is counted in the set of the node below it.
#[derive(Clone)]
pub struct DeviceEngine {
    inner: Arc<dyn ExecutionEngine>,
    rule: DeviceRule,
    on_device_error: OnDeviceError,
    observer: Option<Arc<Observer>>,
}

impl DeviceEngine {
    /// Makes an engine that puts device operators into each task, as [`DeviceRule::rewrite`] does. Ballista's own engine runs the tasks, with a [`ClientPool`].
    pub fn new(rule: DeviceRule) -> Self {
        let clients = Arc::new(ClientPool::new(IDLE));
        let inner = DefaultExecutionEngine::with_client_pool(clients);
        Self::over(Arc::new(inner), rule)
    }

    /// As [`new`](Self::new), with another engine that runs the tasks, such as Ballista's own with another pool of clients.
    pub fn over(inner: Arc<dyn ExecutionEngine>, rule: DeviceRule) -> Self {
        Self {
            inner,
            rule,
            on_device_error: OnDeviceError::default(),
            observer: None,
        }
    }

    /// Sets what happens to a query if a device fails. By default, it fails.
    #[must_use]
    pub fn with_on_device_error(mut self, on_device_error: OnDeviceError) -> Self {
        self.on_device_error = on_device_error;
        self
    }

    /// Calls `observer` with each task that has run to its end or has failed, on the task's thread, for logs and counters. Tasks that are
    /// aborted are not reported. A panic of the observer fails the task.
    #[must_use]
    pub fn with_observer(
        mut self,
        observer: impl Fn(&FinishedTask<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// The task's plan with device operators.
    fn on_devices(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &SessionConfig,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let measures =
            |plan: &Arc<dyn ExecutionPlan>| plan.exists(|node| Ok(node.is::<RuntimeStatsExec>()));
        let children: Vec<_> = plan.children().into_iter().cloned().collect();
        let below = children.iter().map(|child| match measures(child)? {
            true => self.on_devices(child.clone(), config),
            false => self.rule.rewrite(child.clone(), config.options()),
        });
        let below = below.collect::<Result<Vec<_>>>()?;
        let mut pairs = children.iter().zip(&below);
        match pairs.all(|(before, after)| Arc::ptr_eq(before, after)) {
            true => Ok(plan),
            false => replace_children_if_necessary(plan, below),
        }
    }
}

impl ExecutionEngine for DeviceEngine {
    fn create_query_stage_exec(
        &self,
        job_id: JobId,
        stage_id: usize,
        task_id: usize,
        global_output_partition_ids: Vec<usize>,
        plan: Arc<dyn ExecutionPlan>,
        work_dir: &str,
        config: &SessionConfig,
    ) -> Result<Arc<dyn QueryStageExecutor>> {
        let create = || -> Result<Arc<dyn QueryStageExecutor>> {
            let after = self.on_devices(plan.clone(), config)?;
            let shape = Shape::new(&plan, &after);
            let task = Task {
                job_id: job_id.clone(),
                stage_id,
                task_id,
                plan: after.clone(),
            };
            let inner = self.inner.create_query_stage_exec(
                job_id,
                stage_id,
                task_id,
                global_output_partition_ids,
                after,
                work_dir,
                config,
            )?;
            Ok(Arc::new(DeviceStage {
                inner,
                task,
                shape,
                on_device_error: self.on_device_error,
                observer: self.observer.clone(),
            }))
        };
        // A panic would end the executor's loop, and leave the scheduler waiting. Those of plugins are errors already.
        catch_unwind(AssertUnwindSafe(create)).unwrap_or_else(|_| {
            let text = format!("stage {stage_id}, task {task_id}: a node of the plan panicked");
            Err(DataFusionError::Execution(text))
        })
    }
}

impl fmt::Debug for DeviceEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceEngine")
            .field("rule", &self.rule)
            .field("on_device_error", &self.on_device_error)
            .finish_non_exhaustive()
    }
}
