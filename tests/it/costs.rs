//! What the benchmarks count, over more shapes and types: every upload's calls, bytes of slices and slabs, exports again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::simkit::{MODES, Sim};
use crate::support::{
    Nulls, SAME_ROWS, all_types, array, assert_same_batch, batch, variants, wide_batch,
};
use crate::support_c::sim::places;
use arrow_array::{Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, StringArray};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_data::ArrayData;
use arrow_device::device::sim::{SimConfig, SimMode};
use arrow_device::{DeviceArray, DeviceRecordBatch, ExportOptions, SyncPolicy, TransferStats};

fn counted<T>(sim: &Sim, work: impl FnOnce() -> T) -> (T, TransferStats) {
    let before = sim.stats();
    let result = work();
    (result, sim.stats().since(&before))
}

/// Batches that are packed, that are copied directly, and both.
fn shapes() -> Vec<(&'static str, RecordBatch)> {
    let large = |rows: usize| -> ArrayRef { Arc::new(Int64Array::from(vec![7; rows])) };
    let direct = (0..6).map(|i| (format!("d{i}"), large(200_000)));
    let ragged = (0..6).map(|i| (format!("r{i}"), large(200_001).slice(i, 199_995)));
    let between = (0..12).map(|i| match i % 3 {
        0 => (format!("b{i}"), large(150_000)),
        // Less than a chunk, and more than half of one.
        _ => (format!("b{i}"), large(300_000).slice(9, 150_000)),
    });
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    vec![
        ("one column", wide_batch(1, 1)),
        ("narrow", wide_batch(10, 1000)),
        ("wide", wide_batch(1000, 100)),
        ("every type", batch(&types, 300, Nulls::Some, 4)),
        ("direct", RecordBatch::try_from_iter(direct).unwrap()),
        ("ragged", RecordBatch::try_from_iter(ragged).unwrap()),
        ("between", RecordBatch::try_from_iter(between).unwrap()),
    ]
}

fn every_part(array: &DeviceArray, visit: &mut impl FnMut(&DeviceArray)) {
    visit(array);
    for i in 0..array.num_children() {
        every_part(&array.child(i).unwrap(), visit);
    }
}

/// Lengths in bytes of all buffers that are there.
fn buffers(array: &DeviceArray) -> Vec<usize> {
    let mut lengths = vec![];
    every_part(array, &mut |part| {
        lengths.extend((0..part.num_buffers()).filter_map(|i| Some(part.buffer(i)?.len())));
    });
    lengths
}

/// Waits until staging memory has come back, which happens in the background.
fn settle(sim: &Sim) {
    let end = Instant::now() + Duration::from_secs(30);
    sim.synchronize().unwrap();
    while sim.sim.report().live_events > 0 {
        assert!(Instant::now() < end, "events are left");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// C1: one allocation, a copy for each chunk and each direct buffer, no wait, and nothing new once warm.
#[test]
fn calls_of_an_upload() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        for (name, batch) in shapes() {
            let sim = Sim::new(mode);
            for warm in [false, true, true] {
                let (up, stats) = counted(&sim, || sim.upload(&batch).unwrap());
                let context = format!("{name} {mode:?} warm: {warm}: {stats:?}");
                let lengths = buffers(up.as_struct());
                let direct = lengths.iter().filter(|n| **n >= 1 << 20).count() as u64;
                // What is packed is cut by what is not.
                let chunks = stats.host_copied_bytes / (1 << 20) + 1 + direct;
                assert_eq!(stats.allocations, 1, "{context}");
                assert!(stats.copies <= chunks + direct, "{context}");
                assert!(stats.events <= stats.copies + 1, "{context}");
                assert_eq!((stats.host_waits, stats.queue_waits), (0, 0), "{context}");
                if warm {
                    assert_eq!(stats.host_allocations, 0, "{context}");
                }
                up.wait().unwrap();
                assert_same_batch(&batch, &up.to_host().unwrap(), &context);
                drop(up);
                settle(&sim);
            }
            sim.assert_done();
        }
    }
}

