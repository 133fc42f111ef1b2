//! [`DeviceUploads`]: which rows of the host are worth the way to a device.

use std::fmt;
use std::sync::Arc;

use datafusion_common::Result;
use datafusion_common::config::ConfigOptions;
use datafusion_physical_optimizer::PhysicalOptimizerRule;
use datafusion_physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion_physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, replace_children_if_necessary,
};

use super::exec::DeviceExec;
use super::ops::origin::device_of;
use super::spec::DeviceSpec;
use super::transitions::to_device::HostToDeviceExec;

type Supports = dyn Fn(&Arc<dyn ExecutionPlan>) -> bool + Send + Sync;

/// A physical optimizer rule that uploads the rows that operators on the host read, if a plugin has device operators for them: it
/// inserts a [`HostToDeviceExec`] below such an operator.
///
/// A plugin's own rule replaces operators whose rows are on a device. In a plan over host tables, such as Parquet files or
/// the shuffles of a distributed engine, no rows are, so this rule comes before the plugin's, with the same device. It knows nothing of the
/// operators: the plugin says which it supports. If the plugin's rule does not replace one of them after all, the upload below it
/// is removed again by [`DeviceTransitions`](crate::DeviceTransitions), or by [`rewrite`](crate::rewrite) on a worker. The rule opens
/// no device, and running it again changes nothing.
///
/// ```
/// # use std::sync::Arc;
/// use arrow_device::ArrowDeviceType;
/// use arrow_device_datafusion::{DeviceSpec, DeviceTransitions, DeviceUploads};
/// # use datafusion::common::config::ConfigOptions;
/// # use datafusion::error::Result;
/// use datafusion::execution::SessionStateBuilder;
/// # use datafusion::physical_optimizer::PhysicalOptimizerRule;
/// use datafusion::physical_plan::{ExecutionPlan, filter::FilterExec};
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
/// let device = DeviceSpec::any(ArrowDeviceType::CUDA);
/// let filters = |node: &Arc<dyn ExecutionPlan>| node.downcast_ref::<FilterExec>().is_some();
/// let state = SessionStateBuilder::new()
///     .with_default_features()
///     .with_physical_optimizer_rule(Arc::new(DeviceUploads::new(device, filters).with_min_rows(100_000)))
///     .with_physical_optimizer_rule(Arc::new(MyRule))             // replaces filters whose rows are on a device
///     .with_physical_optimizer_rule(Arc::new(DeviceTransitions))
///     .build();
/// # let _ = state;
/// ```
#[derive(Clone)]
pub struct DeviceUploads {
    device: DeviceSpec,
    supports: Arc<Supports>,
    /// 0: whatever their number, even if it is unknown.
    min_rows: usize,
}

impl DeviceUploads {
    /// Makes a rule that uploads to `device` whatever the operators read for which `supports` returns true. `supports` is called for
    /// every node on the host and should answer exactly and quickly: which operators the plugin's rule replaces if their rows come
    /// from `device`.
    pub fn new(
        device: impl Into<DeviceSpec>,
        supports: impl Fn(&Arc<dyn ExecutionPlan>) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            device: device.into(),
            supports: Arc::new(supports),
            min_rows: 0,
        }
    }

    /// Leaves an operator on the host unless the statistics of its inputs say that they have together at least so many rows to
    /// upload, exactly or as an estimate. What an operator costs on the host grows with their number, and so does the way up, but
    /// not the fixed cost of starting kernels. Inputs without statistics and unbounded ones stay on the host. 0, the default,
    /// uploads always.
    #[must_use]
    pub fn with_min_rows(mut self, min_rows: usize) -> Self {
        self.min_rows = min_rows;
        self
    }

    /// Returns the plan with uploads, or `None` if it needs none.
    fn above_uploads(
        &self,
        node: &Arc<dyn ExecutionPlan>,
        statistics: &StatisticsContext,
    ) -> Result<Option<Arc<dyn ExecutionPlan>>> {
        let children = node.children();
        let mut changed = Vec::with_capacity(children.len());
        for child in &children {
            changed.push(self.above_uploads(child, statistics)?);
        }
        // `device_of` looks through uploads.
        let on_host = |child: &Arc<dyn ExecutionPlan>| {
            DeviceExec::of(child).is_none() && device_of(child).is_none()
        };
        if DeviceExec::of(node).is_none() && (self.supports)(node) {
            let mut read = children.iter().filter(|child| on_host(child));
            if self.min_rows == 0 || self.are_enough(&mut read, statistics) {
                for (child, changed) in children.iter().zip(&mut changed) {
                    if on_host(child) {
                        let input = changed.take().unwrap_or_else(|| (*child).clone());
                        *changed = Some(self.upload(input));
                    }
                }
            }
        }
        if changed.iter().all(Option::is_none) {
            return Ok(None);
        }
        let pairs = changed.into_iter().zip(children);
        let new = pairs.map(|(changed, child)| changed.unwrap_or_else(|| child.clone()));
        replace_children_if_necessary(node.clone(), new.collect()).map(Some)
    }

    fn upload(&self, input: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
        let upload = HostToDeviceExec::new(input, self.device.clone());
        Arc::new(DeviceExec::new(Arc::new(upload)))
    }

    fn are_enough<'a>(
        &self,
        read: &mut dyn Iterator<Item = &'a &'a Arc<dyn ExecutionPlan>>,
        statistics: &StatisticsContext,
    ) -> bool {
        let rows = read.map(|input| {
            if input.boundedness().is_unbounded() {
                return None;
            }
            // Statistics that cannot be computed are unknown.
            let known = statistics.compute(&***input, &StatisticsArgs::new());
            known.ok()?.num_rows.get_value().copied()
        });
        let rows: Option<Vec<usize>> = rows.collect();
        let total = |rows: Vec<usize>| rows.into_iter().fold(0, usize::saturating_add);
        rows.map(total).is_some_and(|rows| rows >= self.min_rows)
    }
}

impl PhysicalOptimizerRule for DeviceUploads {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let uploaded = self.above_uploads(&plan, &StatisticsContext::new())?;
        Ok(uploaded.unwrap_or(plan))
    }

    fn name(&self) -> &str {
        "DeviceUploads"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

impl fmt::Debug for DeviceUploads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceUploads")
            .field("device", &self.device)
            .field("min_rows", &self.min_rows)
            .finish_non_exhaustive()
    }
}
