//! Readers as streams and streams as readers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatches, Error, Result,
};
use arrow_schema::ArrowError;

use crate::async_stream::kit::*;

// ---- readers as streams

/// A reader that tells when it was dropped.
struct Told<F>(F, Arc<AtomicBool>);

impl<F> Drop for Told<F> {
    fn drop(&mut self) {
        self.1.store(true, SeqCst);
    }
}

impl<T, F: FnMut() -> Option<T>> Iterator for Told<F> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        (self.0)()
    }
}

/// A reader of `next`, and whether it was dropped.
fn reader(
    next: impl FnMut() -> Option<Result<DeviceRecordBatch>> + Send + 'static,
) -> (
    impl DeviceRecordBatchReader + Send + 'static,
    Arc<AtomicBool>,
) {
    let dropped = Arc::new(AtomicBool::new(false));
    let batches = Told(next, dropped.clone());
    let schema = numbers(0, 1).schema();
    (
        DeviceRecordBatches::new(batches, schema, ArrowDeviceType::CPU),
        dropped,
    )
}

pub(crate) fn counting(
    n: i64,
) -> impl FnMut() -> Option<Result<DeviceRecordBatch>> + Send + 'static {
    let mut numbers = 0..n;
    move || numbers.next().map(|i| Ok(batch(i)))
}

#[test]
fn a_reader_as_a_stream() {
    for depth in [0, 1, 5, usize::MAX >> 1] {
        let (reader, dropped) = reader(counting(100));
        let stream = reader.into_stream(depth).unwrap();
        assert_eq!(stream.schema(), numbers(0, 1).schema());
        assert_eq!(stream.device_type(), ArrowDeviceType::CPU);
        let found = all(stream).into_iter();
        let found: Vec<_> = found.map(|b| number_of(&b.unwrap())).collect();
        assert_eq!(found, (0..100).collect::<Vec<_>>());
        eventually("the thread ends", || dropped.load(SeqCst));
    }
}

#[test]
fn a_reader_that_blocks_does_not_block_the_poll() {
    let gate = Gate::default();
    let pass = gate.clone();
    let mut batches = counting(2);
    let (reader, _) = reader(move || {
        pass.pass();
        batches()
    });
    let mut stream = reader.into_stream(2).unwrap();
    let (wakes, waker) = Wakes::new();
    let start = Instant::now();
    assert!(poll_next_with(&mut stream, &waker).is_pending());
    assert!(start.elapsed() < LONG / 4);
    gate.open();
    wakes.wait();
    assert_eq!(number_of(&next(&mut stream).unwrap().unwrap()), 0);
    assert_eq!(number_of(&next(&mut stream).unwrap().unwrap()), 1);
    assert!(next(&mut stream).is_none());
    assert!(next(&mut stream).is_none());
}

#[test]
fn a_reader_is_asked_ahead_no_further_than_the_depth() {
    for depth in [1, 3] {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let mut batches = counting(100);
        let (reader, _) = reader(move || {
            count.fetch_add(1, SeqCst);
            batches()
        });
        let mut stream = reader.into_stream(depth).unwrap();
        for taken in 1..20 {
            assert!(next(&mut stream).unwrap().is_ok());
            std::thread::sleep(SHORT / 25);
            let ahead = asked.load(SeqCst).saturating_sub(taken);
            assert!(ahead <= depth + 1, "{ahead} of {depth}");
        }
    }
}

#[test]
fn errors_and_panics_of_the_reader_are_the_last_item() {
    for (panics, expected) in [(false, "line 7"), (true, "inside the reader")] {
        let mut batches = counting(9);
        let mut n = 0;
        let (reader, dropped) = reader(move || {
            n += 1;
            match n {
                3 if panics => panic!("inside the reader"),
                3 => Some(Err(ArrowError::ParseError("line 7".into()).into())),
                _ => batches(),
            }
        });
        let mut items = all(reader.into_stream(2).unwrap());
        assert_eq!(items.len(), 3);
        let e = items.pop().unwrap().unwrap_err();
        assert!(e.to_string().contains(expected), "{e}");
        assert_eq!(matches!(e, Error::Panic { .. }), panics);
        eventually("the thread ends", || dropped.load(SeqCst));
    }
}

/// The waker of the task that waits for the stream is dropped at once, too.
#[test]
fn dropping_a_reader_stream_ends_its_thread() {
    // Held up by a full queue.
    let (first, dropped) = reader(counting(i64::MAX));
    let mut stream = first.into_stream(2).unwrap();
    assert!(next(&mut stream).is_some());
    drop(stream);
    eventually("the thread ends", || dropped.load(SeqCst));
    // Inside the reader: nobody waits for it.
    let gate = Gate::default();
    let pass = gate.clone();
    let (second, dropped) = reader(move || {
        pass.pass();
        None
    });
    let mut stream = second.into_stream(2).unwrap();
    let (wakes, waker) = Wakes::new();
    assert!(poll_next_with(&mut stream, &waker).is_pending());
    gate.reached();
    drop((stream, waker));
    assert_eq!(Arc::strong_count(&wakes), 1);
    assert!(!dropped.load(SeqCst));
    gate.open();
    eventually("the thread ends", || dropped.load(SeqCst));
}
