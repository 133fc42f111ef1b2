//! Which memory a column keeps, and what is known of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::{Array, ArrayRef, Int32Array, Int64Array, RecordBatch, StringArray, StructArray};
use arrow_device::device::sim::SimMode;
use arrow_device::{
    Device, DeviceArray, DeviceRecordBatch, Devices, ExportOptions, SyncPolicy, Validity,
};
use arrow_schema::{DataType, Fields};

use crate::arrays::{ROWS, batch_of, counted, strings, text};
use crate::simkit::{MODES, Sim, watched};
use crate::support::{alloc, assert_same, types};
use crate::support_c::sim::places;

/// Waits until this many bytes of device memory are allocated.
#[track_caller]
fn assert_live(sim: &Sim, bytes: usize) {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        sim.synchronize().unwrap();
        let live = sim.sim.report().live_bytes;
        if live == bytes {
            return;
        }
        assert!(Instant::now() < end, "{live} bytes, not {bytes}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Columns of separate allocations: who keeps one keeps its memory only, however it was taken.
#[test]
fn a_column_keeps_only_its_own_memory() {
    let longs = Int64Array::from(vec![7; ROWS]);
    type Take = fn(DeviceRecordBatch) -> DeviceArray;
    let takes: [Take; 6] = [
        |batch| batch.column(1).unwrap(),
        |batch| batch.slice(5, 10).unwrap().column_by_name("c1").unwrap(),
        |batch| batch.columns().last().unwrap(),
        |batch| batch.into_parts().1.swap_remove(1),
        |batch| batch.project(&[1]).unwrap().column(0).unwrap(),
        |batch| batch.as_struct().child(1).unwrap(),
    ];
    for mode in MODES {
        for (i, take) in takes.into_iter().enumerate() {
            let sim = Sim::new(mode);
            let column = || sim.upload_array(&longs).unwrap();
            let batch = batch_of(&[column(), column()]);
            assert_live(&sim, 16 * ROWS);
            assert_eq!(batch.get_array_memory_size(), 16 * ROWS);
            let (kept, stats) = counted(|| take(batch));
            assert_eq!(
                (stats.allocations, stats.copies, stats.host_waits),
                (0, 0, 0),
                "{i}"
            );
            assert_live(&sim, 8 * ROWS);
            assert_eq!(kept.get_array_memory_size(), 8 * ROWS, "{i}");
            assert_same(&longs.slice(0, kept.len()), &kept.to_host().unwrap(), "{i}");
            drop(kept);
            sim.assert_done();
        }
    }
}

/// What came in one allocation stays together until it is copied.
#[test]
fn a_column_of_an_upload_keeps_the_upload() {
    let sim = Sim::new(SimMode::Async);
    let long = || -> ArrayRef { Arc::new(Int64Array::from(vec![7; ROWS])) };
    let host = RecordBatch::try_from_iter([("a", long()), ("b", long())]).unwrap();
    let up = sim.upload(&host).unwrap();
    let column = up.column(1).unwrap();
    drop(up);
    assert_live(&sim, 16 * ROWS);
    assert_eq!(column.get_array_memory_size(), 16 * ROWS);
    let own = column.compact().unwrap();
    drop(column);
    assert_live(&sim, 8 * ROWS);
    assert_same(&long(), &own.to_host().unwrap(), "compact");
    drop(own);
    sim.assert_done();
}

/// Nested arrays, each buffer of which has an owner of its own: what any descendant refers to is what arrow-rs has.
#[test]
fn children_of_separate_memory() {
    let strings = StringArray::from(vec!["a", "", "ccc", "dd"]);
    let numbers = Int32Array::from(vec![Some(1), None, Some(3), Some(4)]);
    let cpu = Devices::cpu();
    let up = |array: &dyn Array| cpu.upload_array(array).unwrap();
    let inner = Fields::from(vec![
        types::field("s", DataType::Utf8),
        types::field("n", DataType::Int32),
    ]);
    let inner_array = |at| {
        let columns = [up(&strings), up(&numbers)].map(|c| c.slice(at, 2).unwrap());
        DeviceArray::from_children(
            DataType::Struct(inner.clone()),
            columns[0].len(),
            &columns,
            None,
        )
        .unwrap()
    };
    let row = |at: usize| {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(strings.slice(at, 2)),
            Arc::new(numbers.slice(at, 2)),
        ];
        StructArray::new(inner.clone(), columns, None)
    };
    let outer = batch_of(&[inner_array(0), up(&numbers.slice(1, 2)), inner_array(2)]);
    for (i, at) in [(0, 0), (2, 2)] {
        let child = outer.column(i).unwrap();
        assert_eq!(child.field().unwrap().name(), &format!("c{i}"));
        assert_same(&row(at), &child.to_host().unwrap(), i);
        let sliced = outer.slice(1, 1).unwrap().column(i).unwrap();
        assert_same(&row(at).slice(1, 1), &sliced.to_host().unwrap(), i);
        let leaf = sliced.child(0).unwrap();
        assert_eq!(leaf.field().unwrap().name(), "s");
        assert_same(&strings.slice(at + 1, 1), &leaf.to_host().unwrap(), i);
        let leaf = sliced.child(1).unwrap();
        drop((child, sliced));
        assert_same(&numbers.slice(at + 1, 1), &leaf.to_host().unwrap(), i);
        let (c_array, schema) = leaf.export(SyncPolicy::Event).unwrap();
        // SAFETY: both come from `export`.
        let again = unsafe { DeviceArray::import(c_array, &schema, None) }.unwrap();
        assert_same(&numbers.slice(at + 1, 1), &again.to_host().unwrap(), i);
    }
    assert_same(
        &numbers.slice(1, 2),
        &outer.column(1).unwrap().to_host().unwrap(),
        "flat",
    );
}

/// The export of one column of many with an owner each is as large as that of a single one, and keeps one owner.
#[test]
fn exporting_one_column_costs_its_own_owners() {
    let columns = 2000;
    let (arrays, watches): (Vec<_>, Vec<_>) = (0..columns)
        .map(|_| {
            let (array, watch) = watched(4);
            (Devices::cpu().upload_array(&array).unwrap(), watch)
        })
        .unzip();
    let options = ExportOptions::new(SyncPolicy::Event);
    let (_, alone, _) = alloc::bytes(|| arrays[0].export_array(&options).unwrap());
    let batch = batch_of(&arrays);
    drop(arrays);
    let kept = columns / 2;
    let column = batch.column(kept).unwrap();
    let (exported, of_many, _) = alloc::bytes(|| column.export_array(&options).unwrap());
    assert_eq!(
        of_many, alone,
        "bytes allocated for the export of one column"
    );
    let export = |column: DeviceArray| column.export_array(&options).unwrap();
    // The first time each column becomes an array of its own.
    for most in [4000, alone + size_of_val(&exported)] {
        let list = Vec::with_capacity(columns);
        let (all, bytes, _) = alloc::bytes(|| {
            let mut all = list;
            all.extend(batch.columns().map(export));
            all
        });
        assert_eq!(all.len(), columns);
        assert!(
            bytes <= most * columns,
            "{} bytes for each column",
            bytes / columns
        );
    }
    drop((batch, column));
    let alive: Vec<_> = (0..columns)
        .filter(|i| watches[*i].strong_count() > 0)
        .collect();
    assert_eq!(alive, [kept]);
    drop(exported);
    assert_eq!(watches[kept].strong_count(), 0);
}

/// 60 numbers in memory of their own, with a bitmap whose nulls nobody has counted.
fn uncounted(device: &Device) -> DeviceArray {
    let mut bits = vec![0xff_u8; 8];
    bits[0] = 0x7f;
    let up = |bytes: Vec<u8>| {
        let bytes = arrow_array::UInt8Array::from(bytes);
        device.upload_array(&bytes).unwrap().buffer(1).unwrap()
    };
    let validity = Validity::new(up(bits), 0, 60).unwrap();
    DeviceArray::from_values(DataType::UInt8, 60, up(vec![1; 60]), Some(validity)).unwrap()
}

/// Nulls are counted once, in the batch or in a column of it, whoever asks first.
#[test]
fn null_counts_of_columns_of_separate_memory() {
    for place in places() {
        let device = &place.device;
        let on_device = u64::from(place.sim.is_some());
        let batch = batch_of(&[uncounted(device), uncounted(device), uncounted(device)]);
        let early = batch.column(2).unwrap();
        let (nulls, stats) = counted(|| batch.column(0).unwrap().resolve_null_counts());
        assert_eq!((nulls.unwrap(), stats.copies), (1, on_device));
        assert_eq!(batch.column(0).unwrap().null_count(), Some(1));
        let all = || batch.as_struct().resolve_null_counts().unwrap();
        let (_, stats) = counted(all);
        assert_eq!(stats.copies, 2 * on_device, "the other two");
        assert_eq!(
            (early.null_count(), early.slice(0, 60).unwrap().null_count()),
            (Some(1), Some(1))
        );
        let again = || {
            early.resolve_null_counts().unwrap()
                + batch.column(1).unwrap().resolve_null_counts().unwrap()
        };
        let (nulls, stats) = counted(again);
        assert_eq!((nulls, stats.copies), (2, 0));
        drop(batch);
        assert_eq!(early.null_count(), Some(1));
        drop(early);
        place.assert_clean();
    }
}

/// Sizes are read once, in the batch or in a column of it.
#[test]
fn sizes_of_columns_of_separate_memory() {
    for place in places() {
        let device = &place.device;
        let queue = device.default_queue();
        let on_device = u64::from(place.sim.is_some());
        let batch = batch_of(&[text(&place), text(&place)]);
        let early = batch.column(1).unwrap();
        assert!(early.buffer(2).is_none());
        for (i, copies) in [on_device, 0].into_iter().enumerate() {
            let first = batch.column(0).unwrap();
            let (bytes, stats) = counted(|| first.bytes_on(&queue).unwrap().len());
            assert_eq!(
                (bytes, stats.copies, stats.host_waits),
                (8, copies, copies),
                "{i}"
            );
            assert_eq!(
                (stats.allocations, stats.bytes_to_host),
                (0, 4 * copies),
                "{i}"
            );
        }
        let (_, stats) = counted(|| batch.as_struct().resolve_sizes().unwrap());
        assert_eq!(stats.copies, on_device, "the other one");
        // A column that was taken before knows them too, and so does what is made of it.
        let again = batch_of(std::slice::from_ref(&early));
        let own = again.as_struct().get_array_memory_size();
        assert_eq!(early.get_array_memory_size(), own);
        assert!(own >= 8 && again.column(0).unwrap().buffer(2).is_some());
        let (down, stats) = counted(|| early.to_host().unwrap());
        assert_eq!(stats.host_waits, on_device, "none for sizes");
        assert_same(&strings(), &down, "text");
        assert_eq!(early.buffer(2).unwrap().len(), 8);
        assert_same(&strings(), &early.to_host().unwrap(), "text");
        drop((batch, again, early, down));
        place.assert_clean();
    }
}

/// Offsets need not start at 0, and those of rows before an array's need not be valid: none of them belongs to an empty slice.
#[test]
fn empty_slices_have_no_offsets() {
    use arrow_buffer::{Buffer, OffsetBuffer};
    let texts = StringArray::new(
        OffsetBuffer::new(vec![5, 8, 10].into()),
        Buffer::from(b"0123456789"),
        None,
    );
    let up = Devices::cpu().upload_array(&texts).unwrap();
    let (array, schema) = up.export(SyncPolicy::Event).unwrap();
    // SAFETY: `export` has just made both.
    let imported = unsafe { DeviceArray::import(array, &schema, None) }.unwrap();
    for array in [up, imported] {
        for at in 0..=2 {
            let down = array.slice(at, 0).unwrap().to_host().unwrap();
            down.to_data().validate_full().unwrap();
            assert!(down.is_empty());
        }
        assert_eq!(array.slice(1, 1).unwrap().to_host().unwrap().len(), 1);
    }
}
