//! [`DeviceDistributedExt`]: what sessions of coordinators and workers get.

use std::any::Any;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceResolver, DeviceRule};
use datafusion::execution::SessionStateBuilder;
use datafusion_distributed::{
    DistributedExt, SessionStateBuilderExt, WorkerPlanRewriteEvent, WorkerPlanRewriteEventResponse,
};

use super::counts::SingleTasks;
use super::placement::DevicePlacement;
use super::planner::DevicePlanner;
use super::scans::Scans;
use super::stage::rewrite_stage;
use crate::codec::{DeviceCodec, DeviceTables};

/// Sets up sessions of datafusion-distributed for devices. The module [`distributed`](super) shows how its methods belong together.
pub trait DeviceDistributedExt: Sized {
    /// Sets the devices of a worker, as an extension of the session's configuration. Open them once, when the worker starts.
    fn with_device_resolver(self, devices: DeviceResolver) -> Self;

    /// Sets the tables on devices that a worker has by name.
    fn with_device_tables(self, tables: DeviceTables) -> Self;

    /// Has a worker insert device operators into the plans of its tasks, as [`DeviceRule::rewrite`] does.
    fn with_device_rule(self, rule: DeviceRule) -> Self;

    /// Has a worker read plans with device nodes. It is the codec of the coordinator's
    /// [`with_device_plans`](Self::with_device_plans).
    fn with_device_codec(self, codec: DeviceCodec) -> Self;

    /// Has a coordinator distribute its queries, insert device operators into the stages, with this rule, and send them with this
    /// codec. It comes in place of `with_distributed_planner`, which it calls. Without a rule, it lets queries read tables on devices.
    ///
    /// The rule sees each stage that workers run, after the query has been divided at DataFusion's own operators. What runs on the
    /// coordinator itself stays on the host. That is the last stage, and all of a query that has only one task per stage, as in a cluster of
    /// one worker. With dynamic task counts, there are no stages yet when a query is planned, and planning fails.
    ///
    /// The partitions of tables on devices are divided among the tasks of a stage. A device node that a query has before it is divided, and
    /// that reads all rows of a child in one partition, keeps its stage in one task.
    fn with_device_plans(self, rule: Option<DeviceRule>, codec: DeviceCodec) -> Self;

    /// Has a coordinator send tasks with device nodes to the workers that have the devices. It comes with
    /// [`with_device_plans`](Self::with_device_plans).
    fn with_device_placement(self, placement: DevicePlacement) -> Self;
}

impl DeviceDistributedExt for SessionStateBuilder {
    fn with_device_resolver(self, devices: DeviceResolver) -> Self {
        with_extension(self, devices)
    }

    fn with_device_tables(self, tables: DeviceTables) -> Self {
        with_extension(self, tables)
    }

    fn with_device_rule(self, rule: DeviceRule) -> Self {
        self.with_distributed_worker_plan_rewrite_handler(
            move |event: WorkerPlanRewriteEvent<'_>| {
                let options = event.session_config.options();
                let plan = rewrite_stage(event.plan, &rule, options)?;
                Ok(WorkerPlanRewriteEventResponse::new(plan))
            },
        )
    }

    fn with_device_codec(self, codec: DeviceCodec) -> Self {
        self.with_distributed_user_codec(codec)
    }

    fn with_device_plans(self, rule: Option<DeviceRule>, codec: DeviceCodec) -> Self {
        let mut builder = self
            .with_device_codec(codec.clone())
            .with_distributed_desired_task_count_handler(SingleTasks)
            .with_distributed_desired_task_count_handler(Scans)
            .with_distributed_scale_up_leaf_node_handler(Scans)
            .with_distributed_planner();
        match builder.query_planner().take() {
            Some(distributed) => builder.with_query_planner(Arc::new(DevicePlanner {
                distributed,
                rule,
                codec,
            })),
            // `with_distributed_planner` has set it.
            None => builder,
        }
    }

    fn with_device_placement(self, placement: DevicePlacement) -> Self {
        self.with_distributed_route_tasks_handler(placement)
    }
}

fn with_extension<T: Any + Send + Sync>(
    mut builder: SessionStateBuilder,
    extension: T,
) -> SessionStateBuilder {
    let config = builder.config().get_or_insert_default();
    config.set_extension(Arc::new(extension));
    builder
}
