//! What runs while something else does, what it takes up, and what it creates.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int64Array, RecordBatch, RecordBatchIterator, RecordBatchReader};
use arrow_device::device::sim::{FaultOp, SimConfig, SimMode};
use arrow_device::{
    Device, DeviceRecordBatchReader, DeviceRecordBatches, Error, Result, TransferStats,
    upload_reader,
};
use arrow_schema::ArrowError;

use crate::simkit::{MODES, Sim};
use crate::streams::{batch, batches};
use crate::support::{assert_same_batch, wide_batch};

/// `n` batches of a device; what the device and the stream have done at each time one is asked for.
fn stream(
    device: &Device,
    batches: Vec<Result<RecordBatch>>,
    mut asked: impl FnMut(usize) + Send + 'static,
) -> impl DeviceRecordBatchReader + Send + 'static {
    let up = |batch: Result<RecordBatch>| device.upload(&batch?);
    let (schema, device_type) = (batch(0, 0).schema(), device.id().device_type);
    let mut batches = batches.into_iter().map(up).collect::<Vec<_>>().into_iter();
    device.synchronize().unwrap();
    let mut n = 0;
    let next = std::iter::from_fn(move || {
        n += 1;
        asked(n);
        batches.next()
    });
    DeviceRecordBatches::new(next, schema, device_type)
}

/// Counts how often a stream is asked.
fn counter() -> (Arc<AtomicUsize>, impl FnMut(usize) + Send) {
    let count = Arc::new(AtomicUsize::new(0));
    let counting = count.clone();
    (count, move |n| counting.store(n, SeqCst))
}

fn repeated(batch: &RecordBatch, n: usize) -> impl RecordBatchReader + Send + 'static {
    let (batch, schema) = (batch.clone(), batch.schema());
    RecordBatchIterator::new((0..n).map(move |_| Ok(batch.clone())), schema)
}

#[test]
fn errors_come_after_the_batches_before_them() {
    let sim = Sim::new(SimMode::Deferred);
    let sent = batches(3);
    let error = ArrowError::IoError("the disk is gone".into(), std::io::Error::other("gone"));
    let other = RecordBatch::try_from_iter([("x", sent[0].column(0).clone())]).unwrap();
    for bad in [Err(error.into()), Ok(other)] {
        let mut all: Vec<_> = sent[..2].iter().cloned().map(Ok).collect();
        let text = match &bad {
            Err(_) => "the disk is gone",
            Ok(_) => "is called 'x'",
        };
        all.extend([bad, Ok(sent[2].clone())]);
        let (asked, count) = counter();
        // However far ahead, nothing is asked for behind an error.
        let mut host = stream(&sim, all, count).into_host_reader().with_prefetch(3);
        for sent in &sent[..2] {
            assert_same_batch(sent, &host.next().unwrap().unwrap(), text);
        }
        assert_eq!(asked.load(SeqCst), 3);
        let e = host.next().unwrap().unwrap_err();
        assert!(e.to_string().contains(text), "{e}");
        assert!(host.next().is_none());
        assert_eq!(asked.load(SeqCst), 3, "a reader that failed asks no more");
    }
    sim.assert_done();
}

/// A batch that cannot be copied is an error in its place; those behind it are dropped.
#[test]
fn failed_copies_are_errors_in_their_place() {
    for op in [
        FaultOp::Copy,
        FaultOp::Record,
        FaultOp::HostWait,
        FaultOp::NewQueue,
    ] {
        for n in 1..4 {
            let sim = Sim::new(SimMode::Deferred);
            let sent = batches(4);
            let host = stream(&sim, sent.iter().cloned().map(Ok).collect(), |_| ());
            sim.faults().fail_nth(op, n);
            let mut good = 0;
            let mut failed = false;
            for back in host.into_host_reader() {
                assert!(!failed, "{op:?}: goes on after an error");
                match back {
                    Ok(back) => {
                        assert_same_batch(&sent[good], &back, good);
                        good += 1;
                    }
                    Err(e) => {
                        let e = Error::from(e);
                        assert!(matches!(e, Error::Device { code: 1, .. }), "{op:?}: {e}");
                        failed = true;
                    }
                }
            }
            // One queue for copies and one for sizes serve for all batches.
            let expected = match op {
                FaultOp::NewQueue if n > 2 => (false, 4),
                FaultOp::NewQueue => (true, 0),
                _ => (true, n as usize - 1),
            };
            assert_eq!((failed, good), expected, "{op:?}");
            sim.faults().clear();
            sim.assert_done();
        }
    }
}

