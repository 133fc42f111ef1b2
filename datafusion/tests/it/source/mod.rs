//! Tables of real sources: what they declare, what reaches them, and what may be inserted.

use crate::prelude::*;
mod declared;
mod elsewhere;
mod insert;
mod requests;
mod statistics;
mod streams;
pub(crate) mod watched;

/// Three batches of 16 rows in each partition.
fn batches(partitions: usize) -> Vec<Vec<RecordBatch>> {
    let batch = |i| crate::kit::rows(i as i64 * 16, 16);
    let partition = |p| (p * 3..(p + 1) * 3).map(batch).collect();
    (0..partitions).map(partition).collect()
}
