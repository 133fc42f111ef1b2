//! The rule that puts the operator into plans.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device::datafusion::{DeviceExec, DeviceToHostExec};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::FilterExec;

use crate::DeviceFilterExec;

/// Puts a [`DeviceFilterExec`] in the place of DataFusion's filter where its rows come from a device. What the
/// kernels cannot do stays with DataFusion. `DeviceTransitions` belongs behind it, which takes away the way down that
/// was between the two.
#[derive(Debug)]
pub struct PushFilterToDevice;

impl PhysicalOptimizerRule for PushFilterToDevice {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let plan = plan.transform_up(|node| {
            let Some(filter) = node.downcast_ref::<FilterExec>() else {
                return Ok(Transformed::no(node));
            };
            let Some(device) = comes_from(filter.input()) else {
                return Ok(Transformed::no(node));
            };
            match DeviceFilterExec::in_place_of(filter, device)? {
                None => Ok(Transformed::no(node)),
                Some(plan) => Ok(Transformed::yes(Arc::new(DeviceExec::new(Arc::new(plan))))),
            }
        })?;
        Ok(plan.data)
    }

    fn name(&self) -> &str {
        "PushFilterToDevice"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The device whose batches `plan` gives, itself or by bringing them down.
fn comes_from(plan: &Arc<dyn ExecutionPlan>) -> Option<&Device> {
    let down = plan.downcast_ref::<DeviceToHostExec>();
    let below = down.map_or(plan, DeviceToHostExec::input);
    DeviceExec::of(below).map(DeviceExec::device)
}
