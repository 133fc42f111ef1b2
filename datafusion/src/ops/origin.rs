//! [`device_of`]: which device a plan's rows come from.

use std::sync::Arc;

use datafusion_physical_plan::ExecutionPlan;

use super::form::{Forms, lifted};
use crate::exec::DeviceExec;
use crate::spec::DeviceSpec;
use crate::transitions::below::operator;

/// Returns the device from which the rows of `plan` come, if they are there or could stay there: between `plan`
/// and the device operators below it there are only transitions and nodes that have a [`DeviceForm`](crate::DeviceForm), such as
/// the round-robin repartition that DataFusion puts above scans. `None` for rows of the host, and of several devices.
///
/// A rule asks this of the input of a node that it could replace by a device operator, and gives the answer to the operator as its
/// [`device`](crate::DevicePlan::device): [`DeviceTransitions`](crate::DeviceTransitions) then removes the download below.
pub fn device_of(plan: &Arc<dyn ExecutionPlan>) -> Option<DeviceSpec> {
    let mut node = operator(plan);
    let device = loop {
        match DeviceExec::of(node) {
            Some(node) => break node.device().clone(),
            None => node = operator(node.children().first()?),
        }
    };
    let stays = lifted(plan, &device, Forms::All).ok().flatten();
    stays.map(|_| device)
}
