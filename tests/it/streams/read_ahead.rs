//! Readers that are read and uploaded on threads of their own.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int64Array, RecordBatch, RecordBatchIterator};
use arrow_buffer::Buffer;
use arrow_device::device::sim::{FaultOp, SimConfig, SimMode};
use arrow_device::{
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices, Error, ExportOptions,
    FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy, upload_reader_ahead,
};
use arrow_schema::ArrowError;

use crate::simkit::{MODES, Sim};
use crate::streams::{batch, batches, until};
use crate::support::assert_same_batch;

/// Reads what `next` returns ahead.
fn ahead<N>(
    sim: &Sim,
    batches: usize,
    next: N,
) -> impl DeviceRecordBatchReader + Send + 'static + use<N>
where
    N: FnMut() -> Option<Result<RecordBatch, ArrowError>> + Send + 'static,
{
    let reader = RecordBatchIterator::new(std::iter::from_fn(next), batch(0, 0).schema());
    upload_reader_ahead(reader, sim, batches).unwrap()
}

fn sent(sent: &[RecordBatch]) -> impl FnMut() -> Option<Result<RecordBatch, ArrowError>> + use<> {
    let mut sent = Vec::from(sent).into_iter();
    move || sent.next().map(Ok)
}

/// Options with which arrays of a device are imported.
fn options_of(sim: &Sim) -> ImportOptions {
    let devices = Devices::new();
    devices.add(sim.device.clone()).unwrap();
    ImportOptions {
        devices: Some(devices),
        ..Default::default()
    }
}

#[test]
fn batches_keep_their_order() {
    let all = batches(9);
    for mode in MODES {
        for most in [0, 1, 3, 100] {
            let sim = Sim::new(mode);
            let reader = ahead(&sim, most, sent(&all));
            assert_eq!(reader.schema(), all[0].schema());
            assert_eq!(reader.device_type(), sim.id().device_type);
            let mut n = 0;
            for (up, sent) in reader.zip(&all) {
                assert_same_batch(sent, &up.unwrap().to_host().unwrap(), n);
                n += 1;
            }
            assert_eq!(n, all.len());
            // Through the C interface, and back to the host.
            let reader = ahead(&sim, most, sent(&all));
            let options = ExportOptions::new(SyncPolicy::Event);
            let stream = FFI_ArrowDeviceArrayStream::new(reader, options).unwrap();
            // SAFETY: the stream is this crate's.
            let again = unsafe { DeviceRecordBatchStreamReader::new(stream, options_of(&sim)) };
            let again = again.unwrap();
            let back: Vec<_> = again.into_host_reader().map(|b| b.unwrap()).collect();
            assert_eq!(back.len(), all.len());
            for (i, (back, sent)) in back.iter().zip(&all).enumerate() {
                assert_same_batch(sent, back, i);
            }
            drop(back);
            sim.assert_done();
        }
    }
}

/// A reader that was read before goes on, and is not read again after its end.
#[test]
fn a_reader_goes_on() {
    let sim = Sim::new(SimMode::Async);
    let all = batches(3);
    for taken in 0..4 {
        let mut reads = sent(&all);
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let next = std::iter::from_fn(move || {
            count.fetch_add(1, SeqCst);
            reads()
        });
        let mut reader = RecordBatchIterator::new(next, all[0].schema());
        let first = reader.by_ref().take(taken).count();
        let rest = upload_reader_ahead(reader, &sim, 2).unwrap();
        assert_eq!(first + rest.count(), 3);
        assert_eq!(asked.load(SeqCst), 4);
    }
    sim.assert_done();
}

#[test]
fn errors_and_panics_come_once_and_in_order() {
    let all = batches(3);
    for panics in [false, true] {
        for most in [1, 8] {
            let sim = Sim::new(SimMode::Deferred);
            let asked = Arc::new(AtomicUsize::new(0));
            let (count, mut good) = (asked.clone(), sent(&all));
            let mut reader = ahead(&sim, most, move || {
                count.fetch_add(1, SeqCst);
                match good() {
                    None if panics => panic!("the reader is out of order"),
                    None => Some(Err(ArrowError::ComputeError("the disk is gone".into()))),
                    batch => batch,
                }
            });
            for (i, sent) in all.iter().enumerate() {
                let up = reader.next().unwrap().unwrap();
                assert_same_batch(sent, &up.to_host().unwrap(), i);
            }
            match reader.next().unwrap().unwrap_err() {
                Error::Panic { message, .. } if panics => {
                    assert_eq!(message, "the reader is out of order");
                }
                e => assert!(!panics && e.to_string().contains("disk is gone"), "{e}"),
            }
            assert!(reader.next().is_none() && reader.next().is_none());
            assert_eq!(asked.load(SeqCst), 4, "nothing is asked for after an error");
            drop(reader);
            sim.assert_done();
        }
    }
}

#[test]
fn a_failed_upload_ends_the_stream() {
    for op in [FaultOp::Allocate, FaultOp::Copy, FaultOp::Record] {
        let sim = Sim::new(SimMode::Deferred);
        sim.faults().fail_nth(op, 3);
        let results: Vec<_> = ahead(&sim, 4, sent(&batches(9))).collect();
        let good = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!((good, results.len()), (2, 3), "{op:?}");
        assert!(results[2].is_err());
        drop(results);
        sim.faults().clear();
        sim.assert_done();
    }
}

