//! What does not fit is refused, with nothing read or written.

use std::sync::Arc;

use crate::simkit::*;
use crate::support::*;
use crate::support_c::export::upload_data;
use arrow_array::Array;
use arrow_buffer::Buffer;
use arrow_device::device::sim::SimMode;
use arrow_device::{
    DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, Error, SyncPolicy, Validity,
};
use arrow_schema::{DataType, Field, Schema, UnionMode};

fn is_argument<T>(result: arrow_device::Result<T>) -> bool {
    matches!(result, Err(Error::InvalidArgument(_)))
}

#[test]
fn queues_and_devices_do_not_mix() {
    if cfg!(miri) {
        return;
    }
    let (a, b) = (Sim::new(SimMode::Deferred), Sim::new(SimMode::Deferred));
    let cpu = Devices::cpu();
    let (on_a, on_b) = (
        a.upload_array(&ints(9)).unwrap(),
        b.upload_array(&ints(9)).unwrap(),
    );
    for queue in [b.default_queue(), cpu.default_queue()] {
        assert!(is_argument(on_a.values_on::<i32>(&queue)));
        assert!(is_argument(on_a.validity_on(&queue)));
        assert!(is_argument(on_a.buffer(1).unwrap().on(&queue)));
        assert!(is_argument(a.upload_on(&wide_batch(3, 3), &queue)));
    }
    let field = |name| Field::new(name, DataType::Int32, true);
    let schema = Arc::new(Schema::new(vec![field("a"), field("b")]));
    let mixed = DeviceRecordBatch::try_new(schema, &[on_a.clone(), on_b.clone()]);
    assert!(is_argument(mixed));
    let buffers = [on_a.buffer(1).unwrap(), on_b.buffer(0).unwrap()];
    let [values, mask] = buffers;
    let validity = Some(Validity::new(mask, 0, 9).unwrap());
    let made = DeviceArray::from_values(DataType::Int32, 9, values, validity);
    assert!(is_argument(made));
    // Arrays without buffers have a device too.
    let null = a.upload_array(&arrow_array::NullArray::new(9)).unwrap();
    let fields = vec![field("a"), Field::new("n", DataType::Null, true)];
    let mixed = DeviceRecordBatch::try_new(Arc::new(Schema::new(fields)), &[on_b.clone(), null]);
    assert!(is_argument(mixed));
    // Waiting for a stranger's event is a wait of this thread.
    let event = a.default_queue().record().unwrap().unwrap();
    let before = a.stats();
    b.default_queue().wait(&event).unwrap();
    assert_eq!(a.stats().since(&before).host_waits, 1);
    assert!(event.is_complete().unwrap());
    drop((on_a, on_b, event));
    a.assert_done();
    b.assert_done();
}

