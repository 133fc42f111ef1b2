//! The tests' own tools, tested: what they generate is valid, and what they compare is really compared.

use std::collections::HashMap;
use std::sync::Arc;

use crate::support::plant::other_types;
use crate::support::types::{dictionary, run_ends, union};
use crate::support::*;
use arrow_array::types::{Float32Type, Int32Type};
use arrow_array::{
    Array, ArrayRef, DictionaryArray, Float32Array, Int8Array, Int32Array, NullArray, RecordBatch,
    RunArray, StringArray, StructArray, UInt32Array, make_array,
};
use arrow_buffer::NullBuffer;
use arrow_schema::{DataType, Field, Schema, UnionMode};
use arrow_select::concat::concat;
use arrow_select::take::take;
use proptest::prelude::*;

fn same_again(array: &ArrayRef, context: &str) {
    let data = array.to_data();
    data.validate_full()
        .unwrap_or_else(|e| panic!("{context}: {e}"));
    assert_same(array, &make_array(data), context);
}

#[test]
fn every_case_of_every_type_is_valid() {
    for (name, data_type) in all_types() {
        for (case, array) in cases(&data_type, 7) {
            let context = format!("{name}, {case}");
            assert_eq!(array.data_type(), &data_type, "{context}");
            same_again(&array, &context);
        }
    }
}

#[test]
fn all_types_are_there_and_distinct() {
    let all = all_types();
    for (i, (name, data_type)) in all.iter().enumerate() {
        for (other_name, other) in &all[..i] {
            assert_ne!(name, other_name);
            assert_ne!(data_type, other, "{name} and {other_name}");
        }
    }
    for ids in [
        DataType::Null,
        DataType::Utf8View,
        DataType::Decimal32(9, 2),
    ] {
        assert!(all.iter().any(|(_, t)| *t == ids));
    }
}

#[test]
fn arrays_are_deterministic_and_differ_by_seed() {
    for (name, data_type) in all_types() {
        let make = |seed| array(&data_type, 300, Nulls::Some, seed);
        assert_same(&make(1), &make(1), &name);
        let constant = matches!(data_type, DataType::Null);
        assert_eq!(same(&make(1), &make(2)).is_ok(), constant, "{name}");
    }
}

#[test]
fn nulls_are_as_asked() {
    for (name, data_type) in all_types() {
        let nulls = |nulls| array(&data_type, 50, nulls, 3);
        let none = nulls(Nulls::None);
        assert!(none.nulls().is_none(), "{name}");
        let own = !matches!(
            data_type,
            DataType::Null | DataType::Union(..) | DataType::RunEndEncoded(..)
        );
        if own {
            assert_eq!(none.logical_null_count(), 0, "{name}");
            assert!((1..50).contains(&nulls(Nulls::Some).null_count()), "{name}");
            assert_eq!(nulls(Nulls::All).null_count(), 50, "{name}");
        }
    }
}

#[test]
fn generated_arrays_hold_the_awkward_values() {
    let views = array(&DataType::Utf8View, 200, Nulls::Some, 5).to_data();
    let long = |buffer: &arrow_buffer::Buffer| buffer.len() > 2;
    assert!(views.buffers()[1..].iter().filter(|b| long(b)).count() >= 2);
    let text = array(&DataType::Utf8, 200, Nulls::Some, 5);
    let text: &StringArray = text.as_any().downcast_ref().unwrap();
    let some = |test: fn(&str) -> bool| text.iter().flatten().any(test);
    assert!(
        some(str::is_empty)
            && some(|s| !s.is_ascii())
            && some(|s| s.len() > 12)
            && some(|s| s.len() == 12)
    );
    let floats = array(&DataType::Float32, 200, Nulls::None, 5);
    let floats: &Float32Array = floats.as_any().downcast_ref().unwrap();
    assert!(
        floats
            .values()
            .iter()
            .any(|v| v.is_nan() && v.to_bits() != f32::NAN.to_bits())
    );
}