/// Sets a flag when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Dropping does not wait for a reader that is stuck, which its own thread drops later.
#[test]
fn dropping_waits_for_nobody() {
    for mode in MODES {
        for taken in [0, 2] {
            let sim = Sim::new(mode);
            let dropped = Arc::new(AtomicBool::new(false));
            let (guard, mut good) = (Dropped(dropped.clone()), sent(&batches(2)));
            let (release, released) = mpsc::channel::<()>();
            let mut reader = ahead(&sim, 1, move || {
                let _held = &guard;
                good().or_else(|| {
                    let _ = released.recv();
                    Some(Ok(batch(5, 5)))
                })
            });
            let kept: Vec<_> = reader.by_ref().take(taken).map(|up| up.unwrap()).collect();
            assert_eq!(kept.len(), taken);
            drop(reader);
            assert!(!dropped.load(SeqCst));
            drop(kept);
            drop(release);
            until(|| dropped.load(SeqCst));
            sim.assert_done();
        }
    }
}

/// A panic of the reader's drop does not change the end of the stream.
#[test]
fn a_reader_that_panics_when_it_is_dropped() {
    struct Bomb(#[expect(dead_code, reason = "for its drop")] Dropped);
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("not again");
        }
    }
    let sim = Sim::new(SimMode::Async);
    let dropped = Arc::new(AtomicBool::new(false));
    let (bomb, mut good) = (Bomb(Dropped(dropped.clone())), sent(&batches(2)));
    let reader = ahead(&sim, 1, move || {
        let _held = &bomb;
        good()
    });
    assert_eq!(reader.count(), 2);
    until(|| dropped.load(SeqCst));
    sim.assert_done();
}

/// Batches whose drop panics, and which nobody takes, hold up neither thread.
#[test]
fn batches_that_panic_when_they_are_dropped() {
    struct Bomb(Box<[u64; 4]>);
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("not the batch");
        }
    }
    let bomb = || {
        let mut bomb = Bomb(Box::new([5; 4]));
        let values = NonNull::from(&mut *bomb.0).cast();
        // SAFETY: the 32 bytes live until the owner is dropped.
        let buffer = unsafe { Buffer::from_custom_allocation(values, 32, Arc::new(bomb)) };
        let array: ArrayRef = Arc::new(Int64Array::new(buffer.into(), None));
        RecordBatch::try_from_iter([("a", array)]).unwrap()
    };
    let sim = Sim::new(SimMode::Async);
    let (asked, dropped) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let (count, guard) = (asked.clone(), Dropped(dropped.clone()));
    let reader = ahead(&sim, 1, move || {
        let _held = &guard;
        // The first two are on the device; the next two wait for their upload.
        match count.fetch_add(1, SeqCst) {
            i @ ..2 => Some(Ok(batch(100, i))),
            _ => Some(Ok(bomb())),
        }
    });
    until(|| asked.load(SeqCst) == 4);
    drop(reader);
    until(|| dropped.load(SeqCst));
    sim.assert_done();
}

/// What is read ahead of a consumer that has stopped is bounded.
#[test]
fn memory_is_bounded_when_the_consumer_stops() {
    // As many are ahead in each channel, and each thread holds one.
    for (most, ahead_of) in [(0, 4), (3, 8), (5, 12)] {
        let sim = Sim::new(SimMode::Async);
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let mut reader = ahead(&sim, most, move || {
            count.fetch_add(1, SeqCst);
            Some(Ok(batch(100, 0)))
        });
        for taken in 0..3 {
            until(|| asked.load(SeqCst) == taken + ahead_of);
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(asked.load(SeqCst), taken + ahead_of);
            drop(reader.next().unwrap().unwrap());
        }
        drop(reader);
        sim.assert_done();
    }
}

/// A device that copies at a set rate, a producer that takes as long, and a consumer that works almost as long on each batch: the
/// stream takes hardly longer than the slowest of them.
#[test]
fn production_uploads_and_the_consumer_overlap() {
    let (n, rate) = (12, 6_000_000);
    let batch = batch(16_000, 0);
    let copy = Duration::from_secs_f64(f64::from(16_000 * 8) / rate as f64);
    let sim = Sim::with(SimConfig {
        bytes_per_second: Some(rate),
        ..SimConfig::default()
    });
    // One batch more for each step that it takes, and a busy machine has some chances.
    let most = copy.mul_f64(1.15 * f64::from(n)) + 3 * copy;
    let took: Vec<_> = (0..10)
        .map(|_| {
            let (mut left, batch) = (n, batch.clone());
            let start = Instant::now();
            let reader = ahead(&sim, 2, move || {
                left -= 1;
                std::thread::sleep(copy);
                (left >= 0).then(|| Ok(batch.clone()))
            });
            let mut last = None;
            for up in reader {
                std::thread::sleep(copy.mul_f64(0.9));
                last = Some(up.unwrap());
            }
            last.unwrap().wait().unwrap();
            start.elapsed()
        })
        .take_while(|took| *took > most)
        .collect();
    assert!(took.len() < 10, "{took:?}, should be {most:?}");
    sim.assert_done();
}
