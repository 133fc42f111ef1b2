//! Streams in and out. What any device must keep is in `stream_suite`.

mod devices;
mod interface;
mod overlap;
mod read_ahead;
pub(crate) mod rigs;

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int64Array, RecordBatch};

/// A column of numbers from `first` on.
fn batch(rows: usize, first: usize) -> RecordBatch {
    let values = Int64Array::from_iter_values((first..first + rows).map(|i| i as i64));
    RecordBatch::try_from_iter([("a", Arc::new(values) as ArrayRef)]).unwrap()
}

fn batches(n: usize) -> Vec<RecordBatch> {
    (0..n).map(|i| batch(100 + i, 1000 * i)).collect()
}

/// Waits until something is so, which happens on another thread.
#[track_caller]
fn until(condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "it does not happen");
        std::thread::sleep(Duration::from_micros(200));
    }
}
