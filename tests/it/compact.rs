//! Compact copies, and copies between peers whose bytes the host must rewrite: values, layout, and what they cost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::simkit::layout::{check_layout, written_once};
use crate::simkit::*;
use crate::support::*;
use arrow_array::{Array, ArrayRef, BooleanArray, Int32Array, Int64Array, StringArray, UInt8Array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_device::device::sim::{FaultOp, SimConfig, SimMode};
use arrow_device::{Device, DeviceArray, Devices, TransferStats};
use arrow_schema::DataType;

/// The CPU is one device of the process: tests that count what it does go one by one.
fn alone() -> MutexGuard<'static, ()> {
    static CPU: Mutex<()> = Mutex::new(());
    CPU.lock().unwrap_or_else(PoisonError::into_inner)
}

fn counted<T>(device: &Device, work: impl FnOnce() -> T) -> (T, TransferStats) {
    let before = device.stats();
    let result = work();
    (result, device.stats().since(&before))
}

fn compacts(device: &Device, array: &DeviceArray, expected: &dyn Array, context: &str) {
    let (copy, stats) = counted(device, || array.compact());
    let copy = copy.unwrap_or_else(|e| panic!("{context}: {e}"));
    assert_eq!((copy.device(), copy.len()), (device, expected.len()));
    assert_eq!(
        (copy.data_type(), copy.field()),
        (array.data_type(), array.field())
    );
    if device.is_host_readable() {
        check_layout(&copy, true, None, context);
    } else {
        let allocations = u64::from(stats.allocated_bytes > 0);
        assert_eq!(stats.allocations, allocations, "{context}");
        written_once(&stats, context);
        // Never all of it.
        assert!(
            stats.host_copied_bytes < stats.allocated_bytes.max(1),
            "{context}"
        );
        check_layout(&copy, true, Some(stats.allocated_bytes), context);
    }
    let down = copy.to_host().unwrap();
    assert_same(expected, &down, context);
    assert_valid(expected, &down, context);
}

fn every_type(device: &Device, after_each: impl Fn()) {
    // Miri is slow.
    let step = if cfg!(miri) { 25 } else { 1 };
    for (i, (name, data_type)) in all_types().into_iter().enumerate().step_by(step) {
        for (case, array) in cases(&data_type, 300 + i as u64) {
            let context = format!("{device} {name}, {case}");
            let up = device.upload_array(&array).unwrap();
            compacts(device, &up, &array, &context);
            let rows = array.len();
            for (offset, rows) in [(0, rows / 2), (3, 5), (8, rows / 2), (rows / 2, 2)] {
                if offset + rows <= array.len() {
                    let context = format!("{context}, slice({offset}, {rows})");
                    let slice = up.slice(offset, rows).unwrap();
                    compacts(device, &slice, &array.slice(offset, rows), &context);
                }
            }
        }
        after_each();
    }
    let tight = boolean_with_tight_nulls();
    let up = device.upload_array(&tight).unwrap();
    compacts(device, &up, &tight, "boolean with tight nulls");
}

#[test]
fn every_type_on_the_cpu() {
    let _alone = alone();
    every_type(&Devices::cpu(), || ());
}

#[test]
fn every_type_on_an_asynchronous_device() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    every_type(&sim, || sim.assert_done());
}

#[test]
fn every_type_on_a_deferred_device() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    every_type(&sim, || sim.assert_done());
}

/// Batches, with children of slices of slices; the originals go first.
#[test]
fn batches() {
    if cfg!(miri) {
        return;
    }
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    for mode in MODES {
        let sim = Sim::new(mode);
        let whole = batch(&types, 141, Nulls::Some, 4);
        let up = sim.upload(&whole).unwrap().slice(5, 120).unwrap();
        let cut = up.project(&(0..types.len()).rev().collect::<Vec<_>>());
        let cut = cut.unwrap().slice(9, 77).unwrap();
        let expected = cut.to_host().unwrap();
        assert_eq!(expected.column(0).len(), 77);
        let (copy, stats) = counted(&sim, || cut.compact().unwrap());
        assert_eq!((stats.allocations, stats.fills), (1, 1));
        written_once(&stats, "batch");
        drop((cut, up));
        check_layout(copy.as_struct(), true, Some(stats.allocated_bytes), "batch");
        assert_eq!(copy.schema(), expected.schema());
        assert_same_batch(&expected, &copy.to_host().unwrap(), "batch");
        // One more of what is compact already.
        let again = copy.compact().unwrap();
        drop(copy);
        check_layout(again.as_struct(), true, None, "again");
        assert_same_batch(&expected, &again.to_host().unwrap(), "again");
        sim.assert_done_but(1);
        drop((again, expected));
        for empty in [zero_column_batch(0), zero_column_batch(77)] {
            let up = sim.upload(&empty).unwrap();
            let (copy, stats) = counted(&sim, || up.compact().unwrap());
            assert_eq!((stats.allocations, stats.copies), (0, 0));
            assert_same_batch(&empty, &copy.to_host().unwrap(), "no columns");
        }
        sim.assert_done();
    }
}

