//! [`SingleTasks`]: stages that must not be divided.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceForm, DeviceInsertExec};
use async_trait::async_trait;
use datafusion::error::Result;
use datafusion::physical_expr::Distribution;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion_distributed::{
    DesiredTaskCountEvent, DesiredTaskCountEventResponse, DesiredTaskCountHandler,
};

/// Keeps a stage in one task if a device node in it reads all rows of a child. DataFusion's nodes that do so are divided from the
/// stages below them, or get their child's rows broadcast; of device nodes, the engine knows nothing.
pub(super) struct SingleTasks;

#[async_trait]
impl DesiredTaskCountHandler for SingleTasks {
    async fn handle(
        &self,
        event: DesiredTaskCountEvent<'_>,
    ) -> Option<Result<DesiredTaskCountEventResponse>> {
        let single = reads_a_whole_child(event.plan);
        single.then(|| Ok(DesiredTaskCountEventResponse::maximum(1)))
    }
}

fn reads_a_whole_child(plan: &Arc<dyn ExecutionPlan>) -> bool {
    if plan.is::<DeviceInsertExec>() {
        return true;
    }
    let Some(node) = DeviceExec::of(plan) else {
        return false;
    };
    let form = DeviceExec::operator::<DeviceForm>(plan).map(|_| node.node());
    if form.is_some_and(|n| n.is::<CoalescePartitionsExec>() || n.is::<SortPreservingMergeExec>()) {
        return true;
    }
    let required = plan.input_distribution_requirements();
    let mut required = required.per_child_distributions();
    required.any(|d| matches!(d, Distribution::SinglePartition))
}
