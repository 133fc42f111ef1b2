//! Concatenation: values against `arrow_select::concat`, layout, what it refuses.

mod refusals;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::simkit::layout::{check_layout, written_once};
use crate::simkit::*;
use crate::support::*;
use crate::support_c::sim::{Place, places};
use arrow_array::{Array, ArrayRef, Int64Array, NullArray, StringArray, StringViewArray};
use arrow_buffer::Buffer;
use arrow_device::device::sim::SimMode;
use arrow_device::{
    DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, TransferStats, Validity,
};
use arrow_schema::{DataType, Field};
use proptest::prelude::*;

/// As this crate counts: all rows of a null array are null.
fn nulls_of(rows: &ArrayRef) -> usize {
    match rows.data_type() {
        DataType::Null => rows.len(),
        _ => rows.null_count(),
    }
}

/// Concatenates arrays and their rows. Returns whether it was possible.
fn concats(inputs: &[(DeviceArray, ArrayRef)], context: &str) -> bool {
    let device = inputs[0].0.device().clone();
    let arrays: Vec<_> = inputs.iter().map(|(array, _)| array).collect();
    let (whole, stats) = TransferStats::scope(|| DeviceArray::concat(&arrays));
    let whole = match whole {
        Ok(whole) => whole,
        Err(e) => {
            let text = e.to_string();
            let known = ["dictionary values, at most", "rows, at most"];
            assert!(known.iter().any(|k| text.contains(k)), "{context}: {text}");
            assert!(text.contains("array"), "{context}: {text}");
            return false;
        }
    };
    let rows = inputs.iter().map(|(_, rows)| rows.len()).sum();
    assert_eq!((whole.device(), whole.len()), (&device, rows), "{context}");
    assert_eq!(whole.data_type(), inputs[0].0.data_type(), "{context}");
    assert_eq!(whole.field(), inputs[0].0.field(), "{context}");
    let nulls = inputs.iter().map(|(_, rows)| nulls_of(rows)).sum();
    assert_eq!(whole.null_count(), Some(nulls), "{context}");
    let allocated = match device.is_host_readable() {
        true => None,
        false => {
            assert_eq!(stats.allocations, u64::from(stats.allocated_bytes > 0));
            written_once(&stats, context);
            Some(stats.allocated_bytes)
        }
    };
    check_layout(&whole, true, allocated, context);
    let down = whole.to_host().unwrap();
    // Each part is what it was, whatever arrow-rs says of the whole.
    let mut start = 0;
    for (i, (_, rows)) in inputs.iter().enumerate() {
        let part = down.slice(start, rows.len());
        assert_same(rows, &part, format!("{context}, input {i}"));
        start += rows.len();
    }
    let inputs: Vec<&dyn Array> = inputs.iter().map(|(_, rows)| &**rows).collect();
    // arrow-rs panics on some unions and views.
    let theirs = catch_unwind(AssertUnwindSafe(|| arrow_select::concat::concat(&inputs)));
    if let Ok(Ok(theirs)) = theirs {
        assert_same(&theirs, &down, context);
        assert_valid(&theirs, &down, context);
    }
    true
}

fn every_type_on(place: &Place) {
    let device = &place.device;
    for (t, (name, data_type)) in all_types().into_iter().enumerate() {
        let seed = 900 + 10 * t as u64;
        let upload = |rows: ArrayRef| (device.upload_array(&rows).unwrap(), rows);
        let some = upload(array(&data_type, 37, Nulls::Some, seed));
        let none = upload(array(&data_type, 16, Nulls::None, seed + 1));
        let all = upload(array(&data_type, 5, Nulls::All, seed + 2));
        let empty = upload(array(&data_type, 20, Nulls::Some, seed + 3).slice(7, 0));
        let more = upload(array(&data_type, 29, Nulls::Some, seed + 4));
        let cut =
            |of: &(DeviceArray, ArrayRef), at, n| (of.0.slice(at, n).unwrap(), of.1.slice(at, n));
        let same = |of: &(DeviceArray, ArrayRef)| of.clone();
        let lists = [
            vec![same(&some)],
            vec![
                same(&some),
                same(&none),
                same(&empty),
                same(&all),
                same(&more),
            ],
            vec![cut(&some, 3, 11), cut(&some, 14, 20), cut(&some, 0, 8)],
            vec![
                same(&none),
                cut(&more, 8, 16),
                same(&none),
                cut(&more, 5, 3),
            ],
            vec![same(&empty), cut(&all, 2, 3), cut(&more, 1, 28)],
        ];
        let n = lists.len();
        let mut done = 0;
        for (i, inputs) in lists.into_iter().enumerate() {
            let context = format!("{device} {name}, list {i}");
            done += usize::from(concats(&inputs, &context));
        }
        // Only dictionaries may be too many for their keys.
        assert!(
            done == n || (done >= n - 2 && name.contains("i8")),
            "{name}: {done} of {n}"
        );
        drop((some, none, all, empty, more));
        place.assert_clean();
    }
}

