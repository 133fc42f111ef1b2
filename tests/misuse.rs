//! What does not fit is refused, with nothing read or written.

mod simkit;
mod support;

use std::sync::Arc;

use arrow_array::Array;
use arrow_buffer::{Buffer, NullBuffer};
use arrow_device::device::sim::SimMode;
use arrow_device::{
    DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, Error, ExportOptions, ImportOptions,
    NullCounts, SyncPolicy,
};
use arrow_schema::{DataType, Field, Schema, UnionMode};
use simkit::*;
use support::*;

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
    let made = DeviceArray::from_values(DataType::Int32, 9, values, Some(mask), None);
    assert!(is_argument(made));
    // Arrays without buffers have a device too.
    let null = a.upload_array(&arrow_array::NullArray::new(9)).unwrap();
    let fields = vec![field("a"), Field::new("n", DataType::Null, true)];
    let mixed = DeviceRecordBatch::try_new(Arc::new(Schema::new(fields)), &[on_b.clone(), null]);
    assert!(is_argument(mixed));
    assert!(matches!(
        on_a.buffer(1).unwrap().into_host(),
        Err(Error::NotSupported { .. })
    ));
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
    assert!(is_argument(numbers.sizes_on::<i32>(&queue)));
    assert!(is_argument(numbers.type_ids_on(&queue)));
    for (name, data_type) in all_types() {
        for made in variants(&array(&data_type, 20, Nulls::Some, 1), 1) {
            if made.rows.is_empty() {
                continue;
            }
            let array = cpu.upload_data(made.data()).unwrap();
            let array = array.slice(3, 11).unwrap();
            let lengths = [
                array.offsets_on::<i32>(&queue).ok().map(|s| s.len()),
                array.offsets_on::<i64>(&queue).ok().map(|s| s.len()),
                array.sizes_on::<i32>(&queue).ok().map(|s| s.len()),
                array.sizes_on::<i64>(&queue).ok().map(|s| s.len()),
            ];
            use DataType::*;
            let expected = match &data_type {
                Utf8 | Binary | List(_) | Map(..) => [Some(12), None, None, None],
                LargeUtf8 | LargeBinary | LargeList(_) => [None, Some(12), None, None],
                ListView(_) => [Some(11), None, Some(11), None],
                LargeListView(_) => [None, Some(11), None, Some(11)],
                Union(_, UnionMode::Dense) => [Some(11), None, None, None],
                _ => [None; 4],
            };
            assert_eq!(lengths, expected, "{name}");
            assert!(is_argument(array.offsets_on::<u32>(&queue)), "{name}");
            assert!(is_argument(array.offsets_on::<f32>(&queue)), "{name}");
            let ids = array.type_ids_on(&queue).ok().map(|s| s.len());
            assert_eq!(ids, matches!(data_type, Union(..)).then_some(11), "{name}");
            assert!(is_argument(array.slice(1, 11)));
            assert!(is_argument(array.slice(usize::MAX, 2)));
            assert!(is_argument(array.slice(0, usize::MAX)));
        }
    }
    let odd = Buffer::from_vec(vec![0u8; 41]).slice(1);
    let odd = DeviceArray::from_values(DataType::Int64, 5, odd.into(), None, None).unwrap();
    assert!(is_argument(odd.values_on::<i64>(&queue)));
    // The host view mends it, and counts the copy.
    let before = cpu.stats();
    assert_eq!(odd.to_host().unwrap().len(), 5);
    assert!(cpu.stats().since(&before).host_copied_bytes >= 40);
    // No rows need no offset.
    // SAFETY: there are no values.
    let empty = unsafe {
        let none = DeviceBuffer::from(Buffer::default());
        DeviceArray::from_parts(DataType::Utf8, 0, None, &[None, Some(none), None], &[])
    };
    let empty = empty.unwrap();
    assert_eq!(empty.offsets_on::<i32>(&queue).unwrap().len(), 0);
    assert_eq!(empty.to_host().unwrap().len(), 0);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let buffer = |bytes: usize| DeviceBuffer::from(Buffer::from_vec(vec![0u8; bytes]));
    let values = |data_type, rows, bytes, mask: Option<usize>, nulls| {
        DeviceArray::from_values(data_type, rows, buffer(bytes), mask.map(buffer), nulls)
    };
    assert!(values(DataType::Int32, 4, 16, None, None).is_ok());
    for (rows, bytes, mask, nulls) in [
        (5, 16, None, None),
        (usize::MAX, 16, None, None),
        (usize::MAX / 4 + 2, 16, None, None),
        (isize::MAX as usize, 16, None, None),
        (4, 16, Some(0), None),
        (9, 36, Some(1), None),
        (4, 16, None, Some(1)),
        (4, 16, Some(1), Some(5)),
        (4, 16, Some(1), Some(usize::MAX)),
    ] {
        let made = values(DataType::Int32, rows, bytes, mask, nulls);
        assert!(
            is_argument(made),
            "{rows} rows, {bytes} bytes, {mask:?}, {nulls:?}"
        );
    }
    let negative = values(DataType::FixedSizeBinary(-1), 1, 16, None, None);
    assert!(negative.is_err());
    assert!(is_argument(values(
        DataType::FixedSizeBinary(0),
        usize::MAX,
        0,
        None,
        None
    )));
    assert!(values(DataType::FixedSizeBinary(0), 1 << 40, 0, None, None).is_ok());
    for other in [
        DataType::Utf8,
        DataType::Null,
        DataType::Utf8View,
        support::types::list(DataType::Int8),
    ] {
        assert!(is_argument(values(other, 0, 0, None, None)));
    }
    let child = Devices::cpu().upload_array(&ints(9)).unwrap();
    // SAFETY: all are refused, or hold nothing that could be wrong.
    let parts = |data_type, rows, buffers: &[Option<DeviceBuffer>], children: &[DeviceArray]| unsafe {
        DeviceArray::from_parts(data_type, rows, None, buffers, children)
    };
    let one = std::slice::from_ref(&child);
    let fixed = |n| support::types::fixed_list(DataType::Int32, n);
    let row = support::types::structure(vec![("a", DataType::Int32)]);
    assert!(parts(fixed(3), 3, &[None], one).is_ok());
    assert!(is_argument(parts(fixed(3), 4, &[None], one)));
    assert!(is_argument(parts(fixed(3), usize::MAX / 2, &[None], one)));
    assert!(parts(row.clone(), 9, &[None], one).is_ok());
    assert!(is_argument(parts(row.clone(), 10, &[None], one)));
    assert!(is_argument(parts(row.clone(), 9, &[], one)));
    assert!(is_argument(parts(row.clone(), 9, &[None], &[])));
    assert!(is_argument(parts(row, 9, &[None, None], one)));
    assert!(is_argument(parts(
        fixed(3),
        3,
        &[None],
        &[child.child(0).unwrap_or(one[0].clone()), child.clone()]
    )));
    let wrong = support::types::structure(vec![("a", DataType::Int64)]);
    assert!(is_argument(parts(wrong, 9, &[None], one)));
    assert!(is_argument(parts(DataType::Null, 9, &[], &[])));

    let cpu = Devices::cpu();
    let schema = |t, nullable| Arc::new(Schema::new(vec![Field::new("a", t, nullable)]));
    assert!(DeviceRecordBatch::try_new(schema(DataType::Int32, true), one).is_ok());
    assert!(is_argument(DeviceRecordBatch::try_new(
        schema(DataType::Int64, true),
        one
    )));
    assert!(is_argument(DeviceRecordBatch::try_new(
        schema(DataType::Int32, false),
        one
    )));
    assert!(is_argument(DeviceRecordBatch::try_new(
        schema(DataType::Int32, true),
        &[]
    )));
    assert!(is_argument(DeviceRecordBatch::try_new(
        schema(DataType::Int32, true),
        &[child.clone(), child.clone()]
    )));
    let two = Schema::new(vec![
        Field::new("a", DataType::Int32, true),
        Field::new("b", DataType::Int32, true),
    ]);
    let uneven = [child.clone(), child.slice(0, 8).unwrap()];
    assert!(is_argument(DeviceRecordBatch::try_new(
        Arc::new(two.clone()),
        &uneven
    )));
    assert!(is_argument(DeviceRecordBatch::try_new_empty(&cpu, two, 4)));
    assert!(is_argument(DeviceRecordBatch::try_new_empty(
        &cpu,
        Schema::empty(),
        usize::MAX
    )));
    assert!(is_argument(child.clone().with_field(Arc::new(Field::new(
        "x",
        DataType::Int8,
        true
    )))));
    assert!(child.buffer(2).is_none() && child.child(0).is_none() && child.dictionary().is_none());
    let bytes = buffer(10);
    assert!(is_argument(bytes.slice(4, 7)));
    assert!(is_argument(bytes.slice(usize::MAX, 2)));
    assert_eq!(bytes.slice(4, 6).unwrap().slice(6, 0).unwrap().len(), 0);
}

