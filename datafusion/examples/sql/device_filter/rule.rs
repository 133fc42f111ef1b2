//! The plugin: which filters run on devices.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceOperator, DevicePlugin, DeviceSpec, Verdict};
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::repartition::RepartitionExec;

use super::cache::{KernelCache, exist_for};
use super::filter::DeviceFilterExec;

/// Puts a [`DeviceFilterExec`] in the place of DataFusion's filters that the kernels support.
#[derive(Debug, Default)]
pub(crate) struct FilterPlugin {
    kernels: Arc<KernelCache>,
}

impl FilterPlugin {
    /// Returns the kernels that the plugin's filters share.
    pub(crate) fn kernels(&self) -> &Arc<KernelCache> {
        &self.kernels
    }
}

impl DevicePlugin for FilterPlugin {
    fn can_run(&self, node: &Arc<dyn ExecutionPlan>, device: &DeviceSpec) -> Verdict {
        let Some(filter) = node.downcast_ref::<FilterExec>() else {
            return Verdict::Unknown;
        };
        if !exist_for(device.device_type()) {
            return Verdict::Stays(format!("there are no kernels for {device}").into());
        }
        match DeviceFilterExec::new(filter, self.kernels.clone()) {
            Some(_) if is_of_a_scan(filter) => Verdict::Runs,
            Some(_) => Verdict::RunsThere,
            None => Verdict::stays("the kernels do not support the predicate, or a column"),
        }
    }

    fn replace(&self, node: &Arc<dyn ExecutionPlan>) -> Result<Arc<dyn DeviceOperator>> {
        let filter = node.downcast_ref::<FilterExec>();
        let filter = filter.and_then(|f| DeviceFilterExec::new(f, self.kernels.clone()));
        let none = || DataFusionError::Plan(format!("no kernels for {}", node.name()));
        Ok(Arc::new(filter.ok_or_else(none)?))
    }
}

/// Whether a filter reads a scan, distributed over partitions or not. Of the rows that joins and aggregates return, few are left.
fn is_of_a_scan(filter: &FilterExec) -> bool {
    let mut scan = filter.input();
    loop {
        let spread = scan.downcast_ref::<RepartitionExec>();
        let cooperative = scan.downcast_ref::<CooperativeExec>();
        scan = match (spread, cooperative) {
            (Some(spread), _) => spread.input(),
            (_, Some(cooperative)) => cooperative.input(),
            _ => return scan.children().is_empty(),
        };
    }
}
