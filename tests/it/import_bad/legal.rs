//! Batches, and oddities that are legal.

use super::*;
use crate::support::types::structure;
use crate::support::{all_types, assert_same, variants};
use crate::support_c::sim::places;
use arrow_array::{Array, StringArray, make_array};
use arrow_device::Validation;
use std::ptr;

/// Out and in again.
fn again(array: &DeviceArray, options: &arrow_device::ImportOptions) -> DeviceArray {
    let field = Arc::new(arrow_schema::Field::new(
        "",
        array.data_type().clone(),
        true,
    ));
    let export = arrow_device::ExportOptions::new(arrow_device::SyncPolicy::Event);
    let exported = array.export_array(&export).unwrap();
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
    unsafe { DeviceArray::import_as(exported, field, options) }.unwrap()
}

/// Batches: a struct whose rows cannot be null.
#[test]
fn batches() {
    let data_type = structure(vec![("a", DataType::Int32), ("b", DataType::Utf8)]);
    for place in places() {
        let data = array(&data_type, 100, Nulls::Some, 3).to_data();
        assert!(data.null_count() > 0);
        for null_count in [-1, data.null_count() as i64] {
            let mut foreign = Foreign::new(&data, &place.device);
            foreign.root().null_count = null_count;
            let error = foreign
                .import_batch(&place.options)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("array.null_count: the rows of a record batch"),
                "{error}"
            );
            foreign.assert_released("nulls");
        }
        // A struct array may have them.
        let mut foreign = Foreign::new(&data, &place.device);
        let imported = foreign.import(&place.options).unwrap();
        assert_same(&make_array(data), &imported.to_host().unwrap(), "struct");
        drop(imported);
        // 3.3.4: a mask without nulls, counted or not, and a root that starts at row 13.
        let plain = array(&data_type, 100, Nulls::None, 3);
        for null_count in [-1, 0] {
            let masked = plain.to_data().into_builder();
            let set = arrow_buffer::NullBuffer::new_valid(100);
            let masked = masked.nulls(Some(set)).build().unwrap();
            let mut foreign = Foreign::new(&masked, &place.device);
            let mask = foreign_mask(&mut foreign, &place);
            foreign.set_buffer(&[], 0, mask);
            let root = foreign.root();
            (root.null_count, root.offset, root.length) = (null_count, 13, 80);
            let batch = foreign.import_batch(&place.options).unwrap();
            assert_eq!(
                (batch.num_rows(), batch.column(0).unwrap().offset()),
                (80, 13)
            );
            let back = batch.to_host().unwrap();
            let expected = plain.slice(13, 80);
            let expected = arrow_array::cast::AsArray::as_struct(&expected).columns();
            for (expected, column) in expected.iter().zip(back.columns()) {
                assert_same(expected, column, format!("a column on {place}"));
            }
            drop((batch, back));
            foreign.assert_released("offset");
        }
        // Not a struct.
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        let schema = arrow_schema::ffi::FFI_ArrowSchema::try_from(&*foreign.field()).unwrap();
        // SAFETY: what is wrong with the struct is what an import checks without relying on it.
        let result = unsafe {
            arrow_device::DeviceRecordBatch::import_with(foreign.take(), &schema, &place.options)
        };
        result.unwrap_err();
        foreign.assert_released("no struct");
        place.assert_clean();
    }
}

/// A mask of ones for 100 rows.
fn foreign_mask(foreign: &mut Foreign, place: &Place) -> *const std::ffi::c_void {
    let ones = arrow_array::UInt8Array::from(vec![0xFF; 16]);
    let ones = place.device.upload_array(&ones).unwrap().buffer(1).unwrap();
    let address = ones.address().as_ptr();
    foreign.keep(ones);
    address
}