/// Rows of every type, each with every difference that can be planted.
#[test]
fn a_planted_difference_is_seen() {
    let planted_nothing = |t: &DataType| match t {
        DataType::Null | DataType::FixedSizeBinary(0) => true,
        DataType::FixedSizeList(_, size) => *size == 0,
        DataType::Struct(fields) => fields.is_empty(),
        _ => false,
    };
    for (name, data_type) in all_types() {
        let (mut values, mut nulls) = (0, 0);
        for kind in [Nulls::None, Nulls::Some] {
            let array = array(&data_type, 40, kind, 11);
            for row in [0, 1, 2, 13, 20, 38, 39] {
                for (what, changed) in differences(&array, row) {
                    let context = format!("{name}, {kind:?}, row {row}: {what}");
                    let difference = same(&array, &changed).expect_err(&context);
                    let null = what.ends_with("null to value") || what.ends_with("value to null");
                    *(if null { &mut nulls } else { &mut values }) += 1;
                    // A shared value may change an earlier row as well.
                    assert!(
                        difference.contains("row ") && difference.contains("expected"),
                        "{context}: {difference}"
                    );
                }
            }
        }
        assert!(
            values > 5 || planted_nothing(&data_type),
            "{name}: {values} values"
        );
        assert!(
            nulls > 5 || data_type == DataType::Null,
            "{name}: {nulls} nulls"
        );
    }
}

#[test]
fn a_difference_is_reported_where_it_is() {
    let array = array(&DataType::Int32, 40, Nulls::None, 1);
    for row in 0..40 {
        for (what, changed) in differences(&array, row) {
            let difference = same(&array, &changed).unwrap_err();
            assert!(
                difference.contains(&format!("row {row}:")),
                "{what}: {difference}"
            );
        }
    }
}

#[test]
fn lengths_and_types_count() {
    for (name, data_type) in all_types() {
        let whole = array(&data_type, 20, Nulls::Some, 2);
        assert!(
            same(&whole, &whole.slice(0, 19))
                .unwrap_err()
                .starts_with("length"),
            "{name}"
        );
        for other in other_types(&data_type) {
            for rows in [0, 1] {
                let (e, a) = (
                    array(&data_type, rows, Nulls::None, 2),
                    array(&other, rows, Nulls::None, 2),
                );
                assert!(
                    same(&e, &a).unwrap_err().contains("type"),
                    "{name}: {other:?}"
                );
            }
        }
    }
}

fn ints(values: &[i32]) -> ArrayRef {
    Arc::new(Int32Array::from(values.to_vec()))
}

#[test]
fn values_under_nulls_do_not_count() {
    let valid = || Some(NullBuffer::from(vec![true, false, true]));
    let ints = |values: [i32; 3]| Int32Array::new(values.to_vec().into(), valid());
    assert_same(&ints([1, 2, 3]), &ints([1, 9, 3]), "ints");
    let fields = || vec![Field::new("i", DataType::Int32, true)].into();
    let structs = |values| StructArray::new(fields(), vec![Arc::new(ints(values)) as _], valid());
    assert_same(&structs([1, 2, 3]), &structs([1, 9, 3]), "structs");
    assert!(
        same(&structs([1, 2, 3]), &structs([1, 9, 4]))
            .unwrap_err()
            .contains("row 2")
    );
}

#[test]
fn encodings_compare_by_value() {
    let dictionary = |keys: Vec<Option<i8>>, values: Vec<Option<&str>>| {
        DictionaryArray::new(Int8Array::from(keys), Arc::new(StringArray::from(values)))
    };
    let e = dictionary(vec![Some(0), Some(1), None], vec![Some("a"), Some("b")]);
    let a = dictionary(
        vec![Some(2), Some(0), Some(1)],
        vec![Some("b"), None, Some("a")],
    );
    assert_same(&e, &a, "other keys, and a null value for a null key");
    let a = dictionary(
        vec![Some(2), Some(0), Some(0)],
        vec![Some("b"), None, Some("a")],
    );
    assert!(same(&e, &a).unwrap_err().contains("row 2: null"));

    let runs = |ends: &[i32], values: &[i32]| {
        RunArray::<Int32Type>::try_new(&Int32Array::from(ends.to_vec()), &ints(values)).unwrap()
    };
    assert_same(
        &runs(&[2, 5], &[7, 8]),
        &runs(&[1, 2, 5], &[7, 7, 8]),
        "other runs",
    );
    assert!(
        same(&runs(&[2, 5], &[7, 8]), &runs(&[3, 5], &[7, 8]))
            .unwrap_err()
            .contains("row 2: value")
    );
    let sliced = runs(&[3, 9], &[7, 8]).slice(1, 5);
    assert_same(&runs(&[2, 5], &[7, 8]), &sliced, "a slice");
}

#[test]
fn slices_of_equal_values_are_the_same() {
    for (name, data_type) in all_types() {
        let array = array(&data_type, 100, Nulls::Some, 4);
        assert_same(
            &array.slice(13, 60).slice(7, 20),
            &array.slice(20, 20),
            &name,
        );
    }
}

