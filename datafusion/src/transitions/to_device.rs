//! [`HostToDeviceExec`] and [`DeviceToDeviceExec`]: the upload, and the copy from one device to another.

use std::fmt;
use std::sync::Arc;

use arrow_schema::SchemaRef;
use datafusion_common::Result;
use datafusion_physical_plan::ExecutionPlan;

use super::to_host::passing;
use crate::inputs::execute_child_apart;
use crate::plugin::{DeviceOperator, DevicePlugin, DeviceTask, target_of};
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;
use crate::upload::{upload, with_types};

/// The operator that uploads a host plan's batches to a device. Uploads run ahead of the operator
/// that reads them.
///
/// Transfers of small batches are dominated by a cost per batch, so small batches are first joined, which copies them once on the
/// host. The session's [`DeviceOptions`](crate::DeviceOptions) say how far: up to 131,072 rows or 16 MiB by default, whichever
/// comes first. A plugin may say it for its operators ([`DevicePlugin::upload_target`]). Batches of half as many rows or bytes, or more, are
/// uploaded as they are, and so is everything whose join could fail or cost more than it saves: dictionaries, run-end encoded
/// columns, unions and list views, and the batches of a plan whose input is unbounded, where waiting for more rows would
/// delay those that are there. Rows are kept back until there are enough of them, the plan has ended, or they have waited for
/// [`upload_wait_ms`](crate::DeviceOptions::upload_wait_ms), so a limit is best pushed below this node, as DataFusion does where the nodes between allow it. To the CPU, where an upload copies nothing, all
/// batches pass as they are.
///
/// Columns are cast on the way if the plugin whose operators read them wants another type ([`DevicePlugin::upload_type`]).
#[derive(Clone, Debug, Default)]
pub struct HostToDeviceExec {
    plugin: Option<Arc<dyn DevicePlugin>>,
}

impl HostToDeviceExec {
    /// Makes an operator that uploads as a plugin wants it, if there is one.
    pub fn for_plugin(plugin: impl Into<Option<Arc<dyn DevicePlugin>>>) -> Self {
        let plugin = plugin.into();
        Self { plugin }
    }

    /// Returns the schema in which rows of the host's schema arrive.
    pub fn schema_on_device(&self, host: &SchemaRef) -> SchemaRef {
        with_types(host, |_, own| self.plugin.as_ref()?.upload_type(own))
    }

    /// Returns the node of the upload of `input`, a plan on the host, to a device.
    pub fn above(
        self,
        input: Arc<dyn ExecutionPlan>,
        device: impl Into<DeviceSpec>,
    ) -> Arc<dyn ExecutionPlan> {
        let mut node = passing(input, device, self);
        node.is_transition = true;
        Arc::new(node)
    }
}

impl DeviceOperator for HostToDeviceExec {
    fn name(&self) -> &str {
        "HostToDeviceExec"
    }

    fn describe(&self, node: &dyn ExecutionPlan, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plugin = self.plugin.as_ref();
        if let Some((rows, bytes)) = plugin.and_then(|plugin| plugin.upload_target()) {
            write!(f, ", upload_rows={rows}, upload_bytes={bytes}")?;
        }
        let (host, device) = (node.schema(), self.schema_on_device(&node.schema()));
        let columns = host.fields().iter().zip(device.fields());
        for (_, to) in columns.filter(|(from, to)| from.data_type() != to.data_type()) {
            write!(f, ", {} as {}", to.name(), to.data_type())?;
        }
        Ok(())
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let memory = task.reservation();
        let target = target_of(self.plugin.as_ref(), task.context);
        let (input, partition) = (task.child(0)?, task.partition);
        upload(input, partition, task.device, task.context, target, memory)
    }
}

/// The operator that moves another device operator's batches to its own device.
///
/// A device that reaches the memory of the other copies directly; otherwise the batches go through the host, one batch ahead
/// of the operator that reads them. Batches that are on the device already are passed on.
#[derive(Clone, Debug, Default)]
pub struct DeviceToDeviceExec(());

impl DeviceToDeviceExec {
    /// Returns the node that moves the batches of `input`, a [`DeviceExec`](crate::DeviceExec), to a device.
    pub fn above(
        input: Arc<dyn ExecutionPlan>,
        device: impl Into<DeviceSpec>,
    ) -> Arc<dyn ExecutionPlan> {
        let mut node = passing(input, device, Self(()));
        node.is_transition = true;
        Arc::new(node)
    }
}

impl DeviceOperator for DeviceToDeviceExec {
    fn name(&self) -> &str {
        "DeviceToDeviceExec"
    }

    fn describe(&self, _: &dyn ExecutionPlan, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let (input, memory) = (task.child(0)?, task.reservation());
        let (partition, device, target) = (task.partition, task.device, task.target.clone());
        execute_child_apart(input, partition, device, task.context, target, memory)
    }
}
