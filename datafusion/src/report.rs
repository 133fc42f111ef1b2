//! [`ran_on_host`] and [`declined`]: what ran on the host, and why.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion_physical_plan::ExecutionPlan;

use super::exec::DeviceExec;
use super::form::{Forms, device_of};
use super::plugin::Verdict;
use super::rule::DeviceRule;
use super::spec::DeviceSpec;
use super::transitions::below::is_transition;

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

/// Returns which nodes of a plan stay on the host though a plugin of the rule knows such nodes, and why: as the plugin says for rows on `device`
/// ([`Verdict::Stays`]), or because they read too few rows of the host ([`DeviceRule::with_uploads`]).
///
/// # Errors
/// None but those of walking the plan.
pub fn declined(
    plan: &Arc<dyn ExecutionPlan>,
    rule: &DeviceRule,
    device: &DeviceSpec,
) -> Result<Vec<(String, String)>> {
    let placing = rule.placing(Forms::All, &ConfigOptions::default());
    let mut found = Vec::new();
    plan.apply(|node| {
        let host = DeviceExec::of(node).is_none() && !is_transition(node);
        let children = node.children();
        let reads_host = children.iter().all(|child| device_of(child).is_none());
        for plugin in rule.plugins.iter().filter(|_| host) {
            let why = match plugin.can_run(node, device) {
                Verdict::Stays(why) => Some(why.into_owned()),
                Verdict::Runs if reads_host && !children.is_empty() => placing.too_few(node),
                _ => None,
            };
            let one = why.map(|why| (node.name().to_owned(), why));
            found.extend(one.filter(|one| !found.contains(one)));
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}