/// Kernels of arrow-rs lay the same values out anew.
#[test]
fn copies_of_another_layout_are_the_same() {
    for (name, data_type) in all_types() {
        for nulls in [Nulls::None, Nulls::Some, Nulls::All] {
            let array = array(&data_type, 120, nulls, 6).slice(5, 101);
            let context = format!("{name}, {nulls:?}");
            let no_width = matches!(
                data_type,
                DataType::FixedSizeBinary(0) | DataType::FixedSizeList(_, 0)
            );
            // `take` loses the length of an array that has neither values nor nulls.
            if !(no_width && nulls == Nulls::None) {
                let all = UInt32Array::from_iter_values(0..101);
                assert_same(
                    &array,
                    &take(&array, &all, None).unwrap(),
                    format!("take, {context}"),
                );
            }
            let parts = [array.slice(0, 33), array.slice(33, 0), array.slice(33, 68)];
            let whole = concat(&parts.each_ref().map(|part| part.as_ref())).unwrap();
            assert_same(&array, &whole, format!("concat, {context}"));
        }
    }
}

#[test]
fn floats_compare_by_bits() {
    let floats = |bits: u32| Float32Array::new(vec![f32::from_bits(bits)].into(), None);
    for (e, a) in [
        (0x7fc0_0001, 0x7fc0_0002),
        (0, 0x8000_0000),
        (0x7f80_0001, 0xff80_0001),
    ] {
        assert!(same(&floats(e), &floats(a)).is_err());
        assert_same(&floats(e), &floats(e), "NaN is itself");
    }
    let all = |bits: u32| floats(bits).reinterpret_cast::<Float32Type>();
    assert_same(&all(0x7fc0_0001), &floats(0x7fc0_0001), "payload kept");
}

#[test]
fn null_arrays_only_have_a_length() {
    assert_same(&NullArray::new(3), &NullArray::new(3), "3");
    assert!(same(&NullArray::new(3), &NullArray::new(2)).is_err());
}

#[test]
fn batches_compare_with_schema_metadata_and_rows() {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let batch = batch(&types, 30, Nulls::Some, 1);
    assert_same_batch(&batch, &batch.clone(), "itself");
    assert!(
        same_batch(&batch, &batch.slice(0, 29))
            .unwrap_err()
            .starts_with("rows")
    );
    let schema = batch.schema().as_ref().clone();
    let plain =
        |schema: Schema| RecordBatch::try_new(Arc::new(schema), batch.columns().to_vec()).unwrap();
    let difference = same_batch(&batch, &plain(schema.clone().with_metadata(HashMap::new())));
    assert!(difference.unwrap_err().starts_with("schema"));
    let fields: Vec<Field> = schema
        .fields()
        .iter()
        .map(|f| f.as_ref().clone().with_metadata(HashMap::new()))
        .collect();
    let difference = same_batch(
        &batch,
        &plain(Schema::new(fields).with_metadata(schema.metadata().clone())),
    );
    assert!(difference.unwrap_err().starts_with("schema"));
    assert!(
        schema.fields()[2]
            .metadata()
            .contains_key("ARROW:extension:name")
    );

    let mut columns = batch.columns().to_vec();
    columns[4] = differences(&columns[4], 17).pop().unwrap().1;
    let changed = RecordBatch::try_new(batch.schema(), columns).unwrap();
    assert!(
        same_batch(&batch, &changed)
            .unwrap_err()
            .starts_with("column 4: array: row 17")
    );

    assert_eq!(zero_column_batch(9).num_rows(), 9);
    assert!(same_batch(&zero_column_batch(9), &zero_column_batch(8)).is_err());
    assert_eq!(wide_batch(100, 10).num_columns(), 100);
}

#[test]
fn special_offsets_are_there() {
    let tight = boolean_with_tight_nulls();
    assert_same(&tight, &make_array(tight.to_data()), "tight nulls");
}

/// Of whatever array: whole, sliced, with offsets and children as C structs may have them.
#[test]
fn variants_hold_the_same_rows() {
    for (name, data_type) in all_types() {
        for (nulls, rows) in [
            (Nulls::None, 30),
            (Nulls::Some, 70),
            (Nulls::All, 9),
            (Nulls::Some, 0),
        ] {
            let whole = array(&data_type, rows, nulls, 8);
            for source in [whole.slice(0, rows), whole.slice(rows / 3, rows / 2)] {
                for made in variants(&source, 5) {
                    let context =
                        format!("{name}, {rows} rows, nulls {nulls:?}, {:?}", made.variant);
                    match made.variant {
                        Variant::Empty => assert_eq!(made.rows.len(), 0),
                        Variant::AllNull => assert_eq!(made.rows.null_count(), source.len()),
                        _ => assert_same(&source, &made.rows, &context),
                    }
                    assert_same(&made.rows, &made.array(), &context);
                    same_again(&made.array(), &context);
                    made.data().validate_full().expect(&context);
                    // And of a variant.
                    if rows == 30 && made.variant == Variant::Both(11) {
                        for again in variants(&made.array(), 6) {
                            let context = format!("{context}, {:?}", again.variant);
                            assert_same(&again.rows, &again.array(), context);
                        }
                    }
                }
            }
        }
    }
}

