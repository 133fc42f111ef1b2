//! [`rewrite`]: device operators in the plan of a task, on the worker that runs it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use datafusion_common::config::ConfigOptions;
use datafusion_common::{DataFusionError, Result};
use datafusion_physical_optimizer::PhysicalOptimizerRule;
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};

use super::rule::without_exchanges;

/// Puts device operators into the plan of a task, on the worker of a distributed engine that runs the task: applies the
/// plugin's rules in their order, and then inserts uploads and downloads as [`DeviceTransitions`](crate::DeviceTransitions) does.
///
/// The planner and the other workers need not know of it: a task's plan begins and ends on the host, with the same schema and
/// the same partitions as before. So one worker may use its devices while another has none. A plan in which the rules find
/// nothing to do is returned as it was, as the same `Arc`, and so is a plan that has been rewritten before.
///
/// Nodes that move rows between partitions (`RepartitionExec`, `CoalescePartitionsExec`, `SortPreservingMergeExec`) stay on the
/// host, unlike with `DeviceTransitions`: engines look for them in plans, and may start the partitions of one plan as parts of different
/// runs. The engine's own nodes stay, too, since only a rule replaces nodes.
///
/// # What a rule may do on a worker
///
/// - Replace nodes one by one: with the same schema, the same number of partitions, each with the same rows, and rows in the order that
///   the node promised. The result of each rule is checked for these (except for the rows).
/// - Leave exchanges and the nodes of the engine alone, and add none: the engine has divided the query into tasks already.
/// - Take little time: it runs for every task, and a query may have thousands. It opens no device and compiles no kernel; operators
///   do so when they are executed, once per device.
/// - Expect parts of plans: inputs are often an engine's reader of a shuffle, and a task may have any number of partitions, even none.
/// - Change nothing when it runs again over its own result.
///
/// [`DeviceUploads`](crate::DeviceUploads) is a rule that decides which rows of the host are worth the way to a device; it comes before the
/// rule that replaces the operators above them.
///
/// # Errors
/// Returns the error of a rule, and an error if a rule panics, or if the schema, the number of partitions or the order of the rows is
/// not what it was. Each names the rule.
///
/// ```
/// use std::sync::Arc;
///
/// use arrow_device::ArrowDeviceType;
/// use arrow_device_datafusion::{DeviceSpec, DeviceUploads, rewrite};
/// # use datafusion::common::config::ConfigOptions;
/// use datafusion::error::Result;
/// use datafusion::physical_optimizer::PhysicalOptimizerRule;
/// use datafusion::physical_plan::{ExecutionPlan, filter::FilterExec};
/// # use datafusion::prelude::SessionContext;
///
/// # #[derive(Debug)]
/// # struct MyRule;
/// # impl PhysicalOptimizerRule for MyRule {
/// #     fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
/// #         Ok(plan)
/// #     }
/// #     fn name(&self) -> &str {
/// #         "MyRule"
/// #     }
/// #     fn schema_check(&self) -> bool {
/// #         true
/// #     }
/// # }
/// # fn has_kernel(filter: &FilterExec) -> bool {
/// #     filter.fetch().is_none()
/// # }
/// # #[tokio::main]
/// # async fn main() -> Result<()> {
/// let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
/// let filters = |node: &Arc<dyn ExecutionPlan>| node.downcast_ref().is_some_and(has_kernel);
/// let rules: [Arc<dyn PhysicalOptimizerRule + Send + Sync>; 2] = [
///     Arc::new(DeviceUploads::new(device, filters).with_min_rows(100_000)),
///     Arc::new(MyRule), // replaces filters whose rows are on a device
/// ];
/// # let context = SessionContext::new();
/// # let query = context.sql("SELECT a FROM (VALUES (1), (2)) AS t(a) WHERE a > 1").await?;
/// # let task = query.create_physical_plan().await?;
/// let plan = rewrite(task.clone(), &rules, context.state().config_options())?;
/// assert!(Arc::ptr_eq(&plan, &task), "two rows are not worth it");
/// # Ok(())
/// # }
/// ```
pub fn rewrite(
    plan: Arc<dyn ExecutionPlan>,
    rules: &[Arc<dyn PhysicalOptimizerRule + Send + Sync>],
    options: &ConfigOptions,
) -> Result<Arc<dyn ExecutionPlan>> {
    let plan = rules.iter().try_fold(plan, |plan, rule| {
        let mut name = String::new();
        let run = |plan| {
            rule.name().clone_into(&mut name);
            rule.optimize(plan, options)
        };
        checked(plan, run).map_err(|e| e.context(format!("rule {name} on this worker")))
    })?;
    checked(plan, without_exchanges).map_err(|e| e.context("transitions on this worker"))
}

/// Runs a rule over a plan, and checks what must not have changed.
fn checked(
    before: Arc<dyn ExecutionPlan>,
    rule: impl FnOnce(Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>>,
) -> Result<Arc<dyn ExecutionPlan>> {
    // Nothing that the rule has left half done is used again, except the rule itself, whose concern it is.
    let after = catch_unwind(AssertUnwindSafe(|| rule(before.clone())));
    let after = after.map_err(|panic| {
        let reason = reason(&*panic);
        DataFusionError::Execution(format!("it panicked: {reason}"))
    })??;
    if !Arc::ptr_eq(&before, &after) {
        check(&before, &after)?;
    }
    Ok(after)
}

fn reason(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("for a reason that is not text")
}

fn check(before: &Arc<dyn ExecutionPlan>, after: &Arc<dyn ExecutionPlan>) -> Result<()> {
    let changed = |what: &str, was: String, is: String| {
        let text = format!("it changed the {what} of a task's plan from {was} to {is}");
        Err(DataFusionError::Plan(text))
    };
    let (was, is) = (before.schema(), after.schema());
    if was != is {
        return changed("schema", format!("{was:?}"), format!("{is:?}"));
    }
    let partitions = |plan: &Arc<dyn ExecutionPlan>| plan.output_partitioning().partition_count();
    let (was, is) = (partitions(before), partitions(after));
    if was != is {
        return changed("number of partitions", was.to_string(), is.to_string());
    }
    let Some(order) = before.output_ordering() else {
        return Ok(());
    };
    // What comes after the task may rely on it.
    let properties = after.equivalence_properties();
    match properties.ordering_satisfy(order.iter().cloned())? {
        true => Ok(()),
        false => {
            let is = after.output_ordering().map(ToString::to_string);
            let is = is.unwrap_or_else(|| "none".to_owned());
            changed("order", order.to_string(), is)
        }
    }
}