#[test]
fn every_type() {
    for place in places() {
        every_type_on(&place);
    }
}

/// Arrays of any type, made in any way and cut anywhere.
#[test]
fn random_arrays() {
    let sims = MODES.map(Sim::new);
    let more =
        proptest::collection::vec((0usize..60, any::<u64>(), 0usize..3, any::<bool>()), 0..5);
    proptest!(crate::properties::config(), |(case in arb_array(), more in more)| {
        let mut rows = vec![case.array()];
        for (n, seed, nulls, cut) in more {
            let nulls = [Nulls::None, Nulls::Some, Nulls::All][nulls];
            let case = ArrayCase {
                rows: n,
                nulls,
                seed,
                slice: if cut { (n / 3, n / 2) } else { (0, n) },
                ..case.clone()
            };
            rows.push(case.array());
        }
        let devices = [&sims[0].device, &sims[1].device, &Devices::cpu()];
        for device in devices {
            let mut inputs: Vec<_> = rows
                .iter()
                .map(|rows| (device.upload_array(rows).unwrap(), rows.clone()))
                .collect();
            // A part of the first once more: its memory is shared.
            let (first, rows) = inputs[0].clone();
            let half = rows.len() / 2;
            inputs.push((first.slice(half, rows.len() - half).unwrap(), rows.slice(half, rows.len() - half)));
            let context = format!("{device} {}", case.data_type);
            // So few rows are too many for keys of 8 bits only.
            let fits = concats(&inputs, &context);
            prop_assert!(fits || format!("{:?}", case.data_type).contains("Int8"), "{}", context);
        }
    });
    sims.iter().for_each(Sim::assert_done);
}

#[test]
fn batches() {
    // Those whose keys have room.
    let types = all_types().into_iter().map(|(_, t)| t);
    let types: Vec<_> = types
        .filter(|t| !format!("{t:?}").contains("Int8"))
        .collect();
    let (whole, none) = (
        batch(&types, 90, Nulls::Some, 4),
        batch(&types, 33, Nulls::None, 5),
    );
    for mode in MODES {
        let sim = Sim::new(mode);
        let up = sim.upload(&whole).unwrap();
        let more = sim.upload(&none).unwrap();
        let parts = [up.slice(5, 40).unwrap(), more, up.slice(45, 30).unwrap()];
        let schema = whole.schema();
        let (joined, stats) =
            TransferStats::scope(|| DeviceRecordBatch::concat(&schema, &parts, None).unwrap());
        drop((up, parts));
        assert_eq!(stats.allocations, 1);
        written_once(&stats, "batch");
        let down = joined.to_host().unwrap();
        for (at, part) in [
            (0, &whole.slice(5, 40)),
            (40, &none),
            (73, &whole.slice(45, 30)),
        ] {
            assert_same_batch(part, &down.slice(at, part.num_rows()), at);
        }
        let parts = [7, 70].map(|rows| sim.upload(&zero_column_batch(rows)).unwrap());
        let schema = zero_column_batch(0).schema();
        let empty = DeviceRecordBatch::concat(&schema, &parts, None).unwrap();
        assert_same_batch(
            &zero_column_batch(77),
            &empty.to_host().unwrap(),
            "no columns",
        );
        drop((joined, down, empty, parts));
        sim.assert_done();
    }
}

fn nullable(rows: usize) -> ArrayRef {
    let values = (0..rows as i64).map(|i| (i % 3 > 0).then_some(i));
    Arc::new(Int64Array::from_iter(values))
}

fn plain(rows: usize) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(0..rows as i64))
}

/// Three bytes each.
fn texts(rows: usize) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(
        (0..rows).map(|i| format!("{i:03}")),
    ))
}

