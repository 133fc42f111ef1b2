//! What a concatenation costs: allocations, copies, bytes and waits, and what is kept once.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, BooleanArray, StringViewArray};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_device::DeviceArray;
use arrow_device::device::sim::{FaultOp, SimMode};
use arrow_schema::DataType;

use crate::concat::{counted, dictionary, nullable, plain, texts, uncounted};
use crate::simkit::layout::written_once;
use crate::simkit::*;
use crate::support::*;

/// An array, and which rows of it.
type Input = (ArrayRef, std::ops::Range<usize>);

/// What it costs, warm: copies of the one list and of the reads, bytes, waits.
#[test]
fn costs() {
    if cfg!(miri) {
        return;
    }
    // Inputs, then: copies, bytes on the device, to the host, to the device, host waits.
    let up = |array: ArrayRef| (array.clone(), 0..array.len());
    let table: Vec<(&str, Vec<Input>, [u64; 5])> = vec![
        // Values go straight; one padding is filled.
        (
            "values",
            vec![up(plain(100)), (plain(100), 3..53)],
            [2, 1200, 0, 0, 0],
        ),
        // Bitmaps that continue at the same bit go straight too; the bitmap's padding is filled.
        (
            "aligned nulls",
            vec![up(nullable(64)), up(nullable(8))],
            [4, 512 + 64 + 8 + 1, 0, 0, 0],
        ),
        // All of the second bitmap, and the last byte of the first; all of it ends up in the bitmap's 64 bytes.
        (
            "nulls",
            vec![up(nullable(100)), up(nullable(28))],
            [6, 800 + 224 + 12, 1 + 4, 52, 1],
        ),
        // Set bits for what has no bitmap.
        (
            "some nulls",
            vec![up(nullable(64)), up(plain(64))],
            [4, 1024 + 8, 0, 56, 0],
        ),
        // The ends of the offsets, then the second one's offsets but the first.
        (
            "texts",
            vec![up(texts(16)), up(texts(15))],
            [9, 68 + 48 + 45, 16 + 60, 60, 2],
        ),
        // Shared dictionaries: keys go straight. The ends of the dictionary's offsets are read.
        ("dictionary", vec![up(dictionary(32))], [0; 5]),
    ];
    for mode in MODES {
        let sim = Sim::new(mode);
        for (name, inputs, expected) in &table {
            let mut arrays: Vec<_> = inputs
                .iter()
                .map(|(array, rows)| {
                    let up = sim.upload_array(array).unwrap();
                    let slice = up.slice(rows.start, rows.len()).unwrap();
                    slice.resolve_null_counts().unwrap();
                    slice
                })
                .collect();
            if arrays.len() == 1 {
                arrays = vec![arrays[0].slice(0, 20).unwrap(), arrays[0].clone()];
            }
            let arrays: Vec<_> = arrays.iter().collect();
            drop(DeviceArray::concat(&arrays).unwrap());
            sim.synchronize().unwrap();
            let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
            let (stats, lists) = loop {
                let lists = sim.faults().seen(FaultOp::Copy);
                let (whole, stats) = counted(&sim, || DeviceArray::concat(&arrays).unwrap());
                drop(whole);
                if stats.host_allocations == 0 || std::time::Instant::now() > end {
                    break (stats, sim.faults().seen(FaultOp::Copy) - lists);
                }
                // The staging memory of the last one has not come back yet.
                sim.synchronize().unwrap();
            };
            written_once(&stats, name);
            assert_eq!(
                (stats.allocations, stats.host_allocations),
                (1, 0),
                "{name}"
            );
            // A wait has a list and an event; one more is the result's own.
            assert_eq!(
                (lists, stats.events),
                (stats.host_waits + 1, stats.host_waits + 1),
                "{name}"
            );
            let found = [
                stats.copies,
                stats.bytes_on_device,
                stats.bytes_to_host,
                stats.bytes_to_device,
                stats.host_waits,
            ];
            if *expected != [0; 5] {
                assert_eq!(found, *expected, "{mode:?} {name}: {stats:?}");
            } else {
                // Keys, the offsets and bytes of one dictionary, and padding.
                assert_eq!((found[3], found[4]), (0, 1), "{name}");
            }
        }
        sim.assert_done();
    }
}

