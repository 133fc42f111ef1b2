//! [`DeviceToHostExec`]: the download.

use std::sync::Arc;

use datafusion_physical_plan::execution_plan::SchedulingType;
use datafusion_physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion_physical_plan::{ExecutionPlan, PlanProperties};

use crate::exec::DeviceExec;

/// The node that downloads a device operator's batches, one ahead of its parent.
///
/// It keeps the order and the partitions of the rows, so DataFusion may push sorts and limits below
/// it. They run on the host and read host batches of the device operator; above them, this node
/// passes batches on and counts nothing. [`DeviceTransitions`](crate::DeviceTransitions) moves it
/// back to the device operator.
#[derive(Clone, Debug)]
pub struct DeviceToHostExec {
    pub(super) input: Arc<dyn ExecutionPlan>,
    pub(super) properties: Arc<PlanProperties>,
    pub(super) metrics: ExecutionPlanMetricsSet,
}

impl DeviceToHostExec {
    /// Makes a node above `input`, which is a [`DeviceExec`] or a node on the host.
    pub fn new(input: Arc<dyn ExecutionPlan>) -> Self {
        let mut properties = input.properties().clone();
        // With the same properties, the nodes above need not compute theirs again.
        let cooperates = properties.scheduling_type == SchedulingType::Cooperative;
        if DeviceExec::of(&input).is_some() && !cooperates {
            let own = PlanProperties::clone(&properties);
            properties = Arc::new(own.with_scheduling_type(SchedulingType::Cooperative));
        }
        Self {
            input,
            properties,
            metrics: ExecutionPlanMetricsSet::new(),
        }
    }

    /// Returns the node below.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}
