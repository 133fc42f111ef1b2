//! The two halves of an aggregate, between which DataFusion distributes the groups over partitions.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_physical_expr::Partitioning;
use datafusion_physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion_physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion_physical_plan::repartition::RepartitionExec;
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};

use super::exec::DeviceExec;
use super::transitions::below::operator;

/// The second half of an aggregate whose first half runs on a device, over all of its partitions at once, and how its groups are distributed
/// then. A device has no use for more partitions, and its results are only as many rows as there are groups.
pub(super) fn gathered(
    node: &Arc<dyn ExecutionPlan>,
) -> Result<Option<(Arc<dyn ExecutionPlan>, Partitioning)>> {
    let half = node.downcast_ref::<AggregateExec>();
    let half = half.filter(|half| *half.mode() == AggregateMode::FinalPartitioned);
    let exchange = half.and_then(|half| half.input().downcast_ref::<RepartitionExec>());
    let (Some(half), Some(exchange)) = (half, exchange) else {
        return Ok(None);
    };
    let first = operator(exchange.input());
    let distribution = node.output_partitioning().clone();
    let is_hash = matches!(distribution, Partitioning::Hash(..));
    if DeviceExec::of(first).is_none() || exchange.preserve_order() || !is_hash {
        return Ok(None);
    }
    let whole = AggregateExec::try_new(
        AggregateMode::Final,
        half.group_expr().clone(),
        half.aggr_expr().to_vec(),
        half.filter_expr().to_vec(),
        Arc::new(CoalescePartitionsExec::new(first.clone())),
        half.input_schema(),
    )?
    .with_limit_options(half.limit_options());
    let same = whole.schema() == half.schema();
    Ok(same.then(|| (Arc::new(whole) as _, distribution)))
}
