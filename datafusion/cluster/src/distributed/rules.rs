//! [`DeviceRules`]: the plugin's rules on a coordinator.

use std::sync::Arc;

use arrow_device_datafusion::rewrite;
use datafusion::common::config::ConfigOptions;
use datafusion::error::Result;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;

/// Applies rules as workers do, which leaves the nodes alone at which the query is divided.
#[derive(Debug)]
pub(super) struct DeviceRules(pub(super) Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>);

impl PhysicalOptimizerRule for DeviceRules {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        options: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        rewrite(plan, &self.0, options)
    }

    fn name(&self) -> &str {
        "DeviceRules"
    }

    fn schema_check(&self) -> bool {
        true
    }
}
