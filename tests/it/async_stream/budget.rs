//! Memory budgets of streams, and columns with memory of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::async_stream::{
    DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, MovingStream, UploadingStream,
};
use arrow_device::device::sim::SimMode;
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Devices, Error, MemoryBudget, Result};
use arrow_schema::{ArrowError, DataType};
use futures::stream;

use crate::async_stream::adapters::forgotten;
use crate::async_stream::kit::*;
use crate::simkit::Sim;
use crate::support::{Nulls, all_types};

/// Bytes that were asked for, at most so many.
#[derive(Debug, Default)]
struct Budget {
    bytes: AtomicUsize,
    asked: AtomicUsize,
    most: usize,
}

impl Budget {
    fn of(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            ..Self::default()
        })
    }

    fn bytes(&self) -> usize {
        self.bytes.load(SeqCst)
    }
}

impl MemoryBudget for Budget {
    fn reserve(&self, bytes: usize) -> Result<()> {
        self.asked.fetch_add(bytes, SeqCst);
        if self.bytes() + bytes > self.most {
            return Err(Error::InvalidArgument(format!("no {bytes} bytes").into()));
        }
        self.bytes.fetch_add(bytes, SeqCst);
        Ok(())
    }

    fn release(&self, bytes: usize) {
        let before = self.bytes.fetch_sub(bytes, SeqCst);
        assert!(bytes > 0 && before >= bytes, "{bytes} of {before}");
    }
}

fn on(
    sim: &Sim,
    batches: &[RecordBatch],
) -> impl DeviceRecordBatchStream<Batch = DeviceRecordBatch> + Unpin + Send + 'static {
    let options = options_of(sim);
    let up: Vec<_> = batches
        .iter()
        .map(|batch| Ok(forgotten(&sim.upload(batch).unwrap(), &options)))
        .collect();
    let schema = batches[0].schema();
    DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::EXT_DEV, stream::iter(up))
}

fn given(
    batches: &[RecordBatch],
) -> impl futures::Stream<Item = std::result::Result<RecordBatch, ArrowError>> + Send + Unpin + use<>
{
    stream::iter(batches.iter().cloned().map(Ok).collect::<Vec<_>>())
}

/// Batches of 16 rows: 128 bytes.
fn batches(n: i64) -> Vec<RecordBatch> {
    (0..n).map(|i| numbers(i * 16, 16)).collect()
}

#[test]
fn uploads_ask_for_exactly_what_they_allocate() {
    for (name, data_type) in all_types() {
        let sim = Sim::new(SimMode::Async);
        let batch = crate::support::batch(&[data_type, DataType::Int32], 40, Nulls::Some, 5);
        let slices = [batch.clone(), batch.slice(3, 5), batch.slice(0, 0)];
        let budget = Budget::of(usize::MAX);
        let queue = sim.default_queue();
        let up = UploadingStream::new_on(batch.schema(), given(&slices), queue);
        let mut up = up.with_budget(budget.clone());
        for _ in 0..3 {
            let before = (sim.stats(), budget.asked.load(SeqCst));
            next(&mut up).unwrap().unwrap();
            let allocated = sim.stats().since(&before.0).allocated_bytes;
            let asked = budget.asked.load(SeqCst) - before.1;
            assert_eq!(asked as u64, allocated, "{name}");
            assert_eq!(budget.bytes(), asked, "the batch before is the reader's");
        }
        assert!(next(&mut up).is_none());
        assert_eq!(budget.bytes(), 0);
    }
}

#[test]
fn a_refusal_is_an_error_before_anything_is_allocated() {
    let (sim, other) = (Sim::new(SimMode::Async), Sim::new(SimMode::Async));
    let schema = batches(1)[0].schema();
    // For a move, enough to bring the batch to the host, and not to the other device.
    for (way, most) in [
        ("up", 0),
        ("up", 127),
        ("down", 0),
        ("down", 127),
        ("moved", 127),
        ("moved", 255),
    ] {
        let budget = Budget::of(most);
        let with = budget.clone();
        let source = on(&other, &batches(3));
        let before = other.stats();
        let refused: Vec<Error> = match way {
            "up" => {
                let queue = sim.default_queue();
                let up = UploadingStream::new_on(schema.clone(), given(&batches(3)), queue);
                all(up.with_budget(with))
                    .into_iter()
                    .map(|e| e.unwrap_err())
                    .collect()
            }
            "down" => {
                let down = all(source.into_host_stream().with_budget(with));
                assert_eq!(other.stats().since(&before).copies, 0);
                down.into_iter().map(|e| e.unwrap_err().into()).collect()
            }
            _ => {
                let moved = all(MovingStream::new(source, &sim).with_budget(with));
                moved.into_iter().map(|e| e.unwrap_err()).collect()
            }
        };
        assert_eq!((refused.len(), sim.stats().allocations), (1, 0), "{way}");
        let e = refused[0].to_string();
        assert!(e.contains("no 128 bytes"), "{e}");
        assert_eq!(budget.bytes(), 0);
    }
    sim.assert_done();
    other.assert_done();
}

