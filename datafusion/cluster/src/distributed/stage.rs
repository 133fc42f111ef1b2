//! [`rewrite_stage`]: a stage with device operators.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceRule, DeviceToHostExec};
use datafusion::common::config::ConfigOptions;
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::repartition::RepartitionExec;

/// Applies the rule to the plan of a stage.
///
/// A worker takes a `RepartitionExec` at the head of a stage for the one that the planner put there for the next stage, and
/// replaces it. So one that a rule has moved there, such as from below a filter, gets a node above it, which passes batches on.
pub(super) fn rewrite_stage(
    before: Arc<dyn ExecutionPlan>,
    rule: &DeviceRule,
    options: &ConfigOptions,
) -> Result<Arc<dyn ExecutionPlan>> {
    let had = before.is::<RepartitionExec>();
    let after = rule.rewrite(before, options)?;
    Ok(match !had && after.is::<RepartitionExec>() {
        true => Arc::new(DeviceToHostExec::new(after)),
        false => after,
    })
}
