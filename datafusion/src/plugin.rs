//! [`DevicePlugin`]: which of DataFusion's nodes run on a device, and by which operators.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use datafusion_common::Result;
use datafusion_physical_plan::ExecutionPlan;

use super::operator::DeviceOperator;
use super::spec::DeviceSpec;

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