/// The one that the reader has, and the one ahead.
#[test]
fn batches_ahead_count_until_the_reader_asks_again() {
    let (a, b) = (Sim::new(SimMode::Async), Sim::new(SimMode::Async));
    let budget = Budget::of(usize::MAX);
    let down = on(&a, &batches(3)).into_host_stream();
    let mut down = down.with_budget(budget.clone());
    assert_eq!(budget.bytes(), 0);
    for bytes in [256, 256, 128] {
        next(&mut down).unwrap().unwrap();
        assert_eq!(budget.bytes(), bytes);
    }
    assert!(next(&mut down).is_none());
    assert_eq!(budget.bytes(), 0);

    let moving = MovingStream::new(on(&a, &batches(3)), &b);
    let mut moving = moving.with_budget(budget.clone());
    for bytes in [384, 384, 256] {
        next(&mut moving).unwrap().unwrap();
        assert_eq!(budget.bytes(), bytes);
    }
    drop(moving);
    assert_eq!(budget.bytes(), 0, "dropped");
}

#[test]
fn what_is_not_copied_takes_nothing() {
    let budget = Budget::of(0);
    let cpu = Devices::cpu();
    let schema = batches(1)[0].schema();
    let up = UploadingStream::new_on(schema, given(&batches(3)), cpu.default_queue());
    let same = MovingStream::new(up.with_budget(budget.clone()), &cpu);
    let down = same.with_budget(budget.clone()).into_host_stream();
    let found = all(down.with_budget(budget.clone()));
    assert!(found.iter().all(|batch| batch.is_ok()) && found.len() == 3);
    assert_eq!(budget.asked.load(SeqCst), 0);
}

// ---- Columns with memory of their own

fn wide(columns: i64, rows: i64) -> RecordBatch {
    let column = |i: i64| {
        let values = Int64Array::from_iter_values((0..rows).map(|row| row * 100 + i));
        (format!("c{i}"), Arc::new(values) as ArrayRef)
    };
    RecordBatch::try_from_iter((0..columns).map(column)).unwrap()
}

/// The host memory in use once idle memory is gone.
fn live(sim: &Sim) -> usize {
    sim.device.synchronize().unwrap();
    sim.device.trim();
    sim.sim.report().live_host_bytes
}

/// Waits until the staging memory of the uploads was let go, which happens in the background.
fn settle(sim: &Sim) {
    let end = Instant::now() + Duration::from_secs(30);
    while live(sim) > 0 {
        assert!(Instant::now() < end, "staging memory is left");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_kept_column_keeps_itself_only() {
    // 80,000 bytes, in blocks of 64 KiB.
    const COLUMN: usize = 128 << 10;
    let whole = wide(20, 10_000);
    for separate in [false, true] {
        let sim = Sim::new(SimMode::Async);
        let up = sim.upload(&whole).unwrap();
        settle(&sim);
        let schema = whole.schema();
        let items = stream::iter([Ok(up)]);
        let items = DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::EXT_DEV, items);
        let down = items.into_host_stream();
        let mut down = match separate {
            true => down.with_separate_columns(),
            false => down,
        };
        let before = sim.stats();
        let batch = next(&mut down).unwrap().unwrap();
        let cost = sim.stats().since(&before);
        assert_eq!((cost.host_waits, cost.events), (0, 1), "one list of copies");
        assert_eq!(cost.copies, if separate { 20 } else { 1 });
        assert_eq!(batch, whole);
        let all = live(&sim);
        let kept = batch.column(7).clone();
        drop((batch, down));
        if separate {
            assert_eq!((all, live(&sim)), (20 * COLUMN, COLUMN));
        } else {
            assert_eq!(live(&sim), all, "all of it");
        }
        assert_eq!(&kept, whole.column(7));
        drop(kept);
        assert_eq!(live(&sim), 0);
        sim.assert_done();
    }
}
