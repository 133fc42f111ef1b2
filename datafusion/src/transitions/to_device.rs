//! [`HostToDeviceExec`]: the upload.

use std::fmt;
use std::sync::Arc;

use datafusion_common::{Result, Statistics};
use datafusion_execution::TaskContext;
use datafusion_physical_plan::execution_plan::CardinalityEffect;
use datafusion_physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion_physical_plan::{ExecutionPlan, PlanProperties};

use crate::children::{only, the_same};
use crate::memory::DeviceReservation;
use crate::plan::DevicePlan;
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;
use crate::upload::{Target, upload};
use arrow_device::Device;

/// The operator that uploads a host plan's batches to a device. Uploads run ahead of the operator
/// that reads them.
///
/// Transfers of small batches are dominated by a cost per batch, so small batches are first joined, which copies them once on the
/// host. The session's [`DeviceOptions`](crate::DeviceOptions) say how far: up to 131,072 rows or 16 MiB by default, whichever
/// comes first. [`with_target`](Self::with_target) sets it for one node. Batches of half as many rows or bytes, or more, are
/// uploaded as they are, and so is everything whose join could fail or cost more than it saves: dictionaries, run-end encoded
/// columns, unions and list views, and the batches of a plan whose input is unbounded, where waiting for more rows would
/// delay those that are there. Rows are kept back until there are enough of them, the plan has ended, or they have waited for
/// [`upload_wait_ms`](crate::DeviceOptions::upload_wait_ms), so a limit is best pushed below this node, as DataFusion does where the nodes between allow it. To the CPU, where an upload copies nothing, all
/// batches pass as they are.
#[derive(Clone, Debug)]
pub struct HostToDeviceExec {
    input: Arc<dyn ExecutionPlan>,
    device: DeviceSpec,
    /// `None`: that of the session.
    target: Option<(usize, usize)>,
    metrics: ExecutionPlanMetricsSet,
}

impl HostToDeviceExec {
    /// Makes an operator above `input`, a plan on the host. `DeviceExec::new(Arc::new(...))` makes
    /// it a node.
    pub fn new(input: Arc<dyn ExecutionPlan>, device: impl Into<DeviceSpec>) -> Self {
        let device = device.into();
        let metrics = ExecutionPlanMetricsSet::new();
        Self {
            input,
            device,
            target: None,
            metrics,
        }
    }

    /// Sets how far this node joins small batches, instead of the session's [`DeviceOptions`](crate::DeviceOptions): up to so
    /// many rows or bytes, whichever comes first. 0 rows uploads all batches as they are.
    #[must_use]
    pub fn with_target(mut self, rows: usize, bytes: usize) -> Self {
        self.target = Some((rows, bytes));
        self
    }

    /// Returns how far this node joins small batches, in rows and bytes, or `None` if the session's options say it.
    pub fn target(&self) -> Option<(usize, usize)> {
        self.target
    }

    /// The same upload of another input, to another device.
    pub(crate) fn to(&self, input: Arc<dyn ExecutionPlan>, device: DeviceSpec) -> Self {
        Self {
            target: self.target,
            ..Self::new(input, device)
        }
    }

    /// Returns the node below.
    pub fn input(&self) -> &Arc<dyn ExecutionPlan> {
        &self.input
    }
}

impl DevicePlan for HostToDeviceExec {
    fn name(&self) -> &str {
        "HostToDeviceExec"
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.target {
            Some((rows, bytes)) => {
                write!(f, ", upload_rows={rows}, upload_bytes={bytes}")
            }
            None => Ok(()),
        }
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
        Ok(Arc::new(self.to(input, self.device.clone())))
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
        let mut target = Target::of_task(&context);
        (target.rows, target.bytes) = self.target.unwrap_or((target.rows, target.bytes));
        upload(&self.input, partition, device, context, target, memory)
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
