//! The rule that inserts the operator into plans.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceSpec, DeviceToHostExec, DeviceUploads};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{ExecutionPlan, Partitioning, replace_children_if_necessary};

use super::cache::{KernelCache, exist_for};
use super::filter::DeviceFilterExec;
use super::select::Filter;

/// Replaces DataFusion's filter with a [`DeviceFilterExec`] if its rows come from a device. Filters that the kernels do not
/// support stay with DataFusion. `DeviceTransitions` must follow, to remove the download below the filter, or to add the one
/// above it.
///
/// The rule needs no device. It replaces nodes one by one: partitions and schemas stay, no exchange is added, and running it
/// again changes nothing. So it may run on any part of a plan, such as the task of a cluster's worker.
#[derive(Debug, Default)]
pub(crate) struct PushFilterToDevice {
    kernels: Arc<KernelCache>,
}

impl PushFilterToDevice {
    /// Returns the rule that comes before this one for filters of scans on the host, whose rows it uploads. `with_min_rows` says which
    /// scans are worth the way up. How many of their rows pass is not known and does not count.
    pub(crate) fn uploads(device: impl Into<DeviceSpec>) -> DeviceUploads {
        let device = device.into();
        let kernels = exist_for(device.device_type());
        DeviceUploads::new(device, move |node| {
            let filter = node.downcast_ref::<FilterExec>();
            kernels && filter.is_some_and(|f| is_of_a_scan(f) && Filter::new(f).is_some())
        })
    }

    /// Returns the kernels that the rule's filters share.
    pub(crate) fn kernels(&self) -> &Arc<KernelCache> {
        &self.kernels
    }
}

impl PhysicalOptimizerRule for PushFilterToDevice {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        push_filters(plan, &self.kernels)
    }

    fn name(&self) -> &str {
        "PushFilterToDevice"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Returns the plan with the filters that devices do on devices.
pub(crate) fn push_filters(
    plan: Arc<dyn ExecutionPlan>,
    kernels: &Arc<KernelCache>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let replace = |node: Arc<dyn ExecutionPlan>| {
        let replaced = match node.downcast_ref::<FilterExec>() {
            Some(filter) => replace(filter, kernels)?,
            None => None,
        };
        Ok(replaced.map_or_else(|| Transformed::no(node), Transformed::yes))
    };
    Ok(plan.transform_up(replace)?.data)
}

/// The node that does the same on a device, if there is one.
fn replace(
    filter: &FilterExec,
    kernels: &Arc<KernelCache>,
) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if let Some(device) = comes_from(filter.input()) {
        return Ok(on_device(filter.clone(), device, kernels));
    }
    // DataFusion distributes the batches of few partitions over all its tasks, so that they share a filter's work. Above a
    // device's batches that belongs after the device's filter, except with a limit, which holds for each partition.
    let spread = filter.input().downcast_ref::<RepartitionExec>();
    let spread = spread.filter(|spread| is_round_robin(spread) && filter.fetch().is_none());
    if let Some((spread, device)) = spread.and_then(|s| Some((s, comes_from(s.input())?))) {
        let below = FilterExecBuilder::from(filter).with_input(spread.input().clone());
        let Some(below) = on_device(below.build()?, device, kernels) else {
            return Ok(None);
        };
        let spread = replace_children_if_necessary(filter.input().clone(), vec![below])?;
        return Ok(Some(spread));
    }
    Ok(None)
}

fn on_device(
    filter: FilterExec,
    device: &DeviceSpec,
    kernels: &Arc<KernelCache>,
) -> Option<Arc<dyn ExecutionPlan>> {
    if !exist_for(device.device_type()) {
        return None;
    }
    let plan = DeviceFilterExec::in_place_of(filter, device.clone(), kernels.clone())?;
    Some(Arc::new(DeviceExec::new(Arc::new(plan))))
}

fn is_round_robin(spread: &RepartitionExec) -> bool {
    matches!(spread.partitioning(), Partitioning::RoundRobinBatch(_))
}

/// The device whose batches `plan` returns or downloads.
fn comes_from(plan: &Arc<dyn ExecutionPlan>) -> Option<&DeviceSpec> {
    let down = plan.downcast_ref::<DeviceToHostExec>();
    let below = down.map_or(plan, DeviceToHostExec::input);
    DeviceExec::of(below).map(DeviceExec::device)
}

/// Whether a filter reads a scan, distributed over partitions or not. Of the rows that joins and aggregates return, few are left.
fn is_of_a_scan(filter: &FilterExec) -> bool {
    let mut scan = filter.input();
    loop {
        let spread = scan.downcast_ref::<RepartitionExec>();
        let cooperative = scan.downcast_ref::<CooperativeExec>();
        scan = match (spread, cooperative) {
            (Some(spread), _) => spread.input(),
            (_, Some(cooperative)) => cooperative.input(),
            _ => return scan.children().is_empty(),
        };
    }
}
