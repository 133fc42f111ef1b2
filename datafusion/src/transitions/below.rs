//! What stands below transitions.

use std::sync::Arc;

use datafusion_physical_plan::ExecutionPlan;
use datafusion_physical_plan::coop::CooperativeExec;

use super::to_host::DeviceToHostExec;
use crate::exec::DeviceExec;

pub(crate) fn is_transition(plan: &Arc<dyn ExecutionPlan>) -> bool {
    plan.is::<DeviceToHostExec>() || DeviceExec::of(plan).is_some_and(|node| node.is_transition)
}

/// The operator below the transitions at the top of `plan`, on the host or on a device.
pub(crate) fn operator(mut plan: &Arc<dyn ExecutionPlan>) -> &Arc<dyn ExecutionPlan> {
    loop {
        // DataFusion inserts it above nodes that it does not know to be cooperative. Device operators are.
        let cooperative = plan.downcast_ref::<CooperativeExec>();
        let above = cooperative.is_some_and(|node| is_of_a_device(node.input()));
        match plan.children()[..] {
            [child] if above || is_transition(plan) => plan = child,
            _ => return plan,
        }
    }
}

fn is_of_a_device(plan: &Arc<dyn ExecutionPlan>) -> bool {
    DeviceExec::of(plan).is_some() || plan.is::<DeviceToHostExec>()
}
