//! The operator: keeps the rows that pass, and some of their columns. No value is copied to the host.

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use arrow_device::Device;
use arrow_device::DeviceRecordBatches;
use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device_datafusion::{
    DevicePlan, DeviceReservation, DeviceSpec, SendableDeviceStream, execute_child, to_datafusion,
};
use datafusion::common::Statistics;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_plan::execution_plan::CardinalityEffect;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::statistics::StatisticsArgs;
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, PlanProperties, displayable,
};
use futures::{StreamExt, TryStreamExt};

use super::cache::KernelCache;
use super::join::{Limits, join};
use super::select::{Filter, Running};

/// A filter with a projection on a device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFilterExec {
    /// DataFusion's node, which this one replaces and whose properties it has.
    host: FilterExec,
    device: DeviceSpec,
    filter: Arc<Filter>,
    kernels: Arc<KernelCache>,
    /// The most that was reserved for batches that wait.
    metrics: ExecutionPlanMetricsSet,
}

impl DeviceFilterExec {
    /// Returns `None` if the kernels do not support what `host` does. Needs no device.
    pub(crate) fn in_place_of(
        host: FilterExec,
        device: DeviceSpec,
        kernels: Arc<KernelCache>,
    ) -> Option<Self> {
        let filter = Arc::new(Filter::new(&host)?);
        Some(Self {
            host,
            device,
            filter,
            kernels,
            metrics: ExecutionPlanMetricsSet::new(),
        })
    }

    /// Returns DataFusion's node, which says all of what this one does.
    pub(crate) fn host(&self) -> &FilterExec {
        &self.host
    }

    /// The operator in place of another node of DataFusion's.
    fn with_host(&self, host: FilterExec) -> Result<Arc<dyn DevicePlan>> {
        let this = Self::in_place_of(host.clone(), self.device.clone(), self.kernels.clone());
        match this {
            Some(this) => Ok(Arc::new(this)),
            None => Err(DataFusionError::Plan(format!(
                "DeviceFilterExec has no kernels for {}",
                displayable(&host).one_line().to_string().trim()
            ))),
        }
    }
}

impl DevicePlan for DeviceFilterExec {
    fn name(&self) -> &str {
        "DeviceFilterExec"
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = displayable(&self.host).one_line().to_string();
        write!(f, ", {}", host.trim().trim_start_matches("FilterExec: "))
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.host.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.host.children()
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let host = FilterExecBuilder::from(&self.host).with_input(children[0].clone());
        self.with_host(host.build()?)
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn expressions(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        vec![self.host.predicate()]
    }

    fn statistics(
        &self,
        partition: Option<usize>,
        inputs: &[Arc<Statistics>],
    ) -> Result<Arc<Statistics>> {
        let args = StatisticsArgs::new().with_partition(partition);
        self.host.statistics_from_inputs(inputs, &args)
    }

    fn cardinality_effect(&self) -> CardinalityEffect {
        CardinalityEffect::LowerEqual
    }

    fn fetch(&self) -> Option<usize> {
        self.host.fetch()
    }

    fn with_fetch(&self, limit: Option<usize>) -> Option<Arc<dyn DevicePlan>> {
        let host = FilterExecBuilder::from(self.host()).with_fetch(limit);
        self.with_host(host.build().ok()?).ok()
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let input = self.host.input();
        let limits = Limits {
            rows: context.session_config().batch_size(),
            fetch: self.host.fetch(),
            join: !input.boundedness().is_unbounded(),
        };
        let kernels = self.kernels.of(device).map_err(to_datafusion)?;
        // The node reserves for the next batch only, but batches wait for each other.
        let memory = DeviceReservation::new(&context, self.name(), partition, device);
        let memory = memory.with_metrics(&self.metrics);
        let running = Running::start(self.filter.clone(), kernels, device, memory);
        let running = Arc::new(running.map_err(to_datafusion)?);
        let input = execute_child(input, partition, device, context)?;
        let (schema, device_type) = (self.host.schema(), input.device_type());
        let select = running.clone();
        let selected = input
            .try_filter(|batch| ready(batch.num_rows() > 0))
            .map(move |batch| batch.and_then(|batch| select.select(&batch)))
            // The number of rows that pass is known once the kernels have run. The task waits for it without blocking its
            // thread, and the next batch's kernels are queued meanwhile.
            .map(|selected| async { selected?.await })
            .buffered(2);
        let output = join(running, selected.boxed(), limits);
        Ok(Box::pin(DeviceRecordBatches::from_stream(
            output,
            schema,
            device_type,
        )))
    }
}
