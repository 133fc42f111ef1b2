//! What device operators read from.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_execution::TaskContext;
use datafusion_physical_plan::ExecutionPlan;

use super::exec::DeviceExec;
use super::memory::DeviceReservation;
use super::stream::SendableDeviceStream;
use super::transfer::on_device;
use super::transitions::to_host::DeviceToHostExec;
use super::upload::{Target, upload};
use arrow_device::Device;

/// Starts a partition of a child of a [`DevicePlan`](super::DevicePlan), and returns its stream, whose batches are on `device`.
///
/// A child whose description fits `device` runs there and moves nothing; that is so of all children once
/// [`DeviceTransitions`](super::DeviceTransitions) has run. Without the rule the results are the same: the batches of a child on
/// another device are moved, and those of a child on the host are uploaded, and the operator's metrics count it.
///
/// # Errors
/// Returns the child's error if the partition cannot be started.
pub fn execute_child(
    child: &Arc<dyn ExecutionPlan>,
    partition: usize,
    device: &Device,
    context: Arc<TaskContext>,
) -> Result<SendableDeviceStream> {
    match device_node(child) {
        Some(node) if node.device().fits(device) && !node.runs_on_host(&context) => {
            let memory = moved(child, partition, device, &context);
            let stream = node.execute_on(partition, device, context)?;
            Ok(on_device(stream, device, memory))
        }
        _ => {
            let memory = moved(child, partition, device, &context);
            execute_child_apart(child, partition, device, context, memory)
        }
    }
}

/// As [`execute_child`], but a child that may run on any device of its type runs on the one of its own partition, whose number
/// is not the operator's, and its batches are moved to `device` from there.
pub(super) fn execute_child_apart(
    child: &Arc<dyn ExecutionPlan>,
    partition: usize,
    device: &Device,
    context: Arc<TaskContext>,
    memory: DeviceReservation,
) -> Result<SendableDeviceStream> {
    match device_node(child) {
        Some(node) if !node.runs_on_host(&context) => {
            let stream = node.execute_device(partition, context)?;
            Ok(on_device(stream, device, memory))
        }
        _ => {
            let target = Target::of_task(&context);
            upload(child, partition, device, context, target, memory)
        }
    }
}

/// The memory of what is uploaded or moved without a node of its own.
fn moved(
    child: &Arc<dyn ExecutionPlan>,
    partition: usize,
    device: &Device,
    context: &Arc<TaskContext>,
) -> DeviceReservation {
    let name = format!("input {}", child.name());
    DeviceReservation::new(context, &name, partition, device)
}

/// The device operator that a child is, or that it downloads.
fn device_node(child: &Arc<dyn ExecutionPlan>) -> Option<&DeviceExec> {
    let down = child.downcast_ref::<DeviceToHostExec>();
    DeviceExec::of(down.map_or(child, DeviceToHostExec::input))
}