#[test]
fn typed_access_is_checked() {
    let cpu = Devices::cpu();
    let queue = cpu.default_queue();
    let numbers = cpu.upload_array(&ints(9)).unwrap();
    assert!(numbers.values_on::<i32>(&queue).is_ok());
    assert!(is_argument(numbers.values_on::<u32>(&queue)));
    assert!(is_argument(numbers.values_on::<f32>(&queue)));
    assert!(is_argument(numbers.values_on::<i64>(&queue)));
    assert!(is_argument(numbers.booleans_on(&queue)));
    assert!(is_argument(numbers.offsets_on::<i32>(&queue)));
    for (name, data_type) in all_types() {
        for made in variants(&array(&data_type, 20, Nulls::Some, 1), 1) {
            if made.rows.is_empty() {
                continue;
            }
            let array = upload_data(&cpu, &made.data());
            let array = array.slice(3, 11).unwrap();
            let lengths = [
                array.offsets_on::<i32>(&queue).ok().map(|s| s.len()),
                array.offsets_on::<i64>(&queue).ok().map(|s| s.len()),
            ];
            use DataType::*;
            let expected = match &data_type {
                Utf8 | Binary | List(_) | Map(..) => [Some(12), None],
                LargeUtf8 | LargeBinary | LargeList(_) => [None, Some(12)],
                ListView(_) | Union(_, UnionMode::Dense) => [Some(11), None],
                LargeListView(_) => [None, Some(11)],
                _ => [None; 2],
            };
            assert_eq!(lengths, expected, "{name}");
            assert!(is_argument(array.offsets_on::<u32>(&queue)), "{name}");
            assert!(is_argument(array.offsets_on::<f32>(&queue)), "{name}");
            assert!(is_argument(array.slice(1, 11)));
            assert!(is_argument(array.slice(usize::MAX, 2)));
            assert!(is_argument(array.slice(0, usize::MAX)));
            // Bytes of type ids, and of sizes, from the first row of the buffer on.
            let (buffer, width) = match &data_type {
                Union(..) => (0, 1),
                ListView(_) => (2, 4),
                _ => continue,
            };
            let rows = (array.offset() + 11) * width;
            let buffer = array.buffer(buffer).unwrap();
            assert!(buffer.on(&queue).unwrap().len() >= rows, "{name}");
        }
    }
    let odd = Buffer::from_vec(vec![0u8; 41]).slice(1);
    let odd = DeviceArray::from_values(DataType::Int64, 5, odd.into(), None).unwrap();
    assert!(is_argument(odd.values_on::<i64>(&queue)));
    // The host view mends it, and counts the copy.
    let before = cpu.stats();
    assert_eq!(odd.to_host().unwrap().len(), 5);
    assert!(cpu.stats().since(&before).host_copied_bytes >= 40);
    // No rows need no offset.
    // SAFETY: the array has no rows, so it needs no values.
    let empty = unsafe {
        let none = DeviceBuffer::from(Buffer::default());
        DeviceArray::from_parts(&cpu, DataType::Utf8, 0, None, &[Some(none), None], &[])
    };
    let empty = empty.unwrap();
    assert_eq!(empty.offsets_on::<i32>(&queue).unwrap().len(), 0);
    assert_eq!(empty.to_host().unwrap().len(), 0);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let buffer = |bytes: usize| DeviceBuffer::from(Buffer::from_vec(vec![0u8; bytes]));
    // `mask`: bytes, first bit and rows.
    let values = |data_type, rows, bytes, mask: Option<(usize, usize, usize)>| {
        let validity = mask.map(|(bytes, bit, rows)| Validity::new(buffer(bytes), bit, rows));
        DeviceArray::from_values(data_type, rows, buffer(bytes), validity.transpose()?)
    };
    assert!(values(DataType::Int32, 4, 16, None).is_ok());
    assert!(values(DataType::Int32, 4, 16, Some((1, 4, 4))).is_ok());
    for (rows, bytes, mask) in [
        (5, 16, None),
        (usize::MAX, 16, None),
        (usize::MAX / 4 + 2, 16, None),
        (isize::MAX as usize, 16, None),
        (4, 16, Some((0, 0, 4))),
        (9, 36, Some((1, 0, 9))),
        (4, 16, Some((1, 5, 4))),
        (4, 16, Some((1, usize::MAX, 4))),
        (4, 16, Some((1, 8, usize::MAX - 8))),
        // The validity of other rows.
        (4, 16, Some((1, 0, 3))),
        (4, 16, Some((1, 0, 5))),
        (4, 16, Some((1, 0, 0))),
    ] {
        let made = values(DataType::Int32, rows, bytes, mask);
        assert!(is_argument(made), "{rows} rows, {bytes} bytes, {mask:?}");
    }
    let negative = values(DataType::FixedSizeBinary(-1), 1, 16, None);
    assert!(negative.is_err());
    let zero = DataType::FixedSizeBinary(0);
    assert!(is_argument(values(zero.clone(), usize::MAX, 0, None)));
    assert!(values(zero, 1 << 40, 0, None).is_ok());
    // SAFETY: the parts are refused, so no array claims to have them.
    let parts = |nulls| unsafe {
        let validity = Validity::new(buffer(1), 0, 4)?.with_null_count(nulls);
        let buffers = [Some(buffer(16))];
        DeviceArray::from_parts(
            &Devices::cpu(),
            DataType::Int32,
            4,
            Some(validity),
            &buffers,
            &[],
        )
    };
    for nulls in [5, usize::MAX] {
        assert!(is_argument(parts(nulls)), "{nulls} nulls");
    }
    for other in [
        DataType::Utf8,
        DataType::Null,
        DataType::Utf8View,
        crate::support::types::list(DataType::Int8),
    ] {
        assert!(is_argument(values(other, 0, 0, None)));
    }
    let child = Devices::cpu().upload_array(&ints(9)).unwrap();
    // SAFETY: the parts are refused, or have no values that could be invalid.
    let parts = |data_type, rows, buffers: &[Option<DeviceBuffer>], children: &[DeviceArray]| unsafe {
        DeviceArray::from_parts(child.device(), data_type, rows, None, buffers, children)
    };
    let one = std::slice::from_ref(&child);
    let two = [child.clone(), child.clone()];
    let fixed = |n| crate::support::types::fixed_list(DataType::Int32, n);
    let row = |t| crate::support::types::structure(vec![("a", t)]);
    assert!(parts(fixed(3), 3, &[], one).is_ok());
    assert!(parts(row(DataType::Int32), 9, &[], one).is_ok());
    assert!(parts(DataType::Null, 9, &[], &[]).is_ok());
    let refused = [
        parts(fixed(3), 4, &[], one),
        parts(fixed(3), usize::MAX / 2, &[], one),
        parts(fixed(3), 3, &[], &two),
        parts(row(DataType::Int32), 10, &[], one),
        parts(row(DataType::Int32), 9, &[], &[]),
        parts(row(DataType::Int32), 9, &[None], one),
        parts(row(DataType::Int64), 9, &[], one),
        child
            .clone()
            .with_field(Arc::new(Field::new("x", DataType::Int8, true))),
    ];
    for (i, refused) in refused.into_iter().enumerate() {
        assert!(is_argument(refused), "{i}");
    }
    assert!(child.buffer(2).is_none() && child.child(0).is_none());

    let cpu = Devices::cpu();
    let schema = |t, nullable| Arc::new(Schema::new(vec![Field::new("a", t, nullable)]));
    let int = || schema(DataType::Int32, true);
    let pair = ["a", "b"].map(|name| Field::new(name, DataType::Int32, true));
    let pair = Arc::new(Schema::new(pair.to_vec()));
    let empty = Arc::new(Schema::empty());
    let (new, with_rows) = (
        DeviceRecordBatch::try_new,
        DeviceRecordBatch::try_new_with_rows,
    );
    assert!(new(int(), one).is_ok() && with_rows(&cpu, int(), one, 9).is_ok());
    assert_eq!(
        with_rows(&cpu, empty.clone(), &[], 4).unwrap().num_rows(),
        4
    );
    let refused = [
        new(schema(DataType::Int64, true), one),
        new(schema(DataType::Int32, false), one),
        new(int(), &[]),
        new(int(), &two),
        new(pair.clone(), &[child.clone(), child.slice(0, 8).unwrap()]),
        with_rows(&cpu, pair, &[], 4),
        with_rows(&cpu, empty.clone(), one, 9),
        with_rows(&cpu, empty, &[], usize::MAX),
        with_rows(&cpu, int(), one, 8),
    ];
    for (i, refused) in refused.into_iter().enumerate() {
        assert!(is_argument(refused), "{i}");
    }
    let bytes = buffer(10);
    assert!(is_argument(bytes.slice(4, 7)));
    assert!(is_argument(bytes.slice(usize::MAX, 2)));
    assert_eq!(bytes.slice(4, 6).unwrap().slice(6, 0).unwrap().len(), 0);
}

