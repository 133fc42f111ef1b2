//! The rule that inserts the operator into plans.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceSpec, DeviceToHostExec, HostToDeviceExec};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, Partitioning, replace_children_if_necessary,
};

use super::cache::{KernelCache, exist_for};
use super::filter::DeviceFilterExec;

/// Replaces DataFusion's filter with a [`DeviceFilterExec`] if its rows come from a device, or if they come from a scan on the
/// host and are worth the way up. Filters that the kernels do not support stay with DataFusion. `DeviceTransitions` must
/// follow, to remove the download below the filter, or to add the one above it.
///
/// The rule needs no device. It replaces nodes one by one: partitions and schemas stay, no exchange is added, and running it
/// again changes nothing. So it may run on any part of a plan, such as the task of a cluster's worker.
#[derive(Debug, Default)]
pub(crate) struct PushFilterToDevice {
    uploads: Option<Uploads>,
    kernels: Arc<KernelCache>,
}

/// Which filters of scans on the host move to a device.
#[derive(Clone, Debug)]
pub(crate) struct Uploads {
    pub(crate) device: DeviceSpec,
    pub(crate) when: When,
}

/// When a scan's rows are worth the way up. The scan reads all of them in any case; what its filter costs on the host grows
/// with their number, and so does the way up, but not the fixed cost of starting kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) enum When {
    Always,
    /// If the scan's statistics say that it returns at least so many rows, exactly or as an estimate. Without statistics the
    /// filter stays on the host. How many rows pass is not known and does not count.
    Rows(usize),
}

impl PushFilterToDevice {
    /// Makes a rule that moves filters of scans on the host, too. [`PushFilterToDevice::default`] leaves them there.
    pub(crate) fn with_uploads(uploads: Uploads) -> Self {
        Self {
            uploads: Some(uploads),
            ..Self::default()
        }
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
        push_filters(plan, self.uploads.as_ref(), &self.kernels)
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
    uploads: Option<&Uploads>,
    kernels: &Arc<KernelCache>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let replace = |node: Arc<dyn ExecutionPlan>| {
        let replaced = match node.downcast_ref::<FilterExec>() {
            Some(filter) => replace(filter, uploads, kernels)?,
            None => None,
        };
        Ok(replaced.map_or_else(|| Transformed::no(node), Transformed::yes))
    };
    Ok(plan.transform_up(replace)?.data)
}

/// The node that does the same on a device, if there is one.
fn replace(
    filter: &FilterExec,
    uploads: Option<&Uploads>,
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
    let Some(uploads) = uploads.filter(|uploads| is_worth_it(filter.input(), uploads.when)) else {
        return Ok(None);
    };
    let up = HostToDeviceExec::new(filter.input().clone(), uploads.device.clone());
    let up = Arc::new(DeviceExec::new(Arc::new(up)));
    let above = FilterExecBuilder::from(filter).with_input(up).build()?;
    Ok(on_device(above, &uploads.device, kernels))
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

/// Whether a plan is a scan on the host, distributed over partitions or not, whose rows are worth the way up.
fn is_worth_it(plan: &Arc<dyn ExecutionPlan>, when: When) -> bool {
    let mut scan = plan;
    loop {
        let spread = scan.downcast_ref::<RepartitionExec>();
        let cooperative = scan.downcast_ref::<CooperativeExec>();
        scan = match (spread, cooperative) {
            (Some(spread), _) => spread.input(),
            (_, Some(cooperative)) => cooperative.input(),
            _ => break,
        };
    }
    if !scan.children().is_empty() || comes_from(scan).is_some() {
        return false;
    }
    match when {
        When::Always => true,
        When::Rows(least) => {
            let statistics = StatisticsContext::new().compute(&**scan, &StatisticsArgs::new());
            // A scan whose statistics fail is one without.
            let rows = statistics
                .ok()
                .and_then(|s| s.num_rows.get_value().copied());
            !scan.boundedness().is_unbounded() && rows.is_some_and(|rows| rows >= least)
        }
    }
}