const ROWS: usize = 10_000_000;

/// Columns of `ROWS` rows, bytes of `rows` rows, and how many buffers that are.
fn columns(rows: usize) -> [(&'static str, ArrayRef, usize, usize); 3] {
    let bits = || BooleanBuffer::new(Buffer::from(vec![0b0110_1011u8; ROWS / 8]), 0, ROWS);
    let ends: Vec<i32> = (0..=ROWS as i32).map(|i| i * 3).collect();
    let ends = OffsetBuffer::new(ScalarBuffer::from(ends));
    let longs = Int64Array::new(vec![-5; ROWS].into(), Some(NullBuffer::new(bits())));
    let texts = StringArray::new(ends, Buffer::from(vec![b'x'; ROWS * 3]), None);
    let bools = BooleanArray::new(bits(), None);
    let bytes = rows.div_ceil(8);
    [
        ("longs", Arc::new(longs), rows * 8 + bytes, 2),
        ("texts", Arc::new(texts), (rows + 1) * 4 + rows * 3, 2),
        ("bools", Arc::new(bools), bytes, 1),
    ]
}

/// C2: one per cent of ten million rows.
#[test]
fn bytes_of_a_slice() {
    if cfg!(miri) {
        return;
    }
    let rows = ROWS / 100;
    let sim = Sim::new(SimMode::Async);
    for (name, column, payload, buffers) in columns(rows) {
        let whole = sim.upload_array(&column).unwrap();
        for offset in [0, 3_333_333, ROWS - rows] {
            let part = column.slice(offset, rows);
            let limit = (payload as f64 * 1.05) as u64 + 64 * buffers as u64;
            let (up, stats) = counted(&sim, || sim.upload_array(&part).unwrap());
            let context = format!("{name} from {offset}: {stats:?} of {payload}");
            assert!(stats.bytes_to_device <= limit, "{context}");
            assert!(stats.host_copied_bytes <= limit, "{context}");
            let slab = (payload + 64 * buffers) as u64;
            assert!(stats.allocated_bytes <= slab, "{context}");
            assert_eq!(*up.to_host().unwrap(), *part, "{context}");
            let slice = whole.slice(offset, rows).unwrap();
            let (down, stats) = counted(&sim, || slice.to_host().unwrap());
            assert!(stats.bytes_to_host <= limit, "{name} down: {stats:?}");
            assert_eq!(*down, *part, "{name} down");
        }
        drop(whole);
    }
    sim.assert_done();
}

/// Bytes of all buffers of an array, and of their children.
fn source_bytes(data: &ArrayData) -> usize {
    let own = data
        .buffers()
        .iter()
        .chain(data.nulls().map(|n| n.buffer()));
    let own: usize = own.map(|buffer| buffer.len()).sum();
    own + data.child_data().iter().map(source_bytes).sum::<usize>()
}

/// Types of which more than the rows moves: values of dictionaries, items of list views and dense unions, buffers
/// of views.
fn moves_more(data_type: &arrow_schema::DataType) -> bool {
    let text = format!("{data_type:?}");
    ["Dictionary", "ListView", "Dense", "Utf8View", "BinaryView"]
        .iter()
        .any(|t| text.contains(t))
}

/// C3: rows beside a slice, and those of children that no row needs, cost nothing.
#[test]
fn bytes_of_variants() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let mut types = 0;
    for (name, data_type) in all_types().into_iter().filter(|(_, t)| !moves_more(t)) {
        types += 1;
        for nulls in [Nulls::None, Nulls::Some] {
            let made = variants(&array(&data_type, 100, nulls, 3), 4);
            let made = made.iter().filter(|made| SAME_ROWS.contains(&made.variant));
            let bytes: Vec<_> = made
                .map(|made| {
                    let (up, stats) = counted(&sim, || sim.upload_data(made.data()).unwrap());
                    sim.synchronize().unwrap();
                    let (_, down) = counted(&sim, || up.to_host().unwrap());
                    (
                        stats.bytes_to_device,
                        stats.allocated_bytes,
                        down.bytes_to_host,
                    )
                })
                .collect();
            assert_eq!(
                bytes,
                vec![bytes[0]; SAME_ROWS.len()],
                "{name}, nulls {nulls:?}"
            );
        }
    }
    assert!(types > 80, "{types}");
    sim.assert_done();
}

