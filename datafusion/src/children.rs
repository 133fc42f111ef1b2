//! What nodes with one child, or none, have in common.

use std::sync::Arc;

use datafusion_common::{DataFusionError, Result, Statistics};
use datafusion_physical_plan::ExecutionPlan;

/// Returns the only child.
pub(super) fn only(
    name: &str,
    mut children: Vec<Arc<dyn ExecutionPlan>>,
) -> Result<Arc<dyn ExecutionPlan>> {
    match (children.pop(), children.len()) {
        (Some(child), 0) => Ok(child),
        _ => Err(DataFusionError::Internal(format!("{name} has one child"))),
    }
}

/// The statistics of the only child.
pub(super) fn the_same(inputs: &[Arc<Statistics>]) -> Result<Arc<Statistics>> {
    let only = inputs.first().cloned();
    only.ok_or_else(|| DataFusionError::Internal("no statistics of the child".into()))
}

/// Checks that there are no children.
pub(super) fn no_children(name: &str, children: &[Arc<dyn ExecutionPlan>]) -> Result<()> {
    match children.len() {
        0 => Ok(()),
        n => Err(DataFusionError::Internal(format!(
            "{n} children for {name}, which has none"
        ))),
    }
}
