//! [`DeviceToDeviceExec`]: the copy from one device to another.

use std::fmt;
use std::sync::Arc;

use datafusion_common::Result;
use datafusion_physical_plan::ExecutionPlan;

use super::to_host::passing;
use crate::child::execute_child_apart;
use crate::operator::{DeviceOperator, DeviceTask};
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;

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
        Arc::new(passing(input, device, Self(())).into_transition())
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
