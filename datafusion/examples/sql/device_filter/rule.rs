//! The plugin: which filters run on devices.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceOperator, DevicePlugin, DeviceSpec, Verdict};
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::aggregates::AggregateExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::projection::ProjectionExec;

use super::aggregate::Why;
use super::arithmetic::DeviceArithmeticExec;
use super::cache::{KernelCache, exist_for};
use super::filter::DeviceFilterExec;
use super::group::DeviceAggregateExec;

/// Puts device operators in the place of DataFusion's nodes that the kernels support: filters, and with [`whole`](Self::whole) others.
#[derive(Debug, Default)]
pub(crate) struct FilterPlugin {
    kernels: Arc<KernelCache>,
    /// Whether it runs arithmetic and aggregates, too.
    is_whole: bool,
}

impl FilterPlugin {
    /// Runs arithmetic and aggregates, too, and has rows of the host go up for aggregates, with the filters below them; a filter alone
    /// sends none up. The default runs filters only, which a codec lets travel in clusters.
    pub(crate) fn whole() -> Self {
        let (kernels, is_whole) = (Arc::default(), true);
        Self { kernels, is_whole }
    }

    /// Returns the kernels that the plugin's filters share.
    pub(crate) fn kernels(&self) -> &Arc<KernelCache> {
        &self.kernels
    }

    /// The operator in the place of a node, or why it stays on the host, if the plugin knows such nodes.
    fn operator(
        &self,
        node: &Arc<dyn ExecutionPlan>,
    ) -> Option<Result<Arc<dyn DeviceOperator>, Why>> {
        let kernels = self.kernels.clone();
        let why = "the kernels do not support an expression, or a column";
        if let Some(filter) = node.downcast_ref() {
            let filter = DeviceFilterExec::new(filter, kernels).ok_or(why.into());
            return Some(filter.map(|operator| Arc::new(operator) as _));
        }
        self.is_whole.then_some(())?;
        if let Some(aggregate) = node.downcast_ref() {
            let aggregate = DeviceAggregateExec::new(aggregate, kernels);
            return Some(aggregate.map(|operator| Arc::new(operator) as _));
        }
        let projection = node.downcast_ref::<ProjectionExec>()?;
        // A projection of columns needs no kernel.
        let computes = projection.expr().iter().any(|one| !one.expr.is::<Column>());
        let of = || DeviceArithmeticExec::new(projection, kernels).ok_or(why.into());
        computes.then(|| of().map(|operator| Arc::new(operator) as _))
    }
}

impl DevicePlugin for FilterPlugin {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, device: &DeviceSpec) -> Verdict {
        let is_worth = node.is::<AggregateExec>() || !self.is_whole && node.is::<FilterExec>();
        match self.operator(node) {
            None => Verdict::Unknown,
            Some(_) if !exist_for(device.device_type()) => {
                Verdict::Stays(format!("there are no kernels for {device}").into())
            }
            Some(Err(why)) => Verdict::Stays(why),
            Some(Ok(_)) => match is_worth && is_scan(node.children()[0]) {
                true => Verdict::Runs,
                false => Verdict::RunsThere,
            },
        }
    }

    fn replace(&self, node: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        let stays = |why: Why| DataFusionError::Plan(format!("{} stays: {why}", node.name()));
        match self.operator(node) {
            Some(operator) => operator.map_err(stays),
            None => Err(stays("the plugin does not know it".into())),
        }
    }
}

/// Whether a plan is a scan, filtered or not, and distributed over partitions or not. Of the rows that joins and aggregates return, few are
/// left.
fn is_scan(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let passing = "CooperativeExec FilterExec ProjectionExec RepartitionExec";
    match plan.children()[..] {
        [] => true,
        [child] => passing.split(' ').any(|name| name == plan.name()) && is_scan(child),
        _ => false,
    }
}
