//! How uploads are packed, by one thread or several.

use std::sync::Arc;

use crate::simkit::Sim;
use crate::support::types::{dictionary, list, run_ends, union};
use crate::support::{Nulls, array};
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, StructArray};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{Error, TransferStats};
use arrow_schema::{DataType, UnionMode};

/// Columns that are just too short to be copied directly, of a little less than 1 MiB each.
fn columns(n: usize) -> RecordBatch {
    let rows = (1 << 17) - 8;
    let whole = Int64Array::from_iter_values(0..(rows + n) as i64);
    let columns = (0..n).map(|i| (format!("c{i}"), Arc::new(whole.slice(i, rows)) as ArrayRef));
    RecordBatch::try_from_iter(columns).unwrap()
}

/// Columns of kinds that the host rewrites in other ways, and one that is copied directly among them, all cut within the bytes of
/// their bitmaps.
fn columns_of_every_kind() -> RecordBatch {
    let rows = 34_000;
    let types = [
        DataType::Utf8,
        DataType::Boolean,
        DataType::Int32,
        list(DataType::Int8),
        DataType::FixedSizeBinary(35),
        dictionary(DataType::Int16, DataType::Utf8),
        union(UnionMode::Dense, vec![DataType::Int32, DataType::Utf8]),
        run_ends(DataType::Int32, DataType::Utf8),
    ];
    let arrays = types.map(|t| array(&t, rows + 96, Nulls::Some, 7));
    // Other rows each time: the same buffer would be copied once.
    let columns = (0..80).map(|i| arrays[i % arrays.len()].slice(5 + i, rows));
    RecordBatch::try_from_iter((0..).map(|i| format!("c{i}")).zip(columns)).unwrap()
}

/// Staging memory goes round: beyond 128 MiB, each host buffer of 2 MiB waits for the oldest. The threads share the bound.
#[test]
fn staging_memory_is_bounded() {
    let batch = columns(150);
    for threads in [1, 3] {
        let sim = Sim::new(SimMode::Deferred);
        sim.set_packing_threads(threads);
        let (up, stats) = TransferStats::scope(|| sim.upload(&batch).unwrap());
        let context = format!("{threads} threads: {stats:?}");
        assert_eq!(stats.allocations, 1, "{context}");
        assert_eq!(stats.bytes_to_device, stats.allocated_bytes);
        assert!(
            stats.host_waits > 0 && stats.host_allocations <= 64 + 1,
            "{context}"
        );
        assert!(sim.sim.report().live_host_bytes <= 128 << 20);
        for i in [0, 1, 70, 149] {
            let down = up.column(i).unwrap().to_host().unwrap();
            assert!(&down == batch.column(i), "column {i}, {threads} threads");
        }
        drop(up);
        sim.assert_done();
    }
}

/// What one thread packs is tested elsewhere.
#[test]
fn several_threads_pack_what_one_packs() {
    fn bytes(data: &ArrayData, all: &mut Vec<Buffer>) {
        let mask = data.nulls().map(|nulls| nulls.buffer());
        all.extend(data.buffers().iter().chain(mask).cloned());
        data.child_data().iter().for_each(|child| bytes(child, all));
    }
    let batch = StructArray::from(columns_of_every_kind());
    let sim = Sim::new(SimMode::Async);
    let mut alone = None;
    for threads in [1, 2, 100] {
        sim.set_packing_threads(threads);
        let (up, stats) = TransferStats::scope(|| sim.upload_array(&batch).unwrap());
        let packed = stats.host_copied_bytes;
        assert!(packed > 16 << 20, "{packed} bytes are packed");
        let (down, mut all) = (up.to_host().unwrap().to_data(), vec![]);
        bytes(&down, &mut all);
        let alone = alone.get_or_insert_with(|| all.clone());
        assert!(all == *alone, "{threads} threads");
    }
    drop(alone);
    sim.assert_done();
}

/// An event for each host buffer is recorded only where a thread fills so many that it may use the oldest again.
#[test]
fn events_are_recorded_for_host_buffers_that_are_used_again() {
    for (threads, n) in [(1, 2), (1, 4), (8, 2), (8, 9), (8, 31)] {
        let sim = Sim::new(SimMode::Deferred);
        sim.set_packing_threads(threads);
        let batch = columns(n);
        let (_up, stats) = TransferStats::scope(|| sim.upload(&batch).unwrap());
        assert_eq!(stats.events, 1, "{n} MiB with {threads} threads: {stats:?}");
    }
}

/// The cost of an upload includes what the threads did that helped to pack it, once.
#[test]
fn scopes_count_what_packing_threads_do() {
    let batch = columns(40);
    for threads in [1, 4] {
        let sim = Sim::new(SimMode::Deferred);
        sim.set_packing_threads(threads);
        let before = sim.stats();
        let ((up, inner), outer) =
            TransferStats::scope(|| TransferStats::scope(|| sim.upload(&batch)));
        let stats = sim.stats().since(&before);
        assert!(stats.host_copied_bytes > 16 << 20, "{stats:?}");
        assert_eq!((inner, outer), (stats, stats), "{threads} threads");
        drop(up);
        sim.assert_done();
    }
}

/// Host buffers and sources live until the copies of all threads are done, and nothing is left.
#[test]
fn failures_of_several_threads() {
    let expected = columns(24);
    for op in [FaultOp::HostAllocate, FaultOp::Copy, FaultOp::Record] {
        let mut failed = 0;
        for n in [1, 2, 4, 5, 23] {
            let sim = Sim::new(SimMode::Deferred);
            sim.set_packing_threads(3);
            sim.faults().fail_nth(op, n);
            // The host's batch is dropped before the copies run.
            let (own, unshared) = (expected.columns().iter(), |array: &ArrayRef| {
                let values = array.as_primitive::<Int64Type>().values().to_vec();
                Arc::new(Int64Array::from(values)) as ArrayRef
            });
            let own = RecordBatch::try_new(expected.schema(), own.map(unshared).collect());
            let result = sim.upload(&own.unwrap());
            let fired = sim.faults().fired() > 0;
            sim.faults().clear();
            // Host memory that was freed under a queued copy would be missed now.
            sim.trim();
            match result {
                Err(e) => {
                    assert!(fired, "{op:?} {n}: {e}");
                    let sane =
                        matches!(e, Error::OutOfMemory { .. } | Error::Device { code: 1, .. });
                    assert!(sane, "{op:?} {n}: {e:?}");
                    failed += 1;
                }
                Ok(up) => assert!(up.to_host().unwrap() == expected, "{op:?} {n}"),
            }
            sim.synchronize().unwrap();
            sim.assert_done();
        }
        assert!(failed > 3, "{op:?}: {failed}");
    }
}
