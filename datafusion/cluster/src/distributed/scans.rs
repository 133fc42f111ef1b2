//! [`Scans`]: the partitions of a table on devices, divided among tasks.

use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceScanExec};
use async_trait::async_trait;
use datafusion::error::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_distributed::{
    DesiredTaskCountEvent, DesiredTaskCountEventResponse, DesiredTaskCountHandler,
    DistributedLeafExec, ScaleUpLeafNodeEvent, ScaleUpLeafNodeEventResponse,
    ScaleUpLeafNodeHandler,
};

/// Has as many tasks read a table on devices as it has partitions, at most, each some of the partitions. A table of one partition is
/// read by one task.
#[derive(Clone, Copy)]
pub(super) struct Scans;

/// The number of partitions of a scan of a table on devices.
pub(super) fn partitions(plan: &Arc<dyn ExecutionPlan>) -> Option<usize> {
    DeviceExec::of(plan)?
        .node()
        .downcast_ref::<DeviceScanExec>()?;
    Some(plan.properties().partitioning.partition_count())
}

#[async_trait]
impl DesiredTaskCountHandler for Scans {
    async fn handle(
        &self,
        event: DesiredTaskCountEvent<'_>,
    ) -> Option<Result<DesiredTaskCountEventResponse>> {
        let partitions = partitions(event.plan).filter(|n| *n > 1);
        partitions.map(|n| Ok(DesiredTaskCountEventResponse::desired(n)))
    }
}

impl ScaleUpLeafNodeHandler for Scans {
    fn handle(
        &self,
        event: ScaleUpLeafNodeEvent<'_>,
    ) -> Option<Result<ScaleUpLeafNodeEventResponse>> {
        let scan: &DeviceScanExec = DeviceExec::of(event.plan)?.node().downcast_ref()?;
        // A part of a part is none of the whole.
        let whole = event.task_count > 1 && scan.part().is_none();
        whole.then(|| divide(event.plan, scan, event.task_count))
    }
}

fn divide(
    plan: &Arc<dyn ExecutionPlan>,
    scan: &DeviceScanExec,
    tasks: usize,
) -> Result<ScaleUpLeafNodeEventResponse> {
    let part = |index| -> Result<Arc<dyn ExecutionPlan>> {
        let scan = scan.clone().with_part(index, tasks)?;
        Ok(Arc::new(DeviceExec::from(scan)))
    };
    let parts = (0..tasks).map(part).collect::<Result<Vec<_>>>()?;
    let leaf = DistributedLeafExec::try_new(plan.clone(), parts)?;
    Ok(ScaleUpLeafNodeEventResponse::new(Arc::new(leaf)))
}
