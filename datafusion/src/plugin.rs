//! [`DevicePlugin`]: which of DataFusion's nodes run on a device, and [`DeviceOperator`]: what runs there in their place.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch};
use arrow_schema::{DataType, SchemaRef};
use datafusion_common::Result;
use datafusion_execution::TaskContext;
use datafusion_physical_plan::ExecutionPlan;
use datafusion_physical_plan::display::DisplayableExecutionPlan;
use datafusion_physical_plan::execution_plan::CardinalityEffect;
use datafusion_physical_plan::metrics::ExecutionPlanMetricsSet;
use futures::Stream;

use super::memory::DeviceReservation;
use super::spec::DeviceSpec;
use super::stream::{SendableDeviceStream, device_stream};
use super::upload::{Target, is_partial};

/// Which of DataFusion's nodes run on a device, and by which operators. A session has it in its [`DeviceRule`](super::DeviceRule), which does the
/// rest: it asks about each node of a plan, and inserts uploads, downloads and moves.
pub trait DevicePlugin: fmt::Debug + Send + Sync {
    /// Returns whether the plugin has an operator that does what `node` does, for rows on `device`.
    ///
    /// It is asked for every node on the host of every plan, perhaps more than once, so it should answer quickly, and the same each time. It opens no
    /// device. In a cluster, the node's children are often an engine's reader of a shuffle.
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, device: &DeviceSpec) -> Verdict;

    /// Makes the operator in place of a node that the plugin [can run](Self::can_run), over the node's children. A node of DataFusion is replaced
    /// again whenever it gets other children or another limit.
    ///
    /// # Errors
    /// Returns an error if there is no such operator.
    fn replace(&self, node: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>>;

    /// Returns how far small batches of the host are joined on their way to the plugin's operators, to so many rows or bytes. By default, `None`: as
    /// far as the session's [`DeviceOptions`](super::DeviceOptions) say.
    fn upload_target(&self) -> Option<(usize, usize)> {
        None
    }

    /// Returns the type in which the plugin's operators want columns of the host of a type, if not in that one: `Utf8` for `Utf8View`, say, the type
    /// of a dictionary's values, or a wider decimal. By default, `None`.
    ///
    /// Such columns are cast on the host before they go up, and an operator finds their types in the schema of its input's stream. The plan keeps
    /// its types: what an operator returns in another type than its node's ([`DeviceTask::stream_of`](super::DeviceTask::stream_of)) is cast on the host
    /// after it came down. Tables on a device have their own types there,
    /// and an operator above those of another plugin gets what they return.
    fn upload_type(&self, data_type: &DataType) -> Option<DataType> {
        let _ = data_type;
        None
    }

    /// Returns whether all partitions of rows of the host go up as one, for operators that gain more by large batches than by several queues. Above the
    /// operators, the rows are distributed as before. Rows that have an order or are distributed by their values stay as they are, and so do those that
    /// meet rows of a device. By default, they do not.
    fn merges_uploads(&self) -> bool {
        false
    }
}

/// What a [`DevicePlugin`] says of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The plugin has an operator for the node, and it is worth bringing the node's rows to the device, if there are enough of them.
    Runs,
    /// The plugin has an operator for the node, for rows that are on the device anyway. A filter alone is rarely worth the way up.
    RunsThere,
    /// The node stays on the host, for this reason, which [`declined`](super::declined) reports.
    Stays(Cow<'static, str>),
    /// The plugin knows nothing of such nodes, which stay on the host.
    Unknown,
}

impl Verdict {
    /// Says that a node stays on the host.
    pub fn stays(why: impl Into<Cow<'static, str>>) -> Self {
        Self::Stays(why.into())
    }
}

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

/// How rows of the host go up for a plugin's operators, or for others.
pub(super) fn target_of(plugin: Option<&Arc<dyn DevicePlugin>>, context: &TaskContext) -> Target {
    let mut target = Target::of_task(context);
    if let Some(plugin) = plugin.cloned() {
        let own = plugin.upload_target();
        (target.rows, target.bytes) = own.unwrap_or((target.rows, target.bytes));
        target.types = Arc::new(move |host| plugin.upload_type(host));
    }
    target
}
