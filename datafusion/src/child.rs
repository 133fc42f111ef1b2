//! What device operators read from.

use std::sync::Arc;

use datafusion_common::{DataFusionError, Result};
use datafusion_execution::TaskContext;
use datafusion_physical_plan::ExecutionPlan;

use super::exec::DeviceExec;
use super::memory::DeviceReservation;
use super::operator::DeviceTask;
use super::stream::SendableDeviceStream;
use super::transfer::on_device;
use super::transitions::to_host::DeviceToHostExec;
use super::upload::{Target, upload};
use arrow_device::Device;

impl DeviceTask<'_> {
    /// Starts the partition of the same number of child number `child`, and returns its batches, on [`device`](Self::device).
    ///
    /// # Errors
    /// Returns an error if there is no such child, and the child's error if it cannot be started.
    pub fn input(&self, child: usize) -> Result<SendableDeviceStream> {
        self.input_partition(child, self.partition)
    }

    /// As [`input`](Self::input), for any partition of the child: a join reads all partitions of the side that it builds a table of, say.
    ///
    /// A child whose description fits the device runs there and moves nothing; that is so of all children once
    /// [`DeviceRule`](super::DeviceRule) has run. Without the rule the results are the same: the batches of a child on
    /// another device are moved, and those of a child on the host are uploaded, and the operator's metrics count it.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn input_partition(&self, child: usize, partition: usize) -> Result<SendableDeviceStream> {
        let (child, device, context) = (self.child(child)?, self.device, self.context);
        let fits = |node: &&DeviceExec| node.device().fits(device) && !node.runs_on_host(context);
        if let Some(node) = device_node(child).filter(fits) {
            return node.execute_on(partition, device, context);
        }
        let name = format!("input {}", child.name());
        let memory = DeviceReservation::new(context, &name, partition, device);
        execute_child_apart(
            child,
            partition,
            device,
            context,
            self.target.clone(),
            memory,
        )
    }

    pub(super) fn child(&self, child: usize) -> Result<&Arc<dyn ExecutionPlan>> {
        let of = self.node.children().get(child).copied();
        of.ok_or_else(|| DataFusionError::Internal(format!("{} has no child {child}", self.name)))
    }
}

/// Starts a partition of a child of an operator on its own device, which may be another one of its type if the partition is not the operator's,
/// and returns its batches on `device`.
pub(super) fn execute_child_apart(
    child: &Arc<dyn ExecutionPlan>,
    partition: usize,
    device: &Device,
    context: &Arc<TaskContext>,
    target: Target,
    memory: DeviceReservation,
) -> Result<SendableDeviceStream> {
    match device_node(child) {
        Some(node) if !node.runs_on_host(context) => {
            let own = node.open(partition, context)?;
            let stream = node.execute_on(partition, &own, context)?;
            match own == *device {
                true => Ok(stream),
                false => Ok(on_device(stream, device, memory)),
            }
        }
        _ => upload(child, partition, device, context, target, memory),
    }
}

/// The device operator that a child is, or that it downloads.
fn device_node(child: &Arc<dyn ExecutionPlan>) -> Option<&DeviceExec> {
    let down = child.downcast_ref::<DeviceToHostExec>();
    DeviceExec::of(down.map_or(child, DeviceToHostExec::input))
}