/// The array with a null count that nobody knows.
fn uncounted(up: &DeviceArray) -> DeviceArray {
    let bits = up
        .buffer(0)
        .map(|bits| Validity::new(bits, 0, up.len()).unwrap());
    let data_type = up.data_type().clone();
    // SAFETY: the buffers and rows of the same array.
    unsafe { DeviceArray::from_parts(up.device(), data_type, up.len(), bits, &[up.buffer(1)], &[]) }
        .unwrap()
}

#[test]
fn nulls_that_nobody_has_counted() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let rows = [nullable(100), plain(20), nullable(64), nullable(9)];
        let up: Vec<_> = rows
            .iter()
            .map(|rows| sim.upload_array(rows).unwrap())
            .collect();
        let inputs = vec![
            (uncounted(&up[0]), rows[0].clone()),
            (up[1].clone(), rows[1].clone()),
            (up[2].clone(), rows[2].clone()),
            (uncounted(&up[3]).slice(1, 7).unwrap(), rows[3].slice(1, 7)),
        ];
        assert!(concats(&inputs, "uncounted"));
        drop((inputs, up));
        sim.assert_done();
    }
}

/// The field of the first array, with its metadata.
#[test]
fn the_first_field_stays() {
    let cpu = Devices::cpu();
    let metadata = HashMap::from([("k".to_owned(), "v".to_owned())]);
    let field = Arc::new(Field::new("first", DataType::Int64, true).with_metadata(metadata));
    let up = cpu.upload_array(&plain(3)).unwrap();
    let named = up.clone().with_field(field.clone()).unwrap();
    let whole = DeviceArray::concat(&[&named, &up]).unwrap();
    assert_eq!(whole.field(), Some(&field));

    // Nulls of the others make it nullable.
    let required = Arc::new(field.as_ref().clone().with_nullable(false));
    let named = up.clone().with_field(required.clone()).unwrap();
    let whole = DeviceArray::concat(&[&named, &up]).unwrap();
    assert_eq!(whole.field(), Some(&required));
    let nulls = cpu.upload_array(&nullable(3)).unwrap();
    let whole = DeviceArray::concat(&[&named, &nulls]).unwrap();
    assert_eq!(whole.field(), Some(&field));
}

/// Rows that take no memory may be too many for a bitmap.
#[test]
fn rows_without_memory() {
    let cpu = Devices::cpu();
    let fields = || vec![Field::new("n", DataType::Null, true)].into();
    let nulls = |rows| cpu.upload_array(&NullArray::new(rows)).unwrap();
    let many =
        DeviceArray::from_children(DataType::Struct(fields()), 1 << 62, &[nulls(1 << 62)], None)
            .unwrap();
    let bits = DeviceBuffer::from(Buffer::from_vec(vec![0u8]));
    let validity = Validity::new(bits, 0, 1).unwrap();
    let one =
        DeviceArray::from_children(DataType::Struct(fields()), 1, &[nulls(1)], Some(validity))
            .unwrap();
    let error = DeviceArray::concat(&[&many, &one]).unwrap_err();
    assert!(
        error.to_string().contains("do not fit in memory"),
        "{error}"
    );
}

/// What several arrays share is kept once, and what refers to it goes straight.
#[test]
fn shared_memory_is_kept_once() {
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
    let dictionary = crate::support::types::dictionary(DataType::Int16, DataType::Utf8);
    let dictionary = array(&dictionary, 40, Nulls::None, 3);
    for rows in [views, lists, dictionary, union] {
        let up = sim.upload_array(&rows).unwrap();
        let parts = [up.slice(0, 25).unwrap(), up.slice(25, 15).unwrap()];
        let (whole, stats) =
            TransferStats::scope(|| DeviceArray::concat(&[&parts[0], &parts[1]]).unwrap());
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
        let (twice, stats) = TransferStats::scope(|| DeviceArray::concat(&[&up, &other]).unwrap());
        assert!(stats.bytes_to_device > 0, "{name}");
        let down = twice.to_host().unwrap();
        assert_same(&rows, &down.slice(0, 40), name);
        assert_same(&rows, &down.slice(40, 40), name);
    }
    sim.assert_done();
}

