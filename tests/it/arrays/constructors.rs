//! Arrays and batches of columns, made by safe constructors.

use std::slice::from_ref;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, FixedSizeListArray, Int32Array, NullArray, StringArray, StructArray,
};
use arrow_device::device::sim::SimMode;
use arrow_device::{DeviceArray, Devices, SyncPolicy, TransferStats};
use arrow_schema::{DataType, Field, Fields};

use crate::arrays::{batch_of, counted, refused};
use crate::support::assert_same;
use crate::support::types::{self, required};
use crate::support_c::sim::{places, simulated};

#[test]
fn null_arrays() {
    for place in places() {
        let device = &place.device;
        let nulls = device.upload_array(&NullArray::new(5)).unwrap();
        assert_eq!(
            (nulls.null_count(), nulls.get_array_memory_size()),
            (Some(5), 0)
        );
        assert_same(&NullArray::new(5), &nulls.to_host().unwrap(), "null");
        let (c_array, schema) = nulls.export(SyncPolicy::Event).unwrap();
        assert_eq!(c_array.array().null_count(), 5);
        // SAFETY: both come from `export`.
        let again = unsafe { DeviceArray::import(c_array, &schema, &place.options) }.unwrap();
        assert_same(
            &NullArray::new(5),
            &again.compact().unwrap().to_host().unwrap(),
            "again",
        );
        let batch = batch_of(&[nulls.slice(1, 3).unwrap(), again.slice(2, 3).unwrap()]);
        assert_eq!(batch.column(1).unwrap().to_host().unwrap().len(), 3);
    }
}

/// Structs of slices with the nulls of another slice: what arrow-rs makes of the same.
#[test]
fn struct_arrays() {
    let a = Int32Array::from_iter((0..40).map(|i| (i % 3 != 0).then_some(i)));
    let b = StringArray::from_iter_values((0..40).map(|i| format!("text {i}")));
    let fields = Fields::from(vec![
        types::field("a", DataType::Int32),
        required("b", DataType::Utf8).as_ref().clone().into(),
    ]);
    for place in places() {
        let device = &place.device;
        let (ua, ub) = (
            device.upload_array(&a).unwrap(),
            device.upload_array(&b).unwrap(),
        );
        for (at, nulls_at) in [(0, 0), (3, 3), (5, 2), (9, 17)] {
            let rows = 20;
            let nulls = a.slice(nulls_at, rows).nulls().cloned();
            let columns: Vec<ArrayRef> =
                vec![Arc::new(a.slice(at, rows)), Arc::new(b.slice(at, rows))];
            let expected = StructArray::try_new(fields.clone(), columns, nulls).unwrap();
            let columns = [ua.slice(at, rows).unwrap(), ub.slice(at, rows).unwrap()];
            let validity = ua.slice(nulls_at, rows).unwrap().validity();
            let (made, stats) = counted(|| {
                DeviceArray::from_children(
                    DataType::Struct(fields.clone()),
                    rows,
                    &columns,
                    validity,
                )
                .unwrap()
            });
            assert_eq!(stats, TransferStats::default());
            assert_eq!(made.data_type(), expected.data_type());
            assert_same(
                &expected,
                &made.to_host().unwrap(),
                format!("{at} {nulls_at}"),
            );
            assert_same(
                &expected,
                &made.compact().unwrap().to_host().unwrap(),
                "compact",
            );
            let part = made.slice(2, 11).unwrap();
            assert_same(&expected.slice(2, 11), &part.to_host().unwrap(), "sliced");
            let (c_array, schema) = part.export(SyncPolicy::Event).unwrap();
            // SAFETY: both come from `export`.
            let again = unsafe { DeviceArray::import(c_array, &schema, &place.options) };
            assert_same(
                &expected.slice(2, 11),
                &again.unwrap().to_host().unwrap(),
                "again",
            );
        }
        let only_nulls =
            DeviceArray::from_children(DataType::Struct(Fields::empty()), 40, &[], ua.validity())
                .unwrap();
        assert_eq!(
            (only_nulls.len(), only_nulls.to_host().unwrap().null_count()),
            (40, 14)
        );
        drop((ua, ub, only_nulls));
        place.assert_clean();
    }
}