/// When a batch is asked for the one before is on its way, and nobody has waited for it.
#[test]
fn copies_run_while_the_next_batch_is_made() {
    let sim = Sim::new(SimMode::Deferred);
    let (device, before) = (sim.device.clone(), Arc::new(std::sync::Mutex::new(None)));
    let start = before.clone();
    let asked = move |n: usize| {
        let before: TransferStats = *start.lock().unwrap().get_or_insert(device.stats());
        let cost = device.stats().since(&before);
        let waits = n.saturating_sub(2);
        let copies = n - 1;
        assert_eq!(
            (cost.copies, cost.host_waits),
            (copies as u64, waits as u64),
            "batch {n}"
        );
    };
    let sent = batches(5);
    let host = stream(&sim, sent.iter().cloned().map(Ok).collect(), asked).into_host_reader();
    assert_eq!(host.map(|b| b.unwrap().num_rows()).sum::<usize>(), 510);
    let cost = sim.stats().since(&before.lock().unwrap().unwrap());
    assert_eq!((cost.copies, cost.events, cost.host_waits), (5, 5, 5));
    sim.assert_done();
}

/// A consumer that goes away leaves nothing behind, whatever was on its way.
#[test]
fn early_ends_leave_nothing() {
    for mode in MODES {
        for taken in 0..4 {
            let sim = Sim::new(mode);
            let sent = batches(5);
            let host = stream(&sim, sent.into_iter().map(Ok).collect(), |_| ());
            let mut host = host.into_host_reader().with_prefetch(2);
            let kept: Vec<_> = host.by_ref().take(taken).map(|b| b.unwrap()).collect();
            drop(host);
            assert_eq!(
                kept.iter().map(RecordBatch::num_rows).sum::<usize>(),
                (100..).take(taken).sum::<usize>()
            );
            drop(kept);
            sim.assert_done();
        }
    }
}

/// The source lives until it was read, though the consumer has gone.
#[test]
fn sources_of_abandoned_downloads_live() {
    let sim = Sim::new(SimMode::Deferred);
    let mut host =
        stream(&sim, batches(2).into_iter().map(Ok).collect(), |_| ()).into_host_reader();
    assert!(host.next().unwrap().is_ok());
    drop(host);
    // The second batch is still to be read, into memory that is still there.
    let report = sim.sim.report();
    assert_eq!(report.live_allocations, 1, "{report:#?}");
    assert!(report.live_host_allocations >= 2, "{report:#?}");
    sim.assert_done();
}

