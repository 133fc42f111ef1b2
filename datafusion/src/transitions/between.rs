//! [`DeviceToDeviceExec`]: the copy from one device to another.

use std::sync::Arc;

use datafusion_common::{Result, Statistics};
use datafusion_execution::TaskContext;
use datafusion_physical_plan::execution_plan::CardinalityEffect;
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion_physical_plan::{ExecutionPlan, PlanProperties};

use crate::child::execute_child_apart;
use crate::children::{only, the_same};
use crate::memory::DeviceReservation;
use crate::plan::DevicePlan;
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;
use arrow_device::Device;

/// The operator that moves another device operator's batches to its own device.
///
/// A device that reaches the memory of the other copies directly; otherwise the batches go through the host, one batch ahead
/// of the operator that reads them. Batches that are on the device already are passed on.
#[derive(Clone, Debug)]
pub struct DeviceToDeviceExec {
    input: Arc<dyn ExecutionPlan>,
    device: DeviceSpec,
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceToDeviceExec {
    /// Makes an operator above `input`, a [`DeviceExec`](crate::DeviceExec). `DeviceExec::new(Arc::new(...))` makes it a node.
    pub fn new(input: Arc<dyn ExecutionPlan>, device: impl Into<DeviceSpec>) -> Self {
        let device = device.into();
        let metrics = ExecutionPlanMetricsSet::new();
        Self {
            input,
            device,
            metrics,
        }
    }

    /// Returns the node below.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

impl DevicePlan for DeviceToDeviceExec {
    fn name(&self) -> &str {
        "DeviceToDeviceExec"
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.input.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let input = only(self.name(), children)?;
        Ok(Arc::new(Self::new(input, self.device.clone())))
    }

    fn on_host(&self) -> Option<Arc<dyn ExecutionPlan>> {
        Some(self.input.clone())
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let memory = DeviceReservation::new(&context, self.name(), partition, device);
        let memory = memory.with_metrics(&self.metrics);
        execute_child_apart(&self.input, partition, device, context, memory)
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn statistics(&self, _: Option<usize>, inputs: &[Arc<Statistics>]) -> Result<Arc<Statistics>> {
        the_same(inputs)
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::Equal
    }

    fn supports_limit_pushdown(&self) -> bool {
        true
    }
}
