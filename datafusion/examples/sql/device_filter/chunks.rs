//! Batches whose kernels are queued one by one, and for whose numbers the host waits together.

use std::future::ready;

use arrow_device::{DeviceRecordBatch, Result};
use arrow_device_datafusion::DeviceTask;
use datafusion::error::Result as DataFusionResult;
use datafusion::physical_plan::ExecutionPlanProperties;
use futures::{Stream, TryStreamExt, stream};

use super::held::Held;

/// The most batches. Their memory is in use until then.
const MOST_BATCHES: usize = 16;

/// The most bytes of device memory that these batches keep, unless one of them alone keeps more. A partition has two such chunks.
const MOST_KEPT: usize = 64 << 20;

/// Calls `queue` for each batch of an input that has rows, with what it keeps of the device's memory, and returns the results
/// of several batches at once. Those of an endless input, or of one of which only some rows are wanted, come one by one: the others may
/// come late or never.
pub(crate) fn chunks<T: Send, F>(
    task: &DeviceTask<'_>,
    queue: F,
) -> DataFusionResult<impl Stream<Item = Result<Vec<(T, Held)>>> + Send + use<T, F>>
where
    F: FnMut(DeviceRecordBatch) -> Result<(T, Held)> + Send,
{
    let (input, node) = (task.input(0)?, task.node());
    let each = node.boundedness().is_unbounded() || node.fetch().is_some();
    let most = if each { 1 } else { MOST_BATCHES };
    let input = input.try_filter(|batch| ready(batch.num_rows() > 0));
    let start = (input, queue);
    Ok(stream::try_unfold(
        start,
        move |(mut input, mut queue)| async move {
            let (mut chunk, mut kept, mut last) = (Vec::new(), 0, 0);
            // The next batch will keep about as much as the last one.
            while chunk.len() < most
                && kept + last <= MOST_KEPT
                && let Some(batch) = input.try_next().await?
            {
                let (queued, held) = queue(batch)?;
                last = held.bytes;
                kept += last;
                chunk.push((queued, held));
            }
            let is_end = chunk.is_empty();
            Ok((!is_end).then_some((chunk, (input, queue))))
        },
    ))
}
