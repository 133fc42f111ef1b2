//! [`DevicePlugin`]: which of DataFusion's nodes run on a device, and by which operators.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use arrow_schema::DataType;
use datafusion_common::Result;
use datafusion_execution::TaskContext;
use datafusion_physical_plan::ExecutionPlan;

use super::operator::DeviceOperator;
use super::spec::DeviceSpec;
use super::upload::Target;

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