/// What a copy costs, warm.
#[derive(Debug, Default, PartialEq)]
struct Cost {
    copies: u64,
    on_device: u64,
    to_host: u64,
    to_device: u64,
    by_host: u64,
    host_waits: u64,
}

impl Cost {
    #[track_caller]
    fn of(stats: &TransferStats) -> Self {
        assert_eq!(stats.allocations, 1, "{stats:?}");
        written_once(stats, "cost");
        assert_eq!(
            (stats.host_allocations, stats.queue_waits),
            (0, 0),
            "{stats:?}"
        );
        // A wait has an event; one more is the copy's own.
        assert_eq!(stats.events, stats.host_waits + 1, "{stats:?}");
        Self {
            copies: stats.copies,
            on_device: stats.bytes_on_device,
            to_host: stats.bytes_to_host,
            to_device: stats.bytes_to_device,
            by_host: stats.host_copied_bytes,
            host_waits: stats.host_waits,
        }
    }
}

fn nullable(rows: usize) -> ArrayRef {
    let values = (0..rows as i64).map(|i| (i % 3 > 0).then_some(i));
    Arc::new(Int64Array::from_iter(values))
}

/// Three bytes each.
fn texts(rows: usize) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(
        (0..rows).map(|i| format!("{i:03}")),
    ))
}

/// The array with a null count that nobody knows.
fn uncounted(up: &DeviceArray) -> DeviceArray {
    let buffers = [up.buffer(0), up.buffer(1)];
    // SAFETY: the parts are those of a valid array of this type and length.
    unsafe { DeviceArray::from_parts(up.data_type().clone(), up.len(), None, &buffers, &[]) }
        .unwrap()
}

#[test]
fn the_host_sees_only_what_it_rewrites() {
    if cfg!(miri) {
        return;
    }
    let plain: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
    let cost = |copies, on_device, to_host, to_device, by_host, host_waits| Cost {
        copies,
        on_device,
        to_host,
        to_device,
        by_host,
        host_waits,
    };
    // Array, rows from to, counts known, cost.
    let table = [
        // Values only.
        (plain.clone(), 0..100, true, cost(1, 832, 0, 0, 0, 0)),
        (plain, 3..53, true, cost(1, 400, 0, 0, 0, 0)),
        // A mask that was written by an upload ends with zeros.
        // Mask and values lie side by side, and stay so.
        (nullable(100), 0..100, true, cost(1, 896, 0, 0, 0, 0)),
        // From a byte on: its last one.
        (nullable(100), 8..58, true, cost(4, 406, 1, 58, 1, 1)),
        (nullable(100), 8..56, true, cost(2, 390, 0, 0, 0, 0)),
        // From within a byte: all of it.
        (nullable(100), 3..53, true, cost(3, 400, 7, 64, 7, 1)),
        // To be counted: all of it.
        (nullable(100), 0..100, false, cost(3, 800, 13, 64, 13, 1)),
        (nullable(100), 8..58, false, cost(3, 400, 7, 64, 7, 1)),
        // The ends of the offsets are read; the rest goes straight, in one piece.
        (texts(64), 0..64, true, cost(2 + 1, 320 + 192, 8, 0, 0, 1)),
        // Offsets are rebased.
        (texts(64), 10..20, true, cost(2 + 3, 30, 8 + 44, 64, 44, 2)),
        // No rows: one offset, which the host makes.
        (texts(64), 10..10, true, cost(1, 0, 0, 64, 4, 0)),
    ];
    for mode in MODES {
        let sim = Sim::new(mode);
        for (array, rows, known, expected) in &table {
            let up = sim.upload_array(array).unwrap();
            let up = if *known { up } else { uncounted(&up) };
            let slice = up.slice(rows.start, rows.len()).unwrap();
            if *known {
                slice.resolve_null_counts().unwrap();
            }
            // Warm: slabs are there.
            drop(slice.compact().unwrap());
            drop(sim.upload_array(array).unwrap());
            sim.synchronize().unwrap();
            let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
            loop {
                let (copy, stats) = counted(&sim, || slice.compact().unwrap());
                if stats.host_allocations > 0 && std::time::Instant::now() < end {
                    // The reaper has not given the last one back yet.
                    sim.synchronize().unwrap();
                    continue;
                }
                let context = format!("{mode:?}, {rows:?} of {}", array.data_type());
                assert_eq!(Cost::of(&stats), *expected, "{context}");
                assert!(known | copy.null_count().is_some());
                let expected = array.slice(rows.start, rows.len());
                assert_same(&expected, &copy.to_host().unwrap(), &context);
                break;
            }
        }
        sim.assert_done();
    }
}