/// Legal oddities.
#[test]
fn oddities_are_accepted() {
    use DataType::*;
    for place in places() {
        // Null pointers where there is nothing to point to (3.3.5), out and in again.
        let empty_texts: ArrayRef = Arc::new(StringArray::from(vec!["", "", ""]));
        let mut foreign = Foreign::new(&empty_texts.to_data(), &place.device);
        foreign.set_buffer(&[], 2, ptr::null());
        let imported = foreign.import(&place.options).unwrap();
        assert_same(&empty_texts, &imported.to_host().unwrap(), "empty texts");
        let again = again(&imported, &place.options);
        assert_same(&empty_texts, &again.to_host().unwrap(), "empty texts again");
        drop(again);
        drop(imported);
        foreign.assert_released("empty texts");
        // All types without rows and without any buffer.
        for (name, data_type) in all_types() {
            let empty = array(&data_type, 0, Nulls::None, 1);
            let mut foreign = Foreign::new(&empty.to_data(), &place.device);
            let n = foreign.root().n_buffers as usize;
            // Variadic buffers have lengths of their own.
            let variadic = matches!(data_type, Utf8View | BinaryView);
            for i in 0..if variadic { 2 } else { n } {
                foreign.set_buffer(&[], i, ptr::null());
            }
            let context = format!("{name} without rows on {place}");
            let imported = foreign.import(&place.options).expect(&context);
            assert_same(&empty, &imported.to_host().expect(&context), &context);
            drop(imported);
            foreign.assert_released(&context);
        }
        // Null counts of null arrays.
        for null_count in [-1, 0, 3] {
            let nulls = array(&Null, 3, Nulls::None, 1);
            let mut foreign = Foreign::new(&nulls.to_data(), &place.device);
            foreign.root().null_count = null_count;
            let imported = foreign.import(&place.options).unwrap();
            assert_eq!(imported.null_count(), Some(3));
            assert_same(&nulls, &imported.to_host().unwrap(), "nulls");
        }
        // Nobody counted: without a mask there are none, with one it is unknown until asked for.
        let mut foreign = Foreign::new(&Int32Array::from(vec![1, 2]).to_data(), &place.device);
        foreign.root().null_count = -1;
        assert_eq!(
            foreign.import(&place.options).unwrap().null_count(),
            Some(0)
        );
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        foreign.root().null_count = -1;
        let imported = foreign.import(&place.options).unwrap();
        assert_eq!(imported.null_count(), None);
        assert_same(&ints(), &imported.to_host().unwrap(), "uncounted");
        assert_eq!(imported.resolve_null_counts().unwrap(), 1);
        assert_eq!(imported.null_count(), Some(1));
        drop(imported);
        place.assert_clean();
    }
}

/// Offsets at every level, and children longer than their parents need.
#[test]
fn variants_are_accepted() {
    for place in places() {
        let full = place.options.clone().with_validation(Validation::Full);
        for (i, (name, data_type)) in all_types().into_iter().enumerate() {
            let whole = array(&data_type, 40, Nulls::Some, i as u64);
            for (k, made) in variants(&whole, i as u64).into_iter().enumerate() {
                let context = format!("{name}, {:?} on {place}", made.variant);
                let rows = made.rows.len();
                // Trusted, uncounted or checked.
                let way = (i + k) % 3;
                let options = if way == 2 { &full } else { &place.options };
                let mut foreign = Foreign::part(&made.around, made.offset, rows, &place.device);
                if way == 1 && data_type != DataType::Null {
                    foreign.root().null_count = -1;
                }
                let imported = foreign.import(options).expect(&context);
                imported.resolve_null_counts().expect(&context);
                assert_eq!(imported.null_count(), Some(nulls(&made.rows)), "{context}");
                for (offset, rows) in [(0, rows), (rows / 3, rows / 2)] {
                    let context = format!("{context}, slice({offset}, {rows})");
                    let expected = made.rows.slice(offset, rows);
                    let part = imported.slice(offset, rows).unwrap();
                    assert_same(&expected, &part.to_host().expect(&context), &context);
                    let again = again(&part, options).to_host().expect(&context);
                    assert_same(&expected, &again, &context);
                }
                drop(imported);
                foreign.assert_released_by(&place.device, &context);
            }
        }
        place.assert_clean();
    }
}

/// By the array's own validity bitmap.
fn nulls(array: &dyn Array) -> usize {
    match array.data_type() {
        DataType::Null => array.len(),
        _ => array.null_count(),
    }
}

/// Values at odd addresses: typed access refuses, the host gets an aligned copy, which is counted.
#[test]
fn misaligned_values() {
    for place in places() {
        let bytes: Vec<u8> = [0u8]
            .into_iter()
            .chain((1..=3i64).flat_map(i64::to_le_bytes))
            .collect();
        let shifted = arrow_array::UInt8Array::from(bytes);
        let shifted = place
            .device
            .upload_array(&shifted)
            .unwrap()
            .buffer(1)
            .unwrap();
        let expected: ArrayRef = Arc::new(arrow_array::Int64Array::from(vec![1, 2, 3]));
        let mut foreign = Foreign::new(&expected.to_data(), &place.device);
        foreign.set_buffer(&[], 1, shifted.address().offset(1).as_ptr());
        if place.sim.is_none() {
            // Counters of its own.
            foreign.device_array.device_type = 3;
            foreign.device_array.device_id = 4711;
        }
        let imported = foreign.import(&place.options).unwrap();
        let device = imported.device().clone();
        let error = imported
            .values_on::<i64>(&device.default_queue())
            .unwrap_err();
        assert!(
            error.to_string().contains("not aligned to 8 bytes"),
            "{error}"
        );
        let before = device.stats();
        assert_same(&expected, &imported.to_host().unwrap(), "misaligned");
        let delta = device.stats().since(&before);
        let copied = if place.sim.is_some() { 0 } else { 24 };
        assert_eq!(delta.host_copied_bytes, copied, "{place}");
        drop((imported, shifted));
        foreign.assert_released("misaligned");
        place.assert_clean();
    }
}