/// 60 rows, of which only number 7 is null, by a bitmap whose nulls nobody has counted.
fn one_null() -> DeviceArray {
    let mut bits = vec![0xff_u8; 8];
    bits[0] = 0x7f;
    let bits = DeviceBuffer::from(Buffer::from_vec(bits));
    let values = DeviceBuffer::from(Buffer::from_vec((0..60).collect::<Vec<i32>>()));
    let validity = Some(Validity::new(bits, 0, 60).unwrap());
    DeviceArray::from_values(DataType::Int32, 60, values, validity).unwrap()
}

/// What safe code makes has the null count that its bitmap has, whoever asks, and in whatever order.
#[test]
fn null_counts_are_those_of_the_bitmap() {
    let check = |array: &DeviceArray, context: &str| {
        assert!(matches!(array.null_count(), None | Some(1)), "{context}");
        let down = array.to_host().unwrap();
        assert_eq!(down.null_count(), 1, "{context}");
        assert_eq!(array.to_host().unwrap().null_count(), 1, "{context}");
        let bits = down.nulls().unwrap().inner();
        assert_eq!(bits.count_set_bits(), down.len() - 1, "{context}");
    };
    for counted_by_a_clone in [false, true] {
        let a = one_null();
        assert_eq!(a.null_count(), None);
        if counted_by_a_clone {
            let b = a.clone();
            assert_eq!(b.resolve_null_counts().unwrap(), 1);
            // Both are all of the same rows.
            assert_eq!(a.null_count(), Some(1));
        }
        check(&a, "as it is");
        check(&a.compact().unwrap(), "compact");
        check(
            &a.slice(1, 59)
                .unwrap()
                .slice(0, 59)
                .unwrap()
                .compact()
                .unwrap(),
            "sliced",
        );
        let values = DeviceBuffer::from(Buffer::from_vec((0..60).collect::<Vec<i64>>()));
        let same = a.with_values(DataType::Int64, values).unwrap();
        assert_eq!(same.null_count(), a.null_count());
        check(&same, "the nulls of another");
        let fields = vec![Field::new("c", DataType::Int32, true)];
        let columns = [a.clone()];
        let batch = DeviceRecordBatch::try_new(Arc::new(Schema::new(fields)), &columns).unwrap();
        check(&batch.column(0).unwrap(), "in a batch");
        check(
            &batch.compact().unwrap().column(0).unwrap(),
            "in a compact batch",
        );
        let exact = batch.export(SyncPolicy::Event).unwrap();
        // SAFETY: the struct comes from an export of this crate, whose values are valid, and the
        // type is the exported one.
        let again = unsafe { DeviceRecordBatch::import(exact.0, &exact.1, None) }.unwrap();
        assert_eq!(again.column(0).unwrap().null_count(), Some(1));
        check(&again.column(0).unwrap(), "exported");
        if !cfg!(miri) {
            let sim = Sim::new(SimMode::Async);
            let up = a.to_device(&sim).unwrap();
            check(&up, "on a device");
            check(&up.compact().unwrap(), "compact on a device");
            drop(up);
            sim.assert_done();
        }
    }
}