/// Another queue waits for the array, once.
#[test]
fn another_queue() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let sim = Sim::new(mode);
        let queue = sim.new_queue().unwrap();
        for rows in [0..100, 3..53] {
            let expected = nullable(100).slice(rows.start, rows.len());
            let up = sim.upload_array(&nullable(100)).unwrap();
            let slice = up.slice(rows.start, rows.len()).unwrap();
            let lists = sim.faults().seen(FaultOp::Copy);
            let (copy, stats) = counted(&sim, || slice.compact_on(&queue).unwrap());
            assert_eq!(stats.queue_waits, 1);
            let seen = sim.faults().seen(FaultOp::Copy) - lists;
            assert_eq!(seen, 1 + stats.host_waits);
            // The source goes before its copies have run.
            drop((slice, up));
            assert_same(&expected, &copy.to_host().unwrap(), "another queue");
        }
        let stranger = Sim::new(mode);
        let up = sim.upload_array(&nullable(10)).unwrap();
        assert!(up.compact_on(&stranger.default_queue()).is_err());
        drop(up);
        sim.assert_done();
    }
}

#[test]
fn the_cpu_packs_one_slab() {
    let _alone = alone();
    let cpu = Devices::cpu();
    let whole = nullable(100);
    let up = cpu.upload_array(&whole).unwrap();
    cpu.trim();
    for warm in [false, true] {
        let slice = up.slice(3, 50).unwrap();
        let (copy, stats) = counted(&cpu, || slice.compact().unwrap());
        let mut expected = TransferStats::default();
        expected.host_allocations = u64::from(!warm);
        expected.host_copied_bytes = 64 + 448;
        assert_eq!(stats, expected);
        let address = copy.buffer(1).unwrap().address();
        assert_ne!(address, up.buffer(1).unwrap().address());
        assert_same(&whole.slice(3, 50), &copy.to_host().unwrap(), "on the CPU");
    }
    // All of an array is copied too.
    let copy = up.compact().unwrap();
    drop(up);
    assert_same(&whole, &copy.to_host().unwrap(), "on the CPU");
}

/// Whole arrays whose offsets start elsewhere, over more bytes than their rows have.
#[test]
fn offsets_start_at_0() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let bytes_of = |array: &dyn Array| sim.upload_array(array).unwrap().buffer(1).unwrap();
    let offsets = bytes_of(&Int32Array::from(vec![3, 5, 9]));
    let text = bytes_of(&UInt8Array::from(b"___aabbbb____".to_vec()));
    let buffers = [None, Some(offsets.clone()), Some(text)];
    // SAFETY: the offsets lie within the text, which is ASCII.
    let texts =
        unsafe { DeviceArray::from_parts(DataType::Utf8, 2, Some(0), &buffers, &[]) }.unwrap();
    let items = sim.upload_array(&nullable(12)).unwrap();
    let list = crate::support::types::list(DataType::Int64);
    // SAFETY: the offsets lie within the 12 items.
    let lists =
        unsafe { DeviceArray::from_parts(list, 2, Some(0), &[None, Some(offsets)], &[items]) };
    drop(buffers);
    for (array, buffer, bytes) in [(texts, 2, 6), (lists.unwrap(), 1, 12)] {
        let (copy, stats) = counted(&sim, || array.compact().unwrap());
        check_layout(&copy, true, Some(stats.allocated_bytes), "offsets");
        assert_eq!(copy.buffer(buffer).unwrap().len(), bytes);
        let rows = copy.child(0).map(|child| child.len());
        assert!(rows.is_none_or(|rows| rows == 6));
        assert_same(
            &array.to_host().unwrap(),
            &copy.to_host().unwrap(),
            "offsets",
        );
    }
    sim.assert_done();
}

