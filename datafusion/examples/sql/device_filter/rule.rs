//! The rule that inserts the operator into plans.

use std::sync::{Arc, Mutex, PoisonError};

use arrow_device::Device;
use arrow_device_datafusion::{DeviceExec, DeviceToHostExec, to_datafusion};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{ExecutionPlan, Partitioning, replace_children_if_necessary};

use super::filter::DeviceFilterExec;
use super::kernels::Kernels;

/// Replaces DataFusion's filter with a [`DeviceFilterExec`] if its rows come from a device. Filters
/// that the kernels do not support stay with DataFusion. `DeviceTransitions` must follow, to remove
/// the download between the two.
#[derive(Debug, Default)]
pub(crate) struct PushFilterToDevice {
    /// The kernels of the devices seen so far, which are loaded once; `None` if a device has none.
    kernels: Mutex<Vec<(Device, Option<Kernels>)>>,
}

impl PhysicalOptimizerRule for PushFilterToDevice {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(plan.transform_up(|node| self.replace(node))?.data)
    }

    fn name(&self) -> &str {
        "PushFilterToDevice"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

impl PushFilterToDevice {
    fn replace(&self, node: Arc<dyn ExecutionPlan>) -> Result<Transformed<Arc<dyn ExecutionPlan>>> {
        let Some(filter) = node.downcast_ref::<FilterExec>() else {
            return Ok(Transformed::no(node));
        };
        // DataFusion distributes the batches of few partitions over all its tasks, so that they share a
        // filter's work. That belongs after the device's filter, except with a limit, which holds for
        // each partition.
        let spread = filter.input().downcast_ref::<RepartitionExec>();
        let replaced = match spread.filter(|spread| is_round_robin(spread)) {
            Some(spread) if filter.fetch().is_none() => {
                let below = FilterExecBuilder::from(filter).with_input(spread.input().clone());
                match self.on_device(&below.build()?)? {
                    Some(below) => Some(replace_children_if_necessary(
                        filter.input().clone(),
                        vec![below],
                    )?),
                    None => None,
                }
            }
            _ => self.on_device(filter)?,
        };
        Ok(replaced.map_or_else(|| Transformed::no(node), Transformed::yes))
    }

    /// The node that does the same on the device that the rows come from.
    fn on_device(&self, filter: &FilterExec) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let Some(device) = comes_from(filter.input()) else {
            return Ok(None);
        };
        let Some(kernels) = self.kernels_of(device).map_err(to_datafusion)? else {
            return Ok(None);
        };
        let plan = DeviceFilterExec::in_place_of(filter, device, kernels);
        Ok(plan.map(|plan| Arc::new(DeviceExec::new(Arc::new(plan))) as _))
    }

    /// The kernels of a device, loaded at its first filter. No second thread loads them meanwhile.
    fn kernels_of(&self, device: &Device) -> arrow_device::Result<Option<Kernels>> {
        let mut known = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kernels)) = known.iter().find(|(known, _)| known == device) {
            return Ok(kernels.clone());
        }
        let kernels = Kernels::of(device)?;
        known.push((device.clone(), kernels.clone()));
        Ok(kernels)
    }
}

fn is_round_robin(spread: &RepartitionExec) -> bool {
    matches!(spread.partitioning(), Partitioning::RoundRobinBatch(_))
}

/// The device whose batches `plan` returns or downloads.
fn comes_from(plan: &Arc<dyn ExecutionPlan>) -> Option<&Device> {
    let down = plan.downcast_ref::<DeviceToHostExec>();
    let below = down.map_or(plan, DeviceToHostExec::input);
    DeviceExec::of(below).map(DeviceExec::device)
}
