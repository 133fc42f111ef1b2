//! [`DeviceDistributedExt`]: what sessions of coordinators and workers get.

use std::any::Any;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceResolver, rewrite};
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion_distributed::{
    DistributedExt, WorkerPlanRewriteEvent, WorkerPlanRewriteEventResponse,
};

use super::counts::SingleTasks;
use super::placement::DevicePlacement;
use super::rules::DeviceRules;
use crate::codec::{DeviceCodec, DeviceTables};

/// Sets up sessions of datafusion-distributed for devices. The module [`distributed`](super) shows how its methods belong together.
pub trait DeviceDistributedExt: Sized {
    /// Sets the devices of a worker, as an extension of the session's configuration. Open them once, when the worker starts.
    fn with_device_resolver(self, devices: DeviceResolver) -> Self;

    /// Sets the tables on devices that a worker has by name.
    fn with_device_tables(self, tables: DeviceTables) -> Self;

    /// Has a worker insert device operators into the plans of its tasks, with these rules; see [`rewrite`] for what rules may do.
    fn with_device_rules(self, rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>) -> Self;

    /// Has plans with device nodes travel. Coordinators and workers take the same codec.
    ///
    /// On a coordinator, this also keeps stages in one task if a device operator reads all rows of a child in one
    /// partition (a join that collects one side, a limit on all rows): datafusion-distributed divides a query at DataFusion's own operators
    /// and knows nothing of such needs of others.
    fn with_device_codec(self, codec: DeviceCodec) -> Self;

    /// Has a coordinator insert device operators into its plans, with these rules, after the session's other rules, and send the plans
    /// with this codec.
    fn with_device_plans(
        self,
        rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>,
        codec: DeviceCodec,
    ) -> Self;

    /// Has a coordinator send tasks with device nodes to the workers that have the devices.
    fn with_device_placement(self, placement: DevicePlacement) -> Self;
}

impl DeviceDistributedExt for SessionStateBuilder {
    fn with_device_resolver(self, devices: DeviceResolver) -> Self {
        with_extension(self, devices)
    }

    fn with_device_tables(self, tables: DeviceTables) -> Self {
        with_extension(self, tables)
    }

    fn with_device_rules(self, rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>) -> Self {
        self.with_distributed_worker_plan_rewrite_handler(
            move |event: WorkerPlanRewriteEvent<'_>| {
                let options = event.session_config.options();
                let plan = rewrite(event.plan, &rules, options)?;
                Ok(WorkerPlanRewriteEventResponse::new(plan))
            },
        )
    }

    fn with_device_codec(self, codec: DeviceCodec) -> Self {
        self.with_distributed_user_codec(codec)
            .with_distributed_desired_task_count_handler(SingleTasks)
    }

    fn with_device_plans(
        self,
        rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>,
        codec: DeviceCodec,
    ) -> Self {
        self.with_physical_optimizer_rule(Arc::new(DeviceRules(rules)))
            .with_device_codec(codec)
    }

    fn with_device_placement(self, placement: DevicePlacement) -> Self {
        self.with_distributed_desired_task_count_handler(SingleTasks)
            .with_distributed_desired_task_count_handler(placement.clone())
            .with_distributed_route_tasks_handler(placement)
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
