//! How uploads are packed: the lists that they take, and several threads.

use std::sync::Arc;

use crate::simkit::{MODES, Sim};
use crate::support::types::list;
use crate::support::{Nulls, all_types, array, batch};
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, StructArray};
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_device::{Devices, Error, TransferStats};
use arrow_schema::DataType;

/// Columns that are just too short to be copied directly, of a little less than 1 MiB each.
fn columns(n: usize) -> RecordBatch {
    let rows = (1 << 17) - 8;
    let whole = Int64Array::from_iter_values(0..(rows + n) as i64);
    let columns = (0..n).map(|i| (format!("c{i}"), Arc::new(whole.slice(i, rows)) as ArrayRef));
    RecordBatch::try_from_iter(columns).unwrap()
}

/// Columns of some hundred KiB, and one that is copied directly among them, all cut within the bytes of their bitmaps.
fn columns_of_every_kind() -> RecordBatch {
    let rows = 140_000;
    let types = [
        DataType::Utf8,
        DataType::Boolean,
        DataType::Int32,
        list(DataType::Int8),
    ];
    let arrays: Vec<_> = types
        .iter()
        .map(|t| array(t, rows + 64, Nulls::Some, 7))
        .collect();
    let direct: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64 + 64));
    // Other rows each time: the same buffer would be copied once.
    let columns = (0..44).map(|i| match i {
        9 | 20 => direct.slice(i, rows),
        _ => arrays[i % 4].slice(5 + i, rows),
    });
    RecordBatch::try_from_iter((0..).map(|i| format!("c{i}")).zip(columns)).unwrap()
}

/// Types whose buffers the host rewrites in other ways.
fn array_of_every_type() -> ArrayRef {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let rows = 30_000;
    let columns = batch(&types, rows, Nulls::Some, 5);
    let array: ArrayRef = Arc::new(StructArray::from(columns));
    array.slice(11, rows - 20)
}

/// Small uploads are one list; larger ones queue each packed MiB while the next one is packed.
#[test]
fn each_packed_mib_is_queued() {
    if cfg!(miri) {
        return;
    }
    for (n, lists) in [(1, 1), (2, 2), (4, 4), (9, 9), (15, 15)] {
        let batch = columns(n);
        let sim = Sim::new(SimMode::Deferred);
        for nth in 1..=lists + 1 {
            sim.faults().fail_nth(FaultOp::Copy, nth);
            let before = sim.stats();
            let up = sim.upload(&batch);
            let stats = sim.stats().since(&before);
            sim.faults().clear();
            assert_eq!(up.is_err(), nth <= lists, "list {nth} of {n} columns");
            if up.is_ok() {
                let slabs = stats.bytes_to_device.div_ceil(2 << 20);
                // From 4 MiB on each slab has an event, so that it can be used again.
                let events = if n > 4 { slabs } else { 1 };
                assert_eq!((stats.copies, stats.events), (lists, events), "{n} columns");
                assert_eq!((stats.host_waits, stats.queue_waits), (0, 0));
            }
        }
        sim.synchronize().unwrap();
        sim.assert_done();
    }
}

/// Staging memory goes round: beyond 128 MiB, each slab of 2 MiB waits for the oldest. The threads share the bound.
#[test]
fn staging_memory_is_bounded() {
    if cfg!(miri) {
        return;
    }
    let batch = columns(300);
    for threads in [1, 2, 3, 1000] {
        let sim = Sim::new(SimMode::Deferred);
        sim.set_packing_threads(threads);
        let before = sim.stats();
        let up = sim.upload(&batch).unwrap();
        let stats = sim.stats().since(&before);
        let context = format!("{threads} threads: {stats:?}");
        let pieces = stats.bytes_to_device.div_ceil(1 << 20);
        assert_eq!((stats.allocations, stats.copies), (1, pieces), "{context}");
        assert_eq!(stats.bytes_to_device, stats.allocated_bytes);
        // One for each slab but the last, and the upload's.
        let slabs = stats.bytes_to_device.div_ceil(2 << 20);
        assert_eq!(stats.events, slabs, "{context}");
        assert!(stats.host_allocations <= 64 + 1, "{context}");
        match threads {
            1 => assert_eq!(stats.host_waits, slabs - 64, "{context}"),
            // A thread's wait also runs copies of the others that were queued before.
            _ => assert!((1..=slabs).contains(&stats.host_waits), "{context}"),
        }
        assert!(sim.sim.report().live_host_bytes <= 128 << 20);
        for i in [0, 1, 70, 155, 299] {
            let down = up.column(i).unwrap().to_host().unwrap();
            assert!(&down == batch.column(i), "column {i}, {threads} threads");
        }
        drop(up);
        sim.assert_done();
    }
}

#[test]
fn threads_of_a_device() {
    let device = Devices::cpu();
    let default = device.packing_threads();
    assert!((1..=4).contains(&default), "{default}");
    device.set_packing_threads(7);
    assert_eq!(device.packing_threads(), 7);
    device.set_packing_threads(0);
    assert_eq!(device.packing_threads(), default);
}

/// What one thread packs is tested elsewhere.
#[test]
fn several_threads_pack_what_one_packs() {
    if cfg!(miri) {
        return;
    }
    let batch = columns_of_every_kind();
    let array: ArrayRef = Arc::new(StructArray::from(batch));
    for (array, mode) in [array, array_of_every_type()].iter().zip(MODES) {
        let sim = Sim::new(mode);
        let mut alone = None;
        for threads in [1, 2, 100] {
            sim.set_packing_threads(threads);
            let before = sim.stats();
            let up = sim.upload_array(array).unwrap();
            let stats = sim.stats().since(&before);
            let packed = stats.host_copied_bytes;
            assert!(packed > 16 << 20, "{packed} bytes are packed");
            assert_eq!(stats.bytes_to_device, stats.allocated_bytes);
            let down = up.to_host().unwrap().to_data();
            let alone = alone.get_or_insert_with(|| down.clone());
            assert!(down == *alone, "{mode:?}, {threads} threads");
        }
        drop(alone);
        sim.assert_done();
    }
}

/// The cost of an upload includes what the threads did that helped to pack it, once.
#[test]
fn scopes_count_what_packing_threads_do() {
    if cfg!(miri) {
        return;
    }
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

/// Slabs and sources live until the copies of all threads are done, and nothing is left.
#[test]
fn failures_of_several_threads() {
    if cfg!(miri) {
        return;
    }
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
