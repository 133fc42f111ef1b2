//! What Ballista's scheduler does not know of device nodes, and would get wrong without an error.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceForm, DeviceScanExec};
use ballista_core::serde::BallistaPhysicalExtensionCodec;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::union::UnionExec;

use super::DeviceCodec;

impl DeviceCodec {
    /// Makes this codec the one for device nodes in front of Ballista's own, for clients, schedulers and executors of Ballista, which take it
    /// with `with_ballista_physical_extension_codec` and `override_physical_codec`.
    ///
    /// Ballista's scheduler runs some of a stage's partitions in each task. To that end it takes partitions out of the leaves that it knows, and
    /// leaves others whole, so that each task would read all rows of a table on a device. It also numbers the partitions
    /// below a node as those of the node, except below DataFusion's own unions, repartitions and merges. So this codec refuses scans
    /// of tables on devices with more than one partition, and unions and merges of partitions on a device. Otherwise rows would be
    /// read twice, or lost, without an error.
    pub fn for_ballista(mut self) -> Self {
        self.splits = true;
        self.around(Arc::new(BallistaPhysicalExtensionCodec::default()))
    }

    /// Checks a node that Ballista's scheduler may split.
    ///
    /// # Errors
    /// Returns an error for a node that it would get wrong.
    pub(super) fn check_split(
        &self,
        plan: &Arc<dyn ExecutionPlan>,
        node: &DeviceExec,
    ) -> Result<()> {
        if !self.splits {
            return Ok(());
        }
        let (name, device) = (node.name(), node.device());
        if node.node().is::<DeviceScanExec>() {
            return match node.properties().output_partitioning().partition_count() {
                1 => Ok(()),
                n => Err(DataFusionError::NotImplemented(format!(
                    "{name} on {device}: Ballista cannot run a scan of a DeviceTable of {n} partitions, because its scheduler would let each \
                     task read all of them and return rows more than once; use a table of one partition, or have the executors \
                     upload the rows of files, which Ballista divides among them"
                ))),
            };
        }
        let whole = DeviceExec::operator::<DeviceForm>(plan).map(|_| node.node());
        let is_exchange = |node: &Arc<dyn ExecutionPlan>| {
            node.is::<UnionExec>() || node.is::<CoalescePartitionsExec>()
        };
        match whole.filter(|node| is_exchange(node)) {
            None => Ok(()),
            Some(host) => Err(DataFusionError::NotImplemented(format!(
                "{name} on {device}: Ballista cannot run it, because its scheduler knows only {} and would lose rows; let the executors \
                 insert the device operators (DeviceEngine), which leaves such nodes on the host",
                host.name()
            ))),
        }
    }
}
