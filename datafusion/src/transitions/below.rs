//! What stands below transitions.

use std::sync::Arc;

use datafusion_physical_plan::ExecutionPlan;
use datafusion_physical_plan::coop::CooperativeExec;

use super::between::DeviceToDeviceExec;
use super::to_device::HostToDeviceExec;
use super::to_host::DeviceToHostExec;
use crate::exec::DeviceExec;

/// The upload, if `plan` is one.
pub(crate) fn upload(plan: &Arc<dyn ExecutionPlan>) -> Option<&HostToDeviceExec> {
    DeviceExec::operator(plan)
}

/// The move between devices, if `plan` is one.
pub(crate) fn between(plan: &Arc<dyn ExecutionPlan>) -> Option<&DeviceToDeviceExec> {
    DeviceExec::operator(plan)
}

/// The operator below the transitions at the top of `plan`, on the host or on a device.
pub(crate) fn operator(mut plan: &Arc<dyn ExecutionPlan>) -> &Arc<dyn ExecutionPlan> {
    loop {
        let down = plan.downcast_ref::<DeviceToHostExec>();
        let cooperative = plan.downcast_ref::<CooperativeExec>();
        plan = match (down, upload(plan), between(plan), cooperative) {
            (Some(down), ..) => down.input(),
            (_, Some(upload), ..) => upload.input(),
            (_, _, Some(between), _) => between.input(),
            // DataFusion inserts it above nodes that it does not know to be cooperative. Device
            // operators are.
            (.., Some(node)) if is_of_a_device(node.input()) => node.input(),
            _ => return plan,
        };
    }
}

fn is_of_a_device(plan: &Arc<dyn ExecutionPlan>) -> bool {
    DeviceExec::of(plan).is_some() || plan.downcast_ref::<DeviceToHostExec>().is_some()
}