/// A slice has its own number of nulls, known or not, and what is counted of it says nothing of the whole.
#[test]
fn null_counts_of_slices() {
    let whole = one_null();
    let (before, with) = (whole.slice(10, 20).unwrap(), whole.slice(5, 10).unwrap());
    assert_eq!((before.null_count(), with.null_count()), (None, None));
    assert_eq!(before.resolve_null_counts().unwrap(), 0);
    assert_eq!(with.resolve_null_counts().unwrap(), 1);
    assert_eq!((before.null_count(), with.null_count()), (Some(0), Some(1)));
    assert_eq!(whole.null_count(), None);
    assert_eq!(whole.slice(10, 20).unwrap().null_count(), None);
    // The whole's says nothing of its slices.
    assert_eq!(whole.resolve_null_counts().unwrap(), 1);
    assert_eq!(whole.slice(10, 20).unwrap().null_count(), None);
    assert_eq!(with.slice(2, 1).unwrap().null_count(), None);
    let only = with.slice(2, 1).unwrap();
    assert_eq!(only.resolve_null_counts().unwrap(), 1);
    // Where all rows are null, or none, those of a slice are.
    assert_eq!(only.slice(0, 1).unwrap().null_count(), Some(1));
    assert_eq!(before.slice(3, 4).unwrap().null_count(), Some(0));
    assert_eq!(whole.slice(0, 59).unwrap().null_count(), None);
    let again = only
        .with_field(Arc::new(Field::new("f", DataType::Int32, true)))
        .unwrap();
    assert_eq!(again.null_count(), Some(1));
}

#[cfg(not(feature = "rocm"))]
#[test]
fn a_device_whose_feature_is_off() {
    let error = Devices::open("rocm:77").unwrap_err().to_string();
    let way_out = "arrow-device was built without ROCm; enable its feature `rocm`";
    assert!(error.contains(way_out), "{error}");
}