/// Dictionaries of the same values are kept once where the host can read them, one after the other, as arrow-rs merges them. On a device
/// that would take a read, so only shared memory is.
#[test]
fn equal_dictionaries_are_kept_once() {
    use arrow_array::{DictionaryArray, Float64Array, types::Int8Type};
    let texts = |n: i32| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(
            (0..n).map(|i| format!("word {i}")),
        ))
    };
    let floats: ArrayRef = Arc::new(Float64Array::from(vec![Some(f64::NAN), None, Some(-0.0)]));
    let rows = |values: &ArrayRef| -> ArrayRef {
        let keys = arrow_array::Int8Array::from(vec![Some(0), None, Some(1), Some(2)]);
        // Other memory each time.
        let values =
            arrow_array::make_array(arrow_select::concat::concat(&[values]).unwrap().to_data());
        let values = arrow_select::concat::concat(&[
            &values.slice(0, 1),
            &values.slice(1, values.len() - 1),
        ])
        .unwrap();
        Arc::new(DictionaryArray::<Int8Type>::new(keys, values))
    };
    let sim = Sim::new(SimMode::Deferred);
    // More values than keys of 8 bits can name, if they were kept twice.
    for (values, other) in [
        (texts(100), texts(99)),
        (floats.clone(), floats.slice(0, 2)),
    ] {
        let (a, b, c) = (rows(&values), rows(&values), rows(&values));
        let cpu =
            [&a, &b, &c].map(|rows| (Devices::cpu().upload_array(rows).unwrap(), rows.clone()));
        assert!(concats(&cpu, "equal dictionaries"));
        let whole = DeviceArray::concat(&[&cpu[0].0, &cpu[1].0, &cpu[2].0]).unwrap();
        assert_eq!(whole.child(0).unwrap().len(), values.len());
        // Other ones are not.
        let keys = arrow_array::Int8Array::from(vec![Some(1), Some(0)]);
        let other: ArrayRef = Arc::new(DictionaryArray::<Int8Type>::new(keys, other));
        let other = Devices::cpu().upload_array(&other).unwrap();
        let whole = DeviceArray::concat(&[&cpu[0].0, &other]);
        assert!(whole.is_err() || whole.unwrap().child(0).unwrap().len() > values.len());
        let up = [&a, &b].map(|rows| sim.upload_array(rows).unwrap());
        let (whole, stats) = TransferStats::scope(|| DeviceArray::concat(&[&up[0], &up[1]]));
        assert!(stats.bytes_to_host < 100 && whole.is_err() == (values.len() > 64));
    }
    sim.assert_done();
}

/// Many dictionaries that have no memory to be told apart by, only runs that the host has made.
#[test]
fn many_dictionaries_of_runs() {
    use arrow_array::{DictionaryArray, Int32Array, RunArray, types::Int32Type};
    const N: i32 = 16_000;
    let cpu = Devices::cpu();
    let arrays: Vec<_> = (1..=N)
        .map(|i| {
            let runs = RunArray::<Int32Type>::try_new(&vec![i, 2 * N].into(), &NullArray::new(2));
            let values = Arc::new(runs.unwrap());
            let texts = DictionaryArray::<Int32Type>::new(Int32Array::from(vec![0]), values);
            cpu.upload_array(&texts).unwrap()
        })
        .collect();
    let start = std::time::Instant::now();
    let whole = DeviceArray::concat(&arrays.iter().collect::<Vec<_>>()).unwrap();
    // A comparison of each with all others takes minutes.
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
    assert_eq!(whole.len(), N as usize);
    assert_eq!(whole.child(0).unwrap().len(), 2 * (N as usize).pow(2));
}

/// Data buffers of views that start at one address, and of which one is longer.
#[test]
fn views_of_the_start_and_of_the_whole() {
    let whole = Buffer::from_iter((0..200).map(|i| b'a' + (i % 26) as u8));
    let array = |buffer: Buffer, offset: u32| -> ArrayRef {
        let text = &buffer[offset as usize..][..20];
        let view = arrow_data::ByteView::new(20, &text[..4])
            .with_buffer_index(0)
            .with_offset(offset);
        let views = vec![view.as_u128()].into();
        Arc::new(StringViewArray::try_new(views, vec![buffer], None).unwrap())
    };
    let rows = [
        array(whole.slice_with_length(0, 100), 0),
        array(whole.clone(), 150),
    ];
    for place in places() {
        let upload = |rows: &ArrayRef| (place.device.upload_array(rows).unwrap(), rows.clone());
        let inputs: Vec<_> = rows.iter().map(upload).collect();
        assert!(concats(&inputs, "a start and the whole"));
    }
}
