//! Joins small results: the rows of several batches are gathered into one, which copies nothing twice. For batches that are made
//! already there is `DeviceCoalesceBatchesExec`, which copies them.
//!
//! A batch that waits keeps its input columns. So few wait, and not many bytes, which are reserved in the device's memory pool
//! ([`Held`](super::held::Held)).

use std::sync::Arc;

use arrow_device::{DeviceRecordBatch, Result};
use futures::{Stream, TryStreamExt, stream};

use super::select::{Running, Selected};

/// The most batches whose rows become one. Their memory is in use until then.
const MOST_BATCHES: usize = 16;

/// The most bytes of device memory that these batches keep, unless one of them alone keeps more. Beside them, a partition has one
/// batch that did not fit and two whose rows are being selected.
const MOST_KEPT: usize = 64 << 20;

/// The most bytes that a column of text or binary has in a batch that is joined: its offsets are far from their end.
const MOST_BYTES: usize = 1 << 30;

/// When a batch is large enough.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Batches of at least so many rows are not joined with the next.
    pub(crate) rows: usize,
    /// The rows that the partition has at most.
    pub(crate) fetch: Option<usize>,
    /// Whether to join: an endless input may make the first rows wait for the next for ever.
    pub(crate) join: bool,
}

/// Gathers the selected rows of a partition. What comes after the last row that is wanted is not read.
pub(crate) fn join(
    running: Arc<Running>,
    selected: impl Stream<Item = Result<Selected>> + Send + Unpin + 'static,
    limits: Limits,
) -> impl Stream<Item = Result<DeviceRecordBatch>> + Send {
    let start = Joining {
        limits,
        running,
        selected,
        next: None,
        left: limits.fetch.unwrap_or(usize::MAX),
    };
    stream::try_unfold(start, async |mut this: Joining<_>| {
        let batch = this.next_batch().await?;
        Ok(batch.map(|batch| (batch, this)))
    })
}

struct Joining<S> {
    limits: Limits,
    running: Arc<Running>,
    selected: S,
    /// What did not fit into the last batch.
    next: Option<Selected>,
    /// How many rows are still wanted.
    left: usize,
}

impl<S: Stream<Item = Result<Selected>> + Unpin> Joining<S> {
    async fn next_batch(&mut self) -> Result<Option<DeviceRecordBatch>> {
        let (mut batches, mut rows, mut bytes) = (Vec::new(), 0, 0);
        let mut kept = 0;
        let enough = self.limits.rows.min(self.left);
        let most = if self.limits.join { MOST_BATCHES } else { 1 };
        while rows < enough && batches.len() < most {
            let next = match self.next.take() {
                Some(next) => next,
                None => match self.selected.try_next().await? {
                    Some(next) => next,
                    None => break,
                },
            };
            if next.rows() == 0 {
                continue;
            }
            let fits = bytes + next.most_bytes() <= MOST_BYTES && kept + next.kept() <= MOST_KEPT;
            if !batches.is_empty() && !fits {
                self.next = Some(next);
                break;
            }
            rows += next.rows();
            bytes += next.most_bytes();
            kept += next.kept();
            batches.push(next);
        }
        if batches.is_empty() {
            return Ok(None);
        }
        let batch = self.running.gather(&batches)?;
        let batch = batch.slice(0, rows.min(self.left))?;
        self.left -= batch.num_rows();
        Ok(Some(batch))
    }
}