#[test]
fn refused_structs() {
    let device = Devices::cpu();
    let name = device.to_string();
    let column = device
        .upload_array(&Int32Array::from(vec![Some(1), None, Some(3)]))
        .unwrap();
    let fields = |nullable| Fields::from(vec![Field::new("x", DataType::Int32, nullable)]);
    let new = |fields, columns: &[_], validity| {
        DeviceArray::from_children(DataType::Struct(fields), 3, columns, validity)
    };
    let one = std::slice::from_ref(&column);
    refused(new(Fields::empty(), &[], None), &["try_new_with_rows"]);
    refused(
        DeviceArray::from_children(DataType::Int32, 3, &[], column.validity()),
        &["values of its own", "from_parts"],
    );
    refused(
        new(Fields::empty(), one, None),
        &["from_children", &name, "1 children, not 0 and 0"],
    );
    refused(
        new(fields(false), one, None),
        &["from_children", &name, "'x'", "1 nulls"],
    );
    // The struct is null where the column is.
    assert!(new(fields(false), one, column.validity()).is_ok());
    let two_nulls = device
        .upload_array(&Int32Array::from(vec![None, None, Some(3)]))
        .unwrap();
    let arrow = |nulls: &Int32Array| {
        let column: ArrayRef = Arc::new(Int32Array::from(vec![None, None, Some(3)]));
        StructArray::try_new(fields(false), vec![column], nulls.nulls().cloned())
    };
    assert!(arrow(&Int32Array::from(vec![Some(1), None, Some(3)])).is_err());
    let error = new(fields(false), &[two_nulls], column.validity());
    refused(error, &["'x'", "2 nulls", "nullable"]);
    let longs = Fields::from(vec![Field::new("x", DataType::Int64, true)]);
    refused(
        new(longs, one, None),
        &["from_children", &name, "'x'", "Int32", "Int64"],
    );
    let pair = Fields::from(vec![
        Field::new("x", DataType::Int32, true),
        Field::new("y", DataType::Int32, true),
    ]);
    let uneven = [column.clone(), column.slice(0, 2).unwrap()];
    refused(new(pair.clone(), &uneven, None), &["'y'", "2 rows, not 3"]);
    let validity = column.slice(0, 2).unwrap().validity();
    refused(
        new(fields(true), one, validity),
        &["from_children", "2 rows", "3 rows"],
    );
    if let Some(place) = simulated(SimMode::Async) {
        let far = column.to_device(&place.device).unwrap();
        let other = place.device.to_string();
        refused(
            new(pair, &[column.clone(), far.clone()], None),
            &["'y'", &other, "to_device"],
        );
        refused(
            new(fields(true), one, far.validity()),
            &["from_children", &name, &other],
        );
    }
}

#[test]
fn fixed_size_lists() {
    let numbers = Int32Array::from_iter((0..60).map(|i| (i % 7 != 0).then_some(i)));
    let validity_of = Int32Array::from_iter((0..30).map(|i| (i % 4 != 1).then_some(i)));
    let item = types::field("item", DataType::Int32);
    let list = |item: &Arc<Field>, size| DataType::FixedSizeList(item.clone(), size);
    for place in places() {
        let device = &place.device;
        let values = device.upload_array(&numbers).unwrap();
        let nulls = device.upload_array(&validity_of).unwrap();
        for (size, rows, at) in [(3, 10, 0), (3, 10, 5), (1, 20, 11), (4, 0, 9)] {
            let n = size as usize * rows;
            let expected = FixedSizeListArray::try_new(
                item.clone(),
                size,
                Arc::new(numbers.slice(at, n)),
                validity_of.slice(3, rows).nulls().cloned(),
            );
            let expected = expected.unwrap();
            let values = values.slice(at, n).unwrap();
            let validity = nulls.slice(3, rows).unwrap().validity();
            let new =
                || DeviceArray::from_children(list(&item, size), rows, from_ref(&values), validity);
            let (made, stats) = counted(|| new().unwrap());
            assert_eq!(stats, TransferStats::default());
            assert_same(
                &expected,
                &made.to_host().unwrap(),
                format!("{size} {rows} {at}"),
            );
            assert_same(
                &numbers.slice(at, n),
                &made.child(0).unwrap().to_host().unwrap(),
                "values",
            );
            if rows > 4 {
                let part = made.slice(2, 3).unwrap();
                assert_same(&expected.slice(2, 3), &part.to_host().unwrap(), "sliced");
                assert_same(
                    &expected.slice(2, 3),
                    &part.compact().unwrap().to_host().unwrap(),
                    "compact",
                );
            }
        }
        let none = values.slice(0, 0).unwrap();
        let made = DeviceArray::from_children(list(&item, 0), 7, from_ref(&none), None).unwrap();
        assert_eq!(made.to_host().unwrap().len(), 7);
        let name = device.to_string();
        let new = |field: &Arc<Field>, size, rows, validity| {
            DeviceArray::from_children(list(field, size), rows, from_ref(&values), validity)
        };
        assert!(new(&item, -1, 60, None).is_err());
        refused(
            new(&item, 4, 14, None),
            &["from_children", &name, "60 rows, not 56"],
        );
        refused(
            new(&item, i32::MAX, usize::MAX / 2, None),
            &["from_children", "too many rows"],
        );
        refused(
            new(&types::field("item", DataType::Int64), 6, 10, None),
            &["item", "Int64"],
        );
        refused(
            new(&required("item", DataType::Int32), 6, 10, None),
            &["9 nulls", "nullable"],
        );
        refused(new(&item, 6, 10, nulls.validity()), &["30 rows", "10 rows"]);
        drop((values, nulls, none, made));
        place.assert_clean();
    }
}