/// Another queue waits for each array, once.
#[test]
fn another_queue() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let sim = Sim::new(mode);
        let queue = sim.new_queue().unwrap();
        let expected = arrow_select::concat::concat(&[&nullable(64), &nullable(7)]).unwrap();
        let parts = [64, 7].map(|rows| sim.upload_array(&nullable(rows)).unwrap());
        let arrays = [&parts[0], &parts[1]];
        let (whole, stats) = counted(&sim, || DeviceArray::concat_on(&arrays, &queue).unwrap());
        assert_eq!((stats.queue_waits, stats.host_waits), (2, 1));
        // The sources go before their copies have run.
        drop(parts);
        assert_same(&expected, &whole.to_host().unwrap(), "another queue");
        drop(whole);
        sim.assert_done();
    }
}

/// What several arrays share is kept once, and what refers to it goes straight.
#[test]
fn shared_memory_is_kept_once() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let long = |i: usize| format!("a text that is too long for a view {i}");
    let views: ArrayRef = Arc::new(StringViewArray::from_iter_values((0..40).map(long)));
    let lists = array(
        &DataType::ListView(crate::support::types::field("item", DataType::Int32)),
        40,
        Nulls::None,
        1,
    );
    let union = crate::support::types::union(
        arrow_schema::UnionMode::Dense,
        vec![DataType::Int32, DataType::Utf8],
    );
    let union = array(&union, 40, Nulls::None, 2);
    for rows in [views, lists, dictionary(40), union] {
        let up = sim.upload_array(&rows).unwrap();
        let parts = [up.slice(0, 25).unwrap(), up.slice(25, 15).unwrap()];
        let (whole, stats) = counted(&sim, || {
            DeviceArray::concat(&[&parts[0], &parts[1]]).unwrap()
        });
        let name = rows.data_type();
        // No more than the ends of offsets.
        assert!(
            stats.bytes_to_device == 0 && stats.bytes_to_host <= 16,
            "{name}: {stats:?}"
        );
        assert_same(&rows, &whole.to_host().unwrap(), name);
        assert_eq!(whole.num_buffers(), up.num_buffers(), "{name}");
        for i in 0..up.num_children() {
            assert_eq!(
                whole.child(i).unwrap().len(),
                up.child(i).unwrap().len(),
                "{name}"
            );
        }
        // Another upload has memory of its own.
        let other = sim.upload_array(&rows).unwrap();
        let (twice, stats) = counted(&sim, || DeviceArray::concat(&[&up, &other]).unwrap());
        assert!(stats.bytes_to_device > 0, "{name}");
        let down = twice.to_host().unwrap();
        assert_same(&rows, &down.slice(0, 40), name);
        assert_same(&rows, &down.slice(40, 40), name);
    }
    sim.assert_done();
}

/// What the host makes goes round in 16 MiB of staging memory.
#[test]
fn staging_memory_is_bounded() {
    if cfg!(miri) {
        return;
    }
    const MIB: usize = 1 << 20;
    let sim = Sim::new(SimMode::Deferred);
    let bytes: Vec<u8> = (0..20 * MIB).map(|i| (i * 7 + i / 1000) as u8).collect();
    let bits = BooleanBuffer::new(Buffer::from_vec(bytes), 0, 20 * MIB * 8);
    let array: ArrayRef = Arc::new(BooleanArray::new(bits.clone(), Some(NullBuffer::new(bits))));
    let up = sim.upload_array(&array).unwrap();
    sim.synchronize().unwrap();
    let rows = array.len() - 5;
    let parts = [
        uncounted(&up).slice(0, rows).unwrap(),
        up.slice(3, 1001).unwrap(),
    ];
    let lists = sim.faults().seen(FaultOp::Copy);
    let (whole, stats) = counted(&sim, || {
        DeviceArray::concat(&[&parts[0], &parts[1]]).unwrap()
    });
    // The nulls are counted: 20 MiB in parts of 1 MiB, seven to a group with their sources. The values go straight, except
    // the few at the end.
    assert_eq!(stats.host_waits, 2 * 3 - 1);
    assert_eq!(sim.faults().seen(FaultOp::Copy) - lists, 2 * 3);
    written_once(&stats, "bounded");
    assert!(sim.sim.report().live_host_bytes <= 80 * MIB);
    let nulls = array.slice(0, rows).null_count() + array.slice(3, 1001).null_count();
    assert_eq!(whole.null_count(), Some(nulls));
    let down = whole.to_host().unwrap();
    assert!(*down.slice(0, rows) == *array.slice(0, rows));
    assert!(*down.slice(rows, 1001) == *array.slice(3, 1001));
    drop((up, parts, whole, down));
    sim.assert_done();
}