/// The release thread frees what finished uploads have kept: events, and staging memory before them.
#[track_caller]
fn few_events(sim: &Sim, most: usize) {
    let end = Instant::now() + Duration::from_secs(5);
    while sim.sim.report().live_events > most {
        let events = sim.sim.report().live_events;
        assert!(Instant::now() < end, "{events} events");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A stream of uploads that nobody waits for takes up a bounded amount of memory.
#[test]
fn uploads_ahead_are_bounded() {
    let sim = Sim::new(SimMode::Deferred);
    // 10 MiB in pieces too small to be copied from where they are.
    let wide = wide_batch(20, 10);
    let large: Vec<(String, ArrayRef)> = (0..10)
        .map(|i| {
            let values = Int64Array::from_iter_values(0..(1 << 17) - 8);
            (format!("c{i}"), Arc::new(values) as ArrayRef)
        })
        .collect();
    let large = RecordBatch::try_from_iter(large).unwrap();
    for up in upload_reader(repeated(&large, 40), &sim) {
        drop(up.unwrap());
        few_events(&sim, 40);
        let bytes = sim.sim.report().live_host_bytes;
        assert!(bytes <= 220 << 20, "{bytes} bytes of staging memory");
    }
    let waits = sim.stats().host_waits;
    assert!((20..40).contains(&waits), "{waits} waits");
    sim.synchronize().unwrap();
    for up in upload_reader(repeated(&wide, 200), &sim) {
        drop(up.unwrap());
        few_events(&sim, 140);
    }
    sim.assert_done();
}

/// No waits as long as the device keeps up.
#[test]
fn uploads_that_are_done_are_not_waited_for() {
    let sim = Sim::new(SimMode::Async);
    let wide = wide_batch(20, 10);
    let before = sim.stats();
    for up in upload_reader(repeated(&wide, 300), &sim) {
        let up = up.unwrap();
        while !up.is_ready().unwrap() {
            std::thread::yield_now();
        }
    }
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    sim.assert_done();
}

/// Uploads, downloads and the producer, all at once: a batch goes up while another is made and a third comes down. That takes hardly
/// longer than the slowest of them; a busy machine has a margin and a few chances. One after the other, it takes three times as long.
#[test]
fn both_directions_overlap() {
    let (n, rate) = (10, 6_000_000);
    let sent = batch(16_000, 0);
    let copy = Duration::from_secs_f64(f64::from(16_000 * 8) / rate as f64);
    let sim = Sim::with(SimConfig {
        bytes_per_second: Some(rate),
        ..SimConfig::default()
    });
    let most = copy.mul_f64(1.5 * f64::from(n)) + copy * 2;
    let took: Vec<_> = (0..10)
        .map(|_| {
            let start = Instant::now();
            let batch = sent.clone();
            let batches = (0..n).map(move |_| {
                std::thread::sleep(copy);
                Ok(batch.clone())
            });
            let reader = RecordBatchIterator::new(batches, sent.schema());
            let host = upload_reader(reader, &sim).into_host_reader();
            let host = host.with_prefetch(2);
            assert_eq!(host.filter(|b| b.is_ok()).count(), n as usize);
            start.elapsed()
        })
        .take_while(|took| *took > most)
        .collect();
    assert!(took.len() < 10, "{took:?}, should be {most:?}");
    sim.assert_done();
}

/// Equal batches up and down create host memory for the first ones only.
#[test]
fn warm_streams_create_nothing() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let wide = wide_batch(40, 200);
        let run = |n: usize| {
            for back in upload_reader(repeated(&wide, n), &sim).into_host_reader() {
                assert_same_batch(&wide, &back.unwrap(), "warm");
                // The release thread gives staging memory back.
                std::thread::sleep(Duration::from_micros(500));
            }
        };
        // How many are in use at once depends on when they come back.
        let created = (0..10).map(|_| {
            let before = sim.stats();
            run(20);
            sim.stats().since(&before).host_allocations
        });
        assert!(
            created.skip(1).any(|n| n == 0),
            "{mode:?} creates host memory again and again"
        );
        sim.assert_done();
    }
}

/// What fails while others are waited for costs no batch: whoever reads one waits for its own event.
#[test]
fn no_batch_is_lost_to_another() {
    for op in [FaultOp::HostWait, FaultOp::Query] {
        let sim = Sim::new(SimMode::Deferred);
        let sent = wide_batch(1, 3);
        let batches: Vec<_> = (0..80).map(|_| Ok(sent.clone())).collect();
        let reader = RecordBatchIterator::new(batches, sent.schema());
        sim.faults().fail_nth(op, 3);
        let up = upload_reader(reader, &sim);
        assert_eq!(
            up.map(|batch| batch.unwrap().num_rows()).sum::<usize>(),
            240
        );
        sim.faults().clear();
        sim.assert_done();
    }
}
