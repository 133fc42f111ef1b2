//! [`DeviceOperator`]: what runs on a device in the place of a node of DataFusion.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch};
use arrow_schema::SchemaRef;
use datafusion_common::Result;
use datafusion_execution::TaskContext;
use datafusion_physical_plan::ExecutionPlan;
use datafusion_physical_plan::display::DisplayableExecutionPlan;
use datafusion_physical_plan::execution_plan::CardinalityEffect;
use datafusion_physical_plan::metrics::ExecutionPlanMetricsSet;
use futures::Stream;

use super::memory::DeviceReservation;
use super::stream::{SendableDeviceStream, device_stream};
use super::upload::{Target, is_partial};

/// What runs on a device in the place of a node of DataFusion.
///
/// It becomes part of a plan inside a [`DeviceExec`](super::DeviceExec), which opens the device, measures the operator, and shows it in `EXPLAIN`.
/// What DataFusion asks of a plan — its schema, partitions, orders, statistics, limits — the node answers, so that an operator only runs. A
/// [`DevicePlugin`](super::DevicePlugin) makes operators, and makes another one when the node's children or limit change.
pub trait DeviceOperator: Any + fmt::Debug + Send + Sync {
    /// Returns the operator's name, for `EXPLAIN`.
    fn name(&self) -> &str;

    /// Starts a partition.
    ///
    /// It runs on a thread of the runtime and must not block. The stream's batches are on [`DeviceTask::device`], and have the node's columns. Its
    /// polls must not wait for the device: they queue the work, and return a batch before the work is done. State of a device, such as loaded
    /// kernels, is best kept by device and shared by operators.
    ///
    /// # Errors
    /// Returns an error if the partition cannot be started. An error from the stream fails the query.
    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream>;

    /// Writes what `EXPLAIN` shows after the name and the device, beginning with `", "`. By default, what it shows of the node.
    fn describe(&self, node: &dyn ExecutionPlan, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = DisplayableExecutionPlan::new(node).one_line().to_string();
        match text.trim_end().split_once(": ") {
            Some((_, details)) => write!(f, ", {details}"),
            None => Ok(()),
        }
    }

    /// Returns whether the node itself can run in the operator's place, on the host: each of its partitions has the rows of the operator's.
    ///
    /// It does if the session says so ([`DeviceOptions`](super::DeviceOptions)): always, or with
    /// [`fallback`](super::DeviceOptions::fallback) if the device cannot be opened, or if its memory is not enough for a partition's first batch
    /// and what the operator reads can be read again. With `fallback`, of a node with one input
    /// and without dynamic filters, some partitions may run on the host and others on the device, and a partition may be started twice: return
    /// `false` if partitions share state. The operators below decide for themselves. `EXPLAIN ANALYZE` and
    /// [`ran_on_host`](super::ran_on_host) say why. By default, `true`.
    fn runs_on_host(&self) -> bool {
        true
    }

    /// Returns whether the operator's batches may be small, so that [`DeviceRule`](super::DeviceRule) inserts a
    /// [`DeviceCoalesceBatchesExec`](super::DeviceCoalesceBatchesExec) above it. By default, if the node leaves out rows, as a filter does; the
    /// states of a partial aggregate stay as they are.
    fn has_small_batches(&self, node: &dyn ExecutionPlan) -> bool {
        matches!(node.cardinality_effect(), CardinalityEffect::LowerEqual) && !is_partial(node)
    }
}

/// A partition of an operator that is to run.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceTask<'a> {
    /// The number of the partition.
    pub partition: usize,
    /// The device, opened. Another partition may get another one.
    pub device: &'a Device,
    /// The task of DataFusion.
    pub context: &'a Arc<TaskContext>,
    pub(super) node: &'a Arc<dyn ExecutionPlan>,
    pub(super) name: &'a str,
    /// How rows of the host go up to it.
    pub(super) target: Target,
    pub(super) metrics: &'a ExecutionPlanMetricsSet,
}

impl DeviceTask<'_> {
    /// Returns the node in whose place the operator is, over the operator's children.
    pub fn node(&self) -> &Arc<dyn ExecutionPlan> {
        self.node
    }

    /// Returns the metrics of the operator, which `EXPLAIN ANALYZE` shows beside those of its `DeviceExec`.
    pub fn metrics(&self) -> &ExecutionPlanMetricsSet {
        self.metrics
    }

    /// Makes a reservation for what the operator keeps longer than its reader has a batch, or needs beside its result.
    pub fn reservation(&self) -> DeviceReservation {
        let memory = DeviceReservation::new(self.context, self.name, self.partition, self.device);
        memory.with_metrics(self.metrics)
    }

    /// Makes the operator's stream of any stream of batches of the node's columns.
    pub fn stream(
        &self,
        batches: impl Stream<Item = arrow_device::Result<DeviceRecordBatch>> + Send + 'static,
    ) -> SendableDeviceStream {
        self.stream_of(self.node.schema(), batches)
    }

    /// As [`stream`](Self::stream), for columns some of which have other types than the node's: those that the plugin wanted them in
    /// ([`DevicePlugin::upload_type`](super::DevicePlugin::upload_type)), say. arrow-rs casts them after they came down.
    pub fn stream_of(
        &self,
        schema: SchemaRef,
        batches: impl Stream<Item = arrow_device::Result<DeviceRecordBatch>> + Send + 'static,
    ) -> SendableDeviceStream {
        device_stream(batches, schema, self.device.id().device_type)
    }
}
