//! [`DeviceRule`]: the rule that puts plugins' operators into plans, with uploads and downloads; what ran on the host after all, and why.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use datafusion_common::config::ConfigOptions;
use datafusion_common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion_common::{DataFusionError, Result};
use datafusion_physical_optimizer::PhysicalOptimizerRule;
use datafusion_physical_plan::ExecutionPlan;

use super::exec::DeviceExec;
use super::form::Forms;
use super::inputs::text_of;
use super::place::{Placing, Uploads};
use super::plugin::DevicePlugin;
use super::spec::DeviceSpec;

/// The physical optimizer rule that puts the operators of [`DevicePlugin`]s into plans, and inserts a
/// [`HostToDeviceExec`](crate::HostToDeviceExec), a [`DeviceToHostExec`](crate::DeviceToHostExec) or a
/// [`DeviceToDeviceExec`](crate::DeviceToDeviceExec) wherever a node and its child are not both on the host or on the same device. It compares
/// descriptions and opens no device.
///
/// - A node is replaced if its rows come from a device and a plugin runs it there. Rows of the host go up for nodes that are
///   worth it ([`with_uploads`](Self::with_uploads)), together with what the plugin runs below them.
/// - DataFusion's nodes that need no kernel ([`DeviceForm`](crate::DeviceForm)) become operators on the device if they stand between operators there,
///   so that batches need not be downloaded for them. A round-robin repartition, which DataFusion puts above scans, moves above the operators on the
///   device, and so does the repartition by hash between the halves of an aggregate that both run there. A limit, or a projection that drops columns, moves below the download under it, so that less is downloaded.
/// - Small batches, such as those that a filter leaves, are joined
///   ([`DeviceCoalesceBatchesExec`](crate::DeviceCoalesceBatchesExec)) up to the session's `batch_size`.
/// - Transitions that cancel out are removed, so that operators on one device pass their batches to each other.
///
/// Running the rule again changes nothing. A session's own rules run after DataFusion's. Add this one last:
///
/// ```
/// # use std::sync::Arc;
/// use arrow_device::ArrowDeviceType;
/// use arrow_device_datafusion::{DeviceOptions, DeviceRule, DeviceSpec};
/// # use arrow_device_datafusion::{DeviceOperator, DevicePlugin, Verdict};
/// use datafusion::{execution::SessionStateBuilder, prelude::SessionConfig};
/// # #[derive(Debug)]
/// # struct MyPlugin;
/// # impl DevicePlugin for MyPlugin {
/// #     fn can_run(&self, _: &Arc<dyn datafusion::physical_plan::ExecutionPlan>, _: &DeviceSpec) -> Verdict {
/// #         Verdict::stays("an example")
/// #     }
/// #     fn replace(&self, _: &Arc<dyn datafusion::physical_plan::ExecutionPlan>) -> datafusion::error::Result<Arc<dyn DeviceOperator>> {
/// #         unreachable!()
/// #     }
/// # }
/// let rule = DeviceRule::default()
///     .with_plugin(Arc::new(MyPlugin))
///     .with_uploads(DeviceSpec::any(ArrowDeviceType::CUDA), 100_000);
/// let state = SessionStateBuilder::new()
///     .with_default_features()
///     .with_config(SessionConfig::new().with_option_extension(DeviceOptions::default())) // for SET device.enable = false
///     .with_physical_optimizer_rule(Arc::new(rule))
///     .build();
/// # let _ = state;
/// ```
#[derive(Clone, Debug, Default)]
pub struct DeviceRule {
    pub(super) plugins: Vec<Arc<dyn DevicePlugin>>,
    uploads: Option<Uploads>,
}

impl DeviceRule {
    /// Adds a plugin. The first one that runs a node gets it. Without any, the rule inserts transitions only.
    #[must_use]
    pub fn with_plugin(mut self, plugin: Arc<dyn DevicePlugin>) -> Self {
        self.plugins.push(plugin);
        self
    }

    /// Uploads rows of the host to `device`, for nodes that plugins run ([`Verdict::Runs`](crate::Verdict::Runs)), if the statistics say
    /// that they are at least so many, exactly or as an estimate. What a node costs on the host grows with their number, and so does the way up,
    /// but not the fixed cost of starting kernels. Inputs without statistics and unbounded ones stay on the host. With 0, all go up.
    #[must_use]
    pub fn with_uploads(mut self, device: impl Into<DeviceSpec>, min_rows: usize) -> Self {
        let device = device.into();
        self.uploads = Some(Uploads { device, min_rows });
        self
    }

    /// Puts device operators into the plan of a task, on the worker of a distributed engine that runs the task.
    ///
    /// The planner and the other workers need not know of it: a task's plan begins and ends on the host, with the same schema and
    /// the same partitions as before. So one worker may use its devices while another has none. A plan in which there is
    /// nothing to do is returned as it was, as the same `Arc`, and so is a plan that has been rewritten before.
    ///
    /// Nodes that gather partitions (`CoalescePartitionsExec`, `SortPreservingMergeExec`) stay on the
    /// host, unlike in a session: engines look for them in plans, and may start the partitions of one plan as parts of different
    /// runs. The engine's own nodes stay, too, since only plugins replace nodes.
    ///
    /// # Errors
    /// Returns a plugin's error, and an error if one panics.
    pub fn rewrite(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        // Nothing that a plugin has left half done is used again, except the plugin itself, whose concern it is.
        let placing = self.placing(Forms::WithoutExchanges, options);
        let placed = catch_unwind(AssertUnwindSafe(|| placing.optimize(plan)));
        let placed = placed.unwrap_or_else(|panic| {
            let what = format!("a plugin panicked: {}", text_of(&*panic));
            Err(DataFusionError::Execution(what))
        });
        placed.map_err(|e| e.context("device operators on this worker"))
    }

    pub(super) fn placing(&self, forms: Forms, options: &ConfigOptions) -> Placing<'_> {
        Placing::new(&self.plugins, self.uploads.as_ref(), forms, options)
    }
}

impl PhysicalOptimizerRule for DeviceRule {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        self.placing(Forms::All, options).optimize(plan)
    }

    fn name(&self) -> &str {
        "DeviceRule"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

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
                let one = Some((node.name().to_owned(), reason.to_owned()));
                found.extend(one.filter(|one| !found.contains(one)));
            }
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(found)
}

/// Returns which nodes of a plan stay on the host though a plugin of the rule knows such nodes, and why: as the plugin says for rows on `device`
/// ([`Verdict::Stays`](crate::Verdict::Stays)), because rows are on the host that do not go up for such a node
/// ([`Verdict::RunsThere`](crate::Verdict::RunsThere)), or because they are too few ([`DeviceRule::with_uploads`]). `EXPLAIN` shows at its first node
/// those of which rows are on a device, or would go up.
///
/// # Errors
/// None but those of walking the plan.
pub fn declined(
    plan: &Arc<dyn ExecutionPlan>,
    rule: &DeviceRule,
    device: &DeviceSpec,
) -> Result<Vec<(String, String)>> {
    let placing = rule.placing(Forms::All, &ConfigOptions::default());
    placing.staying(plan, Some(device))
}
