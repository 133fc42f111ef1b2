//! The rule that inserts uploads and downloads.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::{Transformed, TreeNode};
use datafusion_physical_optimizer::PhysicalOptimizerRule;
use datafusion_physical_plan::coop::CooperativeExec;
use datafusion_physical_plan::{ExecutionPlan, replace_children_if_necessary};

use super::plan::{DeviceExec, DevicePlan};
use super::transitions::{DeviceToHostExec, HostToDeviceExec};
use arrow_device::Device;

/// The physical optimizer rule that inserts a [`HostToDeviceExec`] or a [`DeviceToHostExec`]
/// wherever a node and its child are not both on the host or on the same device.
///
/// It removes transitions that cancel out, so that operators on one device pass their batches to
/// each other and no batch moves twice. Batches for another device move through the host. Running
/// the rule again changes nothing.
///
/// Add it after all rules that insert device operators, with
/// `SessionStateBuilder::with_physical_optimizer_rule(Arc::new(DeviceTransitions))`. A session's
/// own rules run after DataFusion's, which may have inserted a `RepartitionExec` above the scan of
/// a table with few partitions, and a `SortExec` between the scan and its `DeviceToHostExec`. A
/// rule that inserts device operators must look through both, or leave such a plan unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceTransitions;

impl PhysicalOptimizerRule for DeviceTransitions {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let plan = plan.transform_up(between_parent_and_children)?.data;
        Ok(on_host(plan))
    }

    fn name(&self) -> &str {
        "DeviceTransitions"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Puts a node's children on its own side. Their own children have been done before.
fn between_parent_and_children(
    plan: Arc<dyn ExecutionPlan>,
) -> Result<Transformed<Arc<dyn ExecutionPlan>>> {
    // A transition reads the other side. Whether it is needed is decided for its parent.
    if plan.downcast_ref::<DeviceToHostExec>().is_some() || upload(&plan).is_some() {
        return Ok(Transformed::no(plan));
    }
    let device = DeviceExec::of(&plan).map(|node| node.device().clone());
    let children: Vec<_> = plan.children().into_iter().cloned().collect();
    let wanted: Vec<_> = children
        .iter()
        .map(|child| match &device {
            Some(device) => on_device(child.clone(), device),
            None => on_host(child.clone()),
        })
        .collect();
    let changed = !children.iter().zip(&wanted).all(|(a, b)| Arc::ptr_eq(a, b));
    if !changed {
        return Ok(Transformed::no(plan));
    }
    let plan = replace_children_if_necessary(plan, wanted)?;
    Ok(Transformed::yes(plan))
}

/// The upload, if `plan` is one.
fn upload(plan: &Arc<dyn ExecutionPlan>) -> Option<&HostToDeviceExec> {
    let plan = &**DeviceExec::of(plan)?.plan();
    (plan as &dyn std::any::Any).downcast_ref()
}

/// The operator below the transitions at the top of `plan`, on the host or on a device.
fn operator(mut plan: &Arc<dyn ExecutionPlan>) -> &Arc<dyn ExecutionPlan> {
    loop {
        let down = plan.downcast_ref::<DeviceToHostExec>();
        let cooperative = plan.downcast_ref::<CooperativeExec>();
        plan = match (down, upload(plan), cooperative) {
            (Some(down), ..) => down.input(),
            (_, Some(upload), _) => upload.input(),
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

/// The plan with its output on the host. A plan that needs no change stays the same node.
fn on_host(plan: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
    let operator = operator(&plan);
    if DeviceExec::of(operator).is_none() {
        return operator.clone();
    }
    match plan.downcast_ref::<DeviceToHostExec>() {
        Some(down) if Arc::ptr_eq(down.input(), operator) => plan,
        _ => Arc::new(DeviceToHostExec::new(operator.clone())),
    }
}

/// The plan with its output on a device. A plan that needs no change stays the same node.
pub(super) fn on_device(plan: Arc<dyn ExecutionPlan>, device: &Device) -> Arc<dyn ExecutionPlan> {
    let operator = operator(&plan);
    if DeviceExec::of(operator).is_some_and(|node| node.device() == device) {
        return operator.clone();
    }
    if let Some(upload) = upload(&plan) {
        let host = on_host(upload.input().clone());
        if upload.device() == device && Arc::ptr_eq(&host, upload.input()) {
            return plan;
        }
    }
    let host = on_host(operator.clone());
    let upload = HostToDeviceExec::new(host, device.clone());
    Arc::new(DeviceExec::new(Arc::new(upload)))
}