#[test]
fn claimed_null_counts_are_not_believed() {
    let nulls = NullBuffer::from(vec![true, false, true, false, true]);
    let values = || DeviceBuffer::from(Buffer::from_vec(vec![1i32, 2, 3, 4, 5]));
    for claim in [None, Some(1), Some(2), Some(5)] {
        let mask = Some(DeviceBuffer::from(nulls.buffer().clone()));
        let array = DeviceArray::from_values(DataType::Int32, 5, values(), mask, claim).unwrap();
        let down = array.to_host().unwrap();
        assert_eq!(down.null_count(), 2, "{claim:?}");
        let data = array.to_host_data().unwrap();
        assert_eq!(data.null_count(), 2, "{claim:?}");
        // The claim goes along.
        let fields = vec![Field::new("c", DataType::Int32, true)];
        let columns = [array.clone()];
        let batch = DeviceRecordBatch::try_new(Arc::new(Schema::new(fields)), &columns).unwrap();
        for batch in [batch.clone(), batch.compact().unwrap()] {
            let down = batch.to_host().unwrap();
            assert_eq!(down.column(0).null_count(), 2, "{claim:?}");
        }
        if !cfg!(miri) {
            let sim = Sim::new(SimMode::Async);
            let up = array.to_device(&sim).unwrap();
            assert_eq!(up.to_host().unwrap().null_count(), 2, "{claim:?}");
            drop(up);
            sim.assert_done();
        }
        assert_eq!(
            array.slice(1, 3).unwrap().to_host().unwrap().null_count(),
            2
        );
    }
}

