use super::support::{Nulls, Variant};
use super::*;

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::*;
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer};
use arrow_schema::{UnionFields, UnionMode};

fn batch(column: ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable([("a", column, true)]).unwrap()
}

fn differences(sent: ArrayRef, got: ArrayRef) -> Findings {
    let mut findings = Findings::default();
    compare_batches("here", &batch(sent), &batch(got), &mut findings);
    findings
}

/// An array of every type.
fn arrays() -> impl Iterator<Item = (String, ArrayRef)> {
    let array = |data_type| support::array(&data_type, 8, Nulls::Some, 1);
    let types = support::all_types().into_iter();
    types.map(move |(name, data_type)| (name, array(data_type)))
}

#[test]
fn finds_planted_values_and_nulls_of_every_type() {
    for (name, array) in arrays() {
        assert_eq!(differences(array.clone(), array.clone()).total, 0, "{name}");
        for row in [0, 3, 7] {
            for (what, planted) in support::differences(&array, row) {
                let findings = differences(array.clone(), planted);
                let place = format!("row {row}:");
                let found = findings.described.iter().any(|d| d.contains(&place));
                assert!(found, "{name}, {what} in row {row}: {findings:?}");
            }
        }
    }
}

#[test]
fn offsets_and_layout_do_not_matter() {
    for (name, array) in arrays() {
        for made in support::variants(&array, 1) {
            let findings = differences(made.rows.clone(), made.array());
            assert_eq!(
                findings.total, 0,
                "{name}, {:?}: {findings:?}",
                made.variant
            );
        }
        for (what, planted) in support::differences(&array, 3) {
            for made in support::variants(&planted, 1) {
                if made.rows.len() == array.len() && made.variant != Variant::AllNull {
                    let findings = differences(array.clone(), made.array());
                    let variant = made.variant;
                    assert!(
                        findings.total > 0,
                        "{name}, {what}, {variant:?}: {findings:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn finds_other_lengths_and_types() {
    for (name, array) in arrays() {
        assert_eq!(
            differences(array.clone(), array.slice(0, 3)).total,
            1,
            "{name}"
        );
        if *array.data_type() != DataType::Null {
            let other: ArrayRef = Arc::new(NullArray::new(array.len()));
            assert_eq!(differences(array.clone(), other.clone()).total, 1, "{name}");
            assert_eq!(differences(other, array).total, 1, "{name}");
        }
    }
    let null = |n| -> ArrayRef { Arc::new(NullArray::new(n)) };
    assert_eq!(differences(null(3), null(3)).total, 0);
    assert_eq!(differences(null(3), null(4)).total, 1);
    let (zoned, plain) = (
        TimestampSecondArray::from(vec![1]).with_timezone("+01:00"),
        TimestampSecondArray::from(vec![1]),
    );
    assert_eq!(differences(Arc::new(zoned), Arc::new(plain)).total, 1);
}

#[test]
fn floats_are_compared_bit_by_bit() {
    let floats = |values: [u64; 3]| -> ArrayRef {
        Arc::new(Float64Array::from_iter_values(values.map(f64::from_bits)))
    };
    let nan = f64::NAN.to_bits();
    let sent = floats([0, nan, 1]);
    assert_eq!(differences(sent.clone(), floats([0, nan, 1])).total, 0);
    assert_eq!(
        differences(sent.clone(), floats([1 << 63, nan, 1])).total,
        1
    );
    let findings = differences(sent, floats([0, nan + 1, 1]));
    assert!(findings.described[0].contains("other bits"), "{findings:?}");
}

#[test]
fn what_lies_under_a_null_does_not_matter() {
    let nulls = || Some(NullBuffer::from(vec![true, false]));
    let numbers =
        |values: Vec<i32>| -> ArrayRef { Arc::new(Int32Array::new(values.into(), nulls())) };
    assert_eq!(
        differences(numbers(vec![1, 2]), numbers(vec![1, 3])).total,
        0
    );
    let lists = |lengths: [usize; 2]| -> ArrayRef {
        let values = Int32Array::from_iter_values(0..lengths.iter().sum::<usize>() as i32);
        let field = Arc::new(Field::new_list_field(DataType::Int32, true));
        let offsets = OffsetBuffer::from_lengths(lengths);
        Arc::new(ListArray::new(field, offsets, Arc::new(values), nulls()))
    };
    // The lengths that a null list hides are not values, but the rest is.
    assert_eq!(differences(lists([1, 2]), lists([1, 0])).total, 0);
    assert_eq!(differences(lists([1, 2]), lists([2, 2])).total, 1);
}

#[test]
fn other_order_of_a_dictionary_is_the_same() {
    let words = |values: [&str; 2], keys: [i8; 3]| -> ArrayRef {
        let values = Arc::new(StringArray::from(values.to_vec()));
        Arc::new(DictionaryArray::new(Int8Array::from(keys.to_vec()), values))
    };
    let sent = words(["a", "b"], [0, 1, 0]);
    assert_eq!(
        differences(sent.clone(), words(["b", "a"], [1, 0, 1])).total,
        0
    );
    assert_eq!(
        differences(sent.clone(), words(["b", "a"], [0, 1, 0])).total,
        3
    );
    assert_eq!(differences(sent, words(["a", "c"], [0, 1, 0])).total, 1);
}

#[test]
fn broken_arrays_are_differences_and_no_panics() {
    let values: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    let sent: ArrayRef = Arc::new(DictionaryArray::new(Int8Array::from(vec![0, 1]), values));
    let broken = sent
        .to_data()
        .into_builder()
        .buffers(vec![Buffer::from_vec(vec![0i8, 100])]);
    // SAFETY: `build_unchecked` requires a valid array, and this one is not: key 100 has no value.
    // Nothing reads through it, as the comparison validates an array before it looks at its values.
    let broken = make_array(unsafe { broken.build_unchecked() });
    assert_eq!(differences(sent, broken).total, 1);
}

#[test]
fn counts_are_capped_and_so_are_descriptions() {
    let sent: ArrayRef = Arc::new(Int32Array::from(vec![1; 1000]));
    let got: ArrayRef = Arc::new(Int32Array::from(vec![2; 1000]));
    let findings = differences(sent, got);
    assert_eq!(findings.total, COUNTED_ROWS as u64);
    assert_eq!(findings.described.len(), DESCRIBED);
}

#[test]
fn finds_every_difference_of_schemas() {
    let metadata = |value: &str| HashMap::from([("key".to_owned(), value.to_owned())]);
    let inner = Field::new("x", DataType::Int32, true).with_metadata(metadata("1"));
    let schema = |field: Field| Schema::new(vec![field]).with_metadata(metadata("schema"));
    let compare = |sent: &Schema, got: &Schema| {
        let mut findings = Findings::default();
        compare_schemas("here", sent, got, &mut findings);
        findings.total
    };
    let key = || Box::new(DataType::Int8);
    let inner_changes = [
        inner.clone().with_name("y"),
        inner.clone().with_nullable(false),
        inner.clone().with_data_type(DataType::Int64),
        inner.clone().with_metadata(metadata("2")),
        inner.clone().with_metadata(HashMap::new()),
        inner
            .clone()
            .with_data_type(DataType::Dictionary(key(), Box::new(DataType::Utf8))),
    ];
    let parents: [fn(Field) -> DataType; 10] = [
        |f| f.data_type().clone(),
        |f| DataType::Struct(vec![f].into()),
        |f| DataType::List(f.into()),
        |f| DataType::LargeList(f.into()),
        |f| DataType::ListView(f.into()),
        |f| DataType::LargeListView(f.into()),
        |f| DataType::FixedSizeList(f.into(), 2),
        |f| DataType::Map(f.into(), false),
        |f| DataType::Union(UnionFields::try_new([1], [f]).unwrap(), UnionMode::Sparse),
        |f| {
            let ends = Field::new("run_ends", DataType::Int32, false);
            DataType::RunEndEncoded(ends.into(), f.into())
        },
    ];
    for parent in parents {
        let sent = Field::new("a", parent(inner.clone()), true);
        assert_eq!(compare(&schema(sent.clone()), &schema(sent.clone())), 0);
        for changed in &inner_changes {
            let got = sent.clone().with_data_type(parent(changed.clone()));
            if got != sent {
                assert_eq!(compare(&schema(sent.clone()), &schema(got)), 1, "{changed}");
            }
        }
    }
    assert_eq!(
        compare(&schema(inner.clone()), &Schema::new(vec![inner.clone()])),
        1
    );
    let two = Schema::new(vec![inner.clone(), inner.clone()]).with_metadata(metadata("schema"));
    assert_eq!(compare(&schema(inner.clone()), &two), 1);
    let [from, to] = [false, true].map(|sorted| {
        let entries = Field::new(
            "entries",
            DataType::Struct(vec![inner.clone()].into()),
            false,
        );
        schema(Field::new("a", DataType::Map(entries.into(), sorted), true))
    });
    assert_eq!(compare(&from, &to), 1);
    let [from, to] = [false, true].map(|ordered| {
        let words = DataType::Dictionary(key(), Box::new(DataType::Utf8));
        schema(Field::new("a", words, true).with_dict_is_ordered(ordered))
    });
    assert_eq!(compare(&from, &to), 1);
}