/// C3: of every type.
#[test]
fn bytes_of_a_slab() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    for (name, data_type) in all_types() {
        for (rows, nulls) in [(1, Nulls::None), (100, Nulls::Some), (1001, Nulls::All)] {
            let source = array(&data_type, rows, nulls, 3);
            let (up, stats) = counted(&sim, || sim.upload_array(&source).unwrap());
            let lengths = buffers(&up);
            let context = format!("{name}, {rows} rows: {stats:?} of {lengths:?}");
            let room = 64 * lengths.len();
            let payload: usize = lengths.iter().sum();
            assert!(payload <= source_bytes(&source.to_data()), "{context}");
            assert!(
                stats.allocated_bytes as usize <= payload + room,
                "{context}"
            );
            assert!(stats.bytes_to_device <= stats.allocated_bytes, "{context}");
            sim.synchronize().unwrap();
            let (_, stats) = counted(&sim, || up.to_host().unwrap());
            assert!(stats.bytes_to_host as usize <= payload + room, "{context}");
        }
    }
    sim.assert_done();
}

/// Z1: what was imported goes out again for nothing.
#[test]
fn exports_again() {
    for place in places() {
        for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
            let source = wide_batch(100, 50);
            let up = place.device.upload(&source).unwrap();
            let array = up.export_array(&ExportOptions::new(sync)).unwrap();
            let schema = up.schema();
            drop(up);
            // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
            let imported =
                unsafe { DeviceRecordBatch::import_as(array, schema, &place.options) }.unwrap();
            let before = place.device.stats();
            for _ in 0..3 {
                let options = ExportOptions::new(SyncPolicy::Event);
                drop(imported.export_array(&options).unwrap());
            }
            let cost = place.device.stats().since(&before);
            assert_eq!(cost, TransferStats::default(), "{place} {sync:?}");
            assert_same_batch(&source, &imported.to_host().unwrap(), "again");
            drop(imported);
            place.assert_clean();
        }
    }
}

/// Peers copy directly, with one list; without access the data goes through the host.
#[test]
fn peers_copy_without_the_host() {
    if cfg!(miri) {
        return;
    }
    let config = SimConfig::default().with_mode(SimMode::Deferred);
    let from = Sim::with(config.clone());
    let peer = Sim::with(config.clone().with_peer_access(true));
    let stranger = Sim::with(config);
    let batch = wide_batch(40, 50);
    let up = from.upload(&batch).unwrap();
    let (there, stats) = counted(&peer, || up.to_device(&peer).unwrap());
    assert_eq!(
        (
            stats.allocations,
            stats.bytes_to_device,
            stats.host_copied_bytes
        ),
        (1, 0, 0)
    );
    assert!(stats.bytes_on_device > 0);
    assert_eq!(from.stats().bytes_to_host, 0);
    let (other, stats) = counted(&stranger, || up.to_device(&stranger).unwrap());
    assert_eq!(
        (stats.allocations, stats.copies, stats.bytes_on_device),
        (1, 1, 0)
    );
    assert!(from.stats().bytes_to_host > 0);
    let same = |b: &DeviceRecordBatch| assert_same_batch(&batch, &b.to_host().unwrap(), "there");
    same(&there);
    same(&other);
    drop((up, there, other));
    for sim in [&from, &peer, &stranger] {
        sim.assert_done();
    }
}
