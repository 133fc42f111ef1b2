//! The rule that inserts uploads and downloads.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::{Transformed, TreeNode};
use datafusion_physical_optimizer::PhysicalOptimizerRule;
use datafusion_physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion_physical_plan::{ExecutionPlan, replace_children_if_necessary};

use super::exec::DeviceExec;
use super::ops::form::{DeviceForm, Forms, drops_columns, lifted};
use super::plan::DevicePlan;
use super::source::insert::DeviceInsertExec;
use super::spec::DeviceSpec;
use super::transitions::below::{between, operator, upload};
use super::transitions::between::DeviceToDeviceExec;
use super::transitions::to_device::HostToDeviceExec;
use super::transitions::to_host::DeviceToHostExec;

/// The physical optimizer rule that inserts a [`HostToDeviceExec`], a [`DeviceToHostExec`] or a
/// [`DeviceToDeviceExec`] wherever a node and its child are not both on the host or on the same
/// device. It compares descriptions and opens no device.
///
/// DataFusion's nodes that need no kernel ([`DeviceForm`]) become operators on the device if they stand between operators there, so that
/// batches need not be downloaded for them. A limit, or a projection that drops columns, moves below the download under it, so
/// that less is downloaded.
///
/// It removes transitions that cancel out, so that operators on one device pass their batches to
/// each other and no batch moves twice. Running the rule again changes nothing. Plans give the same
/// results without it: it removes transfers, and shows the others as nodes.
///
/// Add it after all rules that insert device operators, with
/// `SessionStateBuilder::with_physical_optimizer_rule(Arc::new(DeviceTransitions))`. A session's
/// own rules run after DataFusion's, which may have inserted a `RepartitionExec` above the scan of
/// a table with few partitions. A
/// device operator above a round-robin `RepartitionExec` is fine ([`device_of`](crate::device_of) looks
/// through it); a rule that inserts device operators must look through sorts and other repartitions, or
/// leave such a plan unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceTransitions;

impl PhysicalOptimizerRule for DeviceTransitions {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(on_host(below_root(plan, Forms::All)?))
    }

    fn name(&self) -> &str {
        "DeviceTransitions"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// As the rule, but nodes that move rows between partitions stay on the host.
pub(super) fn without_exchanges(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    Ok(on_host(below_root(plan, Forms::WithoutExchanges)?))
}

/// Puts transitions everywhere but above the root.
fn below_root(plan: Arc<dyn ExecutionPlan>, forms: Forms) -> Result<Arc<dyn ExecutionPlan>> {
    let plan = plan.transform_up(|node| between_parent_and_children(node, forms))?;
    Ok(plan.data)
}

/// As the rule, for a plan whose output is wanted on a device.
pub(super) fn with_output_on(
    plan: Arc<dyn ExecutionPlan>,
    device: &DeviceSpec,
) -> Result<Arc<dyn ExecutionPlan>> {
    on_device(below_root(plan, Forms::All)?, device, Forms::All)
}

/// Puts a node's children on its own side. Their own children have been done before.
fn between_parent_and_children(
    plan: Arc<dyn ExecutionPlan>,
    forms: Forms,
) -> Result<Transformed<Arc<dyn ExecutionPlan>>> {
    // A transition reads the other side. Whether it is needed is decided for its parent.
    if is_transition(&plan) {
        return Ok(Transformed::no(plan));
    }
    let insert = plan.downcast_ref::<DeviceInsertExec>();
    let device = DeviceExec::of(&plan).map(DeviceExec::device);
    // It is on the host, and reads the device.
    let device = device.or(insert.map(DeviceInsertExec::device)).cloned();
    let children: Vec<_> = plan.children().into_iter().cloned().collect();
    let wanted: Vec<_> = children
        .iter()
        .map(|child| match &device {
            Some(device) => on_device(child.clone(), device, forms),
            None => Ok(on_host(child.clone())),
        })
        .collect::<Result<_>>()?;
    let changed = !children.iter().zip(&wanted).all(|(a, b)| Arc::ptr_eq(a, b));
    let plan = match changed {
        true => replace_children_if_necessary(plan, wanted)?,
        false => plan,
    };
    match below_the_download(&plan)? {
        Some(download) => Ok(Transformed::yes(download)),
        None => Ok(Transformed::new_transformed(plan, changed)),
    }
}

/// The download of what `plan` makes of a download, if that is less: `plan` is a limit, or a projection that drops columns.
fn below_the_download(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    let limits = plan.downcast_ref::<GlobalLimitExec>().is_some()
        || plan.downcast_ref::<LocalLimitExec>().is_some();
    if !limits && !plan.downcast_ref().is_some_and(drops_columns) {
        return Ok(None);
    }
    let down = match plan.children()[..] {
        [child] => child.downcast_ref::<DeviceToHostExec>(),
        _ => None,
    };
    let device = down.and_then(|down| DeviceExec::of(down.input()));
    let Some(device) = device.map(|node| node.device().clone()) else {
        return Ok(None);
    };
    let form = DeviceForm::of(plan.clone(), device)?;
    Ok(form.map(|form| on_host(Arc::new(DeviceExec::new(Arc::new(form))))))
}

fn is_transition(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let down = plan.downcast_ref::<DeviceToHostExec>().is_some();
    down || upload(plan).is_some() || between(plan).is_some()
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
fn on_device(
    plan: Arc<dyn ExecutionPlan>,
    device: &DeviceSpec,
    forms: Forms,
) -> Result<Arc<dyn ExecutionPlan>> {
    if let Some(there) = lifted(&plan, device, forms)? {
        return Ok(there);
    }
    let operator = operator(&plan);
    let of = DeviceExec::of(operator);
    let is_there = match (of, upload(&plan), between(&plan)) {
        (None, Some(up), _) => up.device() == device && Arc::ptr_eq(up.input(), operator),
        (Some(_), _, Some(to)) => to.device() == device && Arc::ptr_eq(to.input(), operator),
        _ => false,
    };
    if is_there {
        return Ok(plan);
    }
    let (input, device) = (operator.clone(), device.clone());
    let transition: Arc<dyn DevicePlan> = match of {
        Some(_) => Arc::new(DeviceToDeviceExec::new(input, device)),
        // What was wanted of the batches is wanted of them there, too.
        None => match upload(&plan) {
            Some(upload) => Arc::new(upload.to(input, device)),
            None => Arc::new(HostToDeviceExec::new(input, device)),
        },
    };
    Ok(Arc::new(DeviceExec::new(transition)))
}