/// What they are for.
#[test]
fn variants_are_other_memory() {
    use crate::support::types::{fixed_list, list, structure};
    let of = |data_type: &DataType, variant: Variant| {
        variant
            .of(&array(data_type, 40, Nulls::Some, 2), 3)
            .unwrap()
            .data()
    };
    let both = |data_type: &DataType| of(data_type, Variant::Both(11));
    assert_eq!(of(&DataType::Int32, Variant::Sliced(8)).offset(), 8);
    let ints = of(&DataType::Int32, Variant::Sliced(3));
    assert_eq!(ints.offset(), 3);
    assert_eq!(
        ints.nulls().unwrap().offset(),
        8,
        "not where the values start"
    );
    assert!(ints.buffers()[0].len() > 43 * 4, "rows behind");
    let int_list = both(&list(DataType::Int32));
    let offsets = int_list.buffers()[0].typed_data::<i32>();
    let items = &int_list.child_data()[0];
    assert!(offsets[0] > 0 && offsets[11] > offsets[0] && items.offset() > 0);
    assert!(
        items.len() > *offsets.last().unwrap() as usize,
        "items of no list"
    );
    let pair = structure(vec![("a", DataType::Int32), ("b", list(DataType::Utf8))]);
    let sparse = union(UnionMode::Sparse, vec![DataType::Int32, DataType::Utf8]);
    for (data_type, times) in [(pair, 1), (sparse, 1), (fixed_list(DataType::Int32, 3), 3)] {
        for variant in [Variant::LongChildren, Variant::Both(11)] {
            let data = of(&data_type, variant);
            for child in data.child_data() {
                assert!(child.offset() > 0 && child.len() > times * (data.offset() + 40));
            }
        }
    }
    let texts = both(&dictionary(DataType::Int8, DataType::Utf8));
    let keys = &texts.buffers()[0].typed_data::<i8>()[11..51];
    let keys = || {
        keys.iter()
            .enumerate()
            .filter(|(i, _)| texts.is_valid(*i))
            .map(|(_, key)| *key)
    };
    assert!(
        keys().min() >= Some(2)
            && (keys().max().unwrap() as usize) < texts.child_data()[0].len() - 2
    );
    let runs = both(&run_ends(DataType::Int32, DataType::Utf8));
    let ends = &runs.child_data()[0];
    let ends = &ends.buffers()[0].typed_data::<i32>()[ends.offset()..][..ends.len()];
    assert!(
        ends[0] < 11 && ends[1] > 11 && !ends.contains(&51),
        "{ends:?}"
    );
    let views = both(&DataType::Utf8View);
    assert_eq!(views.buffers().last().unwrap().as_slice(), b"of no view");
    let whole = array(&DataType::Int64, 20, Nulls::None, 1);
    let made = Variant::Sliced(3).of(&whole, 1).unwrap();
    assert!(
        made.around.null_count() > 0 && made.array().nulls().is_some_and(|n| n.null_count() == 0)
    );
}

#[test]
fn batches_have_columns_of_all_variants() {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let whole = whole_batch(&types, 30, Nulls::Some, 4);
    assert_same_batch(&whole, &batch(&types, 30, Nulls::Some, 4), "mixed");
    for made in batch_variants(&whole, 2) {
        assert_same_batch(&whole, &made, "made");
    }
}

#[test]
fn allocations_are_counted_per_thread() {
    let (sum, allocations) = count(|| (0..10).sum::<i32>());
    assert_eq!((sum, allocations), (45, 0));
    let (vector, allocations) = count(|| vec![1u8; 100]);
    assert_eq!((vector.len(), allocations), (100, 1));
    let other = std::thread::spawn(|| count(|| (0..50).map(|i| vec![i]).collect::<Vec<_>>()).1);
    let (_, allocations) = count(|| std::hint::black_box(Box::new(5)));
    assert_eq!(allocations, 1);
    assert!(other.join().unwrap() >= 51);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_arrays_are_valid(case in arb_array()) {
        let array = case.array();
        prop_assert_eq!(array.len(), case.slice.1);
        same_again(&array, "arbitrary");
    }

    #[test]
    fn arbitrary_batches_are_themselves(case in arb_batch()) {
        assert_same_batch(&case.batch(), &case.batch(), "arbitrary");
    }
}
