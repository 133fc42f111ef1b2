//! [`ran_on_host`]: which device operators ran on the host after all, and why.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion_physical_plan::ExecutionPlan;

use super::exec::DeviceExec;

/// Returns which device operators of a plan that has run did their work on the host, and why: each once for each reason. `EXPLAIN ANALYZE` shows the same,
/// as metrics `on_host (reason)` that count partitions.
///
/// # Errors
/// None but those of walking the plan.
pub fn ran_on_host(plan: &Arc<dyn ExecutionPlan>) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    plan.apply(|node| {
        let metrics = DeviceExec::of(node).and_then(ExecutionPlan::metrics);
        for metric in metrics.iter().flat_map(|metrics| metrics.iter()) {
            let name = metric.value().name().strip_prefix("on_host (");
            if let Some(reason) = name.and_then(|name| name.strip_suffix(')')) {
                let one = (node.name().to_owned(), reason.to_owned());
                if !found.contains(&one) {
                    found.push(one);
                }
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}
