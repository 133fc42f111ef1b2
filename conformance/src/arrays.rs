//! Rules about uploads, downloads and copies of arrays.

use std::sync::Arc;

use arrow_device::arrow_array::{ArrayRef, RecordBatch, StructArray};
use arrow_device::arrow_schema::{Field, Schema};

use super::kit::{join, queue};
use super::samples::{ROWS, all, assert_same};
use super::{Subject, Verdict};
use arrow_device::{DeviceArray, Devices};

/// Slices: (offset, rows).
const CUTS: [(usize, usize); 5] = [
    (0, ROWS),
    (1, ROWS - 2),
    (7, 9),
    (ROWS - 1, 1),
    (ROWS / 2, 0),
];

pub(super) fn types(subject: &Subject) -> Verdict {
    let device = &subject.device;
    for array in all() {
        let up = device.upload_array(&array).expect("upload");
        let cuts = if cfg!(miri) { &CUTS[1..2] } else { &CUTS };
        for &(offset, rows) in cuts {
            let what = format!("{}, {rows} rows from {offset}", array.data_type());
            let cut = array.slice(offset, rows);
            let after = up.slice(offset, rows).expect("slice");
            let after = after.to_host().unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_same(&cut, &after, format_args!("{what}, cut on the device"));
            let before = device.upload_array(&cut).expect("upload").to_host();
            let before = before.unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_same(&cut, &before, format_args!("{what}, cut on the host"));
        }
    }
    let batch = batch();
    let queue = queue(device);
    let up = device.upload_on(&batch, &queue).expect("upload_on");
    assert_eq!(up.schema(), batch.schema());
    assert_eq!(up.num_rows(), ROWS);
    assert_batch(&batch, &up.to_host().expect("to_host"), "a batch");
    let part = up
        .slice(5, ROWS / 2)
        .expect("slice")
        .project(&[3, 0])
        .expect("project");
    let expected = batch.slice(5, ROWS / 2).project(&[3, 0]).expect("project");
    assert_batch(
        &expected,
        &part.to_host().expect("to_host"),
        "a part of a batch",
    );
    Verdict::Kept
}

pub(super) fn compact(subject: &Subject) -> Verdict {
    let device = &subject.device;
    for array in all() {
        let up = device.upload_array(&array).expect("upload");
        let cuts = if cfg!(miri) { &CUTS[1..2] } else { &CUTS };
        for &(offset, rows) in cuts {
            let what = format!("{}, {rows} rows from {offset}", array.data_type());
            let slice = up.slice(offset, rows).expect("slice");
            let before = device.stats();
            let copy = slice.compact();
            let copy = copy.unwrap_or_else(|e| panic!("{what}: {e}"));
            let cost = device.stats().since(&before);
            assert!(cost.allocations <= 1, "{what}: {cost:?}");
            assert_eq!((copy.device(), copy.offset()), (device, 0), "{what}");
            assert!(copy.null_count().is_some(), "{what}");
            for i in 0..copy.num_buffers() {
                if let Some(buffer) = copy.buffer(i).filter(|buffer| !buffer.is_empty()) {
                    assert_eq!(buffer.address().address() % 64, 0, "{what}");
                    let source = slice.buffer(i).map(|source| source.address());
                    assert_ne!(Some(buffer.address()), source, "{what}");
                }
            }
            drop(slice);
            let down = copy.to_host().unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_same(&array.slice(offset, rows), &down, &what);
        }
    }
    Verdict::Kept
}

pub(super) fn concat(subject: &Subject) -> Verdict {
    let device = &subject.device;
    for array in all() {
        let what = array.data_type().to_string();
        let up = [(); 2].map(|()| device.upload_array(&array).expect("upload"));
        // In order: of one memory, then of another one, at other bits of a byte.
        let cuts = [
            (0, 5, ROWS - 9),
            (0, ROWS - 4, 2),
            (1, 0, 7),
            (1, 3, 0),
            (0, 8, ROWS.min(24) - 8),
        ];
        let parts = cuts.map(|(i, offset, rows)| up[i].slice(offset, rows).expect("slice"));
        let before = device.stats();
        let whole = DeviceArray::concat(&parts.each_ref());
        let whole = whole.unwrap_or_else(|e| panic!("{what}: {e}"));
        let cost = device.stats().since(&before);
        assert!(cost.allocations <= 1, "{what}: {cost:?}");
        assert_eq!((whole.device(), whole.offset()), (device, 0), "{what}");
        assert!(whole.null_count().is_some(), "{what}");
        drop((up, parts));
        let down = whole.to_host().unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut start = 0;
        for (_, offset, rows) in cuts {
            let part = down.slice(start, rows);
            assert_same(
                &array.slice(offset, rows),
                &part,
                format_args!("{what}, {rows} rows from {offset}, at {start}"),
            );
            start += rows;
        }
        assert_eq!(start, whole.len(), "{what}");
    }
    Verdict::Kept
}

/// All samples as columns.
pub(super) fn batch() -> RecordBatch {
    let columns: Vec<ArrayRef> = all();
    let fields = columns
        .iter()
        .enumerate()
        .map(|(i, column)| Field::new(format!("c{i}"), column.data_type().clone(), true));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    RecordBatch::try_new(schema, columns).expect("columns fit")
}

pub(super) fn assert_batch(expected: &RecordBatch, actual: &RecordBatch, what: &str) {
    assert_eq!(expected.schema(), actual.schema(), "{what}");
    for (i, column) in expected.columns().iter().enumerate() {
        assert_same(column, actual.column(i), format_args!("{what}, column {i}"));
    }
}

pub(super) fn devices(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let cpu = Devices::cpu();
    let another = subject.another.as_ref().map(|make| make());
    for array in all() {
        let what = array.data_type();
        let on_cpu = cpu.upload_array(&array).expect("wrap");
        let up = on_cpu.to_device(device).expect("to_device");
        assert_eq!(up.device(), device);
        let same = up.to_device(device).expect("to_device, there already");
        assert_eq!(same.device(), device);
        let down = up.slice(1, ROWS - 3).expect("slice").to_device(&cpu);
        let down = down.expect("to_device of the CPU");
        assert_eq!(down.device(), &cpu);
        let down = down.to_host().expect("to_host");
        assert_same(
            &array.slice(1, ROWS - 3),
            &down,
            format_args!("{what}, by the CPU"),
        );
        if let Some(another) = &another {
            let there = up.to_device(another).expect("to another device");
            drop(up);
            let back = there.to_device(device).expect("back from another device");
            drop(there);
            let back = back.to_host().expect("to_host");
            assert_same(&array, &back, format_args!("{what}, by another device"));
        }
    }
    Verdict::Kept
}

pub(super) fn threads(subject: &Subject) -> Verdict {
    let rounds = if cfg!(miri) { 1 } else { 10 };
    let columns: Vec<_> = batch().columns()[..9].to_vec();
    let fields: Vec<_> = batch().schema().fields().iter().take(9).cloned().collect();
    let all: ArrayRef = Arc::new(StructArray::new(fields.into(), columns, None));
    std::thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|thread| {
            let (device, all) = (&subject.device, &all);
            scope.spawn(move || {
                for round in 0..rounds {
                    let rows = all.slice(thread, ROWS - 5 - round);
                    let up = if thread % 2 == 0 {
                        device.upload_array(&rows)
                    } else {
                        device.upload_array_on(&rows, &queue(device))
                    };
                    let down = up.expect("upload").to_host().expect("to_host");
                    assert_same(&rows, &down, format_args!("thread {thread}, round {round}"));
                }
            })
        });
        join(threads);
    });
    Verdict::Kept
}