/// What the host rewrites goes round in 16 MiB of staging memory.
#[test]
fn staging_memory_is_bounded() {
    if cfg!(miri) {
        return;
    }
    const MIB: usize = 1 << 20;
    let sim = Sim::new(SimMode::Deferred);
    let bytes: Vec<u8> = (0..35 * MIB).map(|i| (i * 7 + i / 1000) as u8).collect();
    let bits = BooleanBuffer::new(Buffer::from_vec(bytes), 0, 35 * MIB * 8);
    let rows = bits.len() - 5;
    let array: ArrayRef = Arc::new(BooleanArray::new(bits.clone(), Some(NullBuffer::new(bits))));
    let up = sim.upload_array(&array).unwrap();
    sim.synchronize().unwrap();
    let slice = uncounted(&up).slice(3, rows).unwrap();
    let lists = sim.faults().seen(FaultOp::Copy);
    let (copy, stats) = counted(&sim, || slice.compact().unwrap());
    // Of 70 MiB, each bitmap in parts of 16, 16 and 3 MiB, the second one's apart from the first's.
    let groups = stats.host_waits.div_ceil(2);
    assert_eq!((groups, stats.host_waits), (6, 2 * 6 - 1));
    assert_eq!(sim.faults().seen(FaultOp::Copy) - lists, 2 * 6);
    let part = array.slice(3, rows);
    assert_eq!(copy.null_count(), Some(part.null_count()));
    assert_eq!(stats.bytes_on_device, 0);
    // The last bytes of source and result differ by the bits that are skipped.
    assert_eq!(stats.bytes_to_device, 2 * rows.div_ceil(8) as u64);
    assert!(sim.sim.report().live_host_bytes <= 130 * MIB);
    let down = copy.to_host().unwrap();
    assert!(*part == *down);
    drop((up, slice, copy, down));
    sim.assert_done();
}

/// A peer copies straight; only what must be rewritten goes through the host, and the bits behind the
/// last row are zero.
#[test]
fn peers_rewrite() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let config = SimConfig::default().with_mode(mode);
        let from = Sim::with(config.clone());
        let to = Sim::with(config.with_peer_access(true));
        // Array, rows, bytes read (ends of offsets, and pieces), rewritten, uploaded (with padding), copied directly.
        let table = [
            (nullable(100), 0..100, 0, 0, 0, 64 + 832),
            (nullable(100), 8..58, 1, 1, 58, 406),
            (nullable(100), 3..53, 7, 7, 64, 400),
            (texts(64), 0..64, 0, 0, 0, 320 + 192),
            (texts(64), 10..20, 8 + 44, 44, 64, 30),
        ];
        for (array, rows, read, rewritten, uploaded, straight) in table {
            let context = format!("{mode:?}, {rows:?} of {}", array.data_type());
            let up = from.upload_array(&array).unwrap();
            let slice = up.slice(rows.start, rows.len()).unwrap();
            let before = from.stats();
            let (there, stats) = counted(&to, || slice.to_device(&to).unwrap());
            let source = from.stats().since(&before);
            assert_eq!(stats.allocations, 1, "{context}");
            written_once(&stats, &context);
            assert_eq!(
                (
                    stats.bytes_on_device,
                    stats.bytes_to_device,
                    stats.host_copied_bytes
                ),
                (straight, uploaded, rewritten),
                "{context}"
            );
            assert_eq!(source.bytes_to_host, read, "{context}");
            assert_eq!((stats.host_waits, stats.bytes_to_host), (0, 0), "{context}");
            // The ends, then the pieces; or else this thread waits for the array's event, which the
            // other device cannot.
            let waits = 1 + u64::from(read > rewritten);
            assert_eq!(source.host_waits, waits, "{context}");
            drop((slice, up));
            from.synchronize().unwrap();
            check_layout(&there, false, Some(stats.allocated_bytes), &context);
            let expected = array.slice(rows.start, rows.len());
            assert_same(&expected, &there.to_host().unwrap(), &context);
        }
        to.assert_done();
        from.assert_done();
    }
}

/// What nobody counted stays so on the way to a peer, and a foreign array's offsets stay where it is
/// whole.
#[test]
fn peers_of_every_type() {
    if cfg!(miri) {
        return;
    }
    let config = SimConfig::default();
    let from = Sim::with(config.clone().with_mode(SimMode::Deferred));
    let to = Sim::with(config.with_peer_access(true));
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        let array = array(&data_type, 141, Nulls::Some, 400 + i as u64);
        let up = from.upload_array(&array).unwrap();
        for (offset, rows) in [(0, 141), (0, 70), (8, 61), (3, 130)] {
            let context = format!("{name}, slice({offset}, {rows})");
            let slice = up.slice(offset, rows).unwrap();
            let there = slice.to_device(&to).unwrap();
            check_layout(&there, false, None, &context);
            let expected = array.slice(offset, rows);
            let down = there.to_host().unwrap();
            assert_same(&expected, &down, &context);
            assert_valid(&expected, &down, &context);
        }
    }
    let unknown = uncounted(&from.upload_array(&nullable(50)).unwrap());
    let there = unknown.to_device(&to).unwrap();
    assert_eq!(there.null_count(), None);
    assert_eq!(there.resolve_null_counts().unwrap(), 17);
    drop((unknown, there));
    to.assert_done();
    from.assert_done();
}