/// Exports count what was only claimed: who imports them relies on the number.
#[test]
fn claimed_null_counts_are_not_exported() {
    let mask = || Some(DeviceBuffer::from(Buffer::from_vec(vec![0b0101u8])));
    let values = || DeviceBuffer::from(Buffer::from_vec(vec![1i32, 2, 3, 4]));
    let claimed = DeviceArray::from_values(DataType::Int32, 4, values(), mask(), Some(1)).unwrap();
    let fields = vec![Field::new("a", DataType::Int32, true)];
    let batch = DeviceRecordBatch::try_new(
        Arc::new(Schema::new(fields)),
        std::slice::from_ref(&claimed),
    );
    let exact = batch.unwrap().export(SyncPolicy::Event).unwrap();
    // SAFETY: both come from `export`.
    let again = unsafe { DeviceRecordBatch::import(exact.0, &exact.1) }.unwrap();
    assert_eq!(again.column(0).unwrap().null_count(), Some(2));
    assert_eq!(again.to_host().unwrap().column(0).null_count(), 2);
    let claimed = DeviceArray::from_values(DataType::Int32, 4, values(), mask(), Some(1)).unwrap();
    let options = ExportOptions::new(SyncPolicy::Event).with_null_counts(NullCounts::AllowUnknown);
    let exported = claimed.export_array(&options).unwrap();
    // SAFETY: the type is what it was made of.
    let again = unsafe {
        DeviceArray::import_as(
            exported,
            Arc::new(Field::new("", DataType::Int32, true)),
            &ImportOptions::default(),
        )
    };
    assert_eq!(again.unwrap().null_count(), None);

    // A claim does not become a count when others are counted.
    let child = DeviceArray::from_values(DataType::Int32, 4, values(), mask(), None).unwrap();
    let fields = vec![Field::new("a", DataType::Int32, true)];
    let parent = DataType::Struct(fields.into());
    // SAFETY: the values are integers.
    let parent = unsafe { DeviceArray::from_parts(parent, 4, Some(1), &[mask()], &[child]) };
    let parent = parent.unwrap();
    assert_eq!(parent.to_host().unwrap().null_count(), 2);
    parent.resolve_null_counts().unwrap();
    assert_eq!(parent.to_host().unwrap().null_count(), 2);
}
