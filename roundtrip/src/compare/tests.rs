use super::samples::samples;
use super::*;

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::*;
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer};
use arrow_schema::{UnionFields, UnionMode};
use arrow_select::concat::concat;
use arrow_select::take::take;

fn batch(column: ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable([("a", column, true)]).unwrap()
}

fn differences(sent: ArrayRef, got: ArrayRef) -> Findings {
    let mut findings = Findings::default();
    compare_batches("here", &batch(sent), &batch(got), &mut findings);
    findings
}

fn rows(array: &ArrayRef, rows: [u32; 6]) -> ArrayRef {
    take(array, &UInt32Array::from(rows.to_vec()), None).unwrap()
}

#[test]
fn finds_a_planted_value_and_a_planted_null_of_every_type() {
    for array in samples() {
        let name = array.data_type().to_string();
        let sent = rows(&array, [0, 1, 2, 3, 1, 0]);
        assert_eq!(differences(sent.clone(), sent.clone()).total, 0, "{name}");
        for planted in [[0, 1, 3, 3, 1, 0], [0, 1, 1, 3, 1, 0]] {
            let findings = differences(sent.clone(), rows(&array, planted));
            assert_eq!(findings.total, 1, "{name}: {findings:?}");
            assert!(findings.described[0].contains("row 2:"), "{findings:?}");
        }
        let findings = differences(sent.clone(), rows(&array, [0, 0, 2, 3, 1, 2]));
        assert_eq!(findings.total, 2, "{name}: {findings:?}");
        assert!(findings.described[1].contains("row 5:"), "{findings:?}");
    }
}

#[test]
fn offsets_and_layout_do_not_matter() {
    for array in samples() {
        let name = array.data_type().to_string();
        let sent = rows(&array, [0, 1, 2, 3, 1, 0]);
        let longer = concat(&[&array, &sent, &array]).unwrap();
        let got = longer.slice(array.len(), sent.len());
        assert_eq!(differences(sent.clone(), got.clone()).total, 0, "{name}");
        assert_eq!(
            differences(got.slice(1, 4), sent.slice(1, 4)).total,
            0,
            "{name}"
        );
        let other = rows(&array, [0, 1, 2, 3, 1, 2]);
        let findings = differences(got.slice(2, 4), other.slice(2, 4));
        assert_eq!(findings.total, 1, "{name}: {findings:?}");
        assert!(findings.described[0].contains("row 3:"), "{findings:?}");
    }
}

#[test]
fn finds_other_lengths_and_types() {
    for array in samples() {
        assert_eq!(differences(array.clone(), array.slice(0, 3)).total, 1);
        let other: ArrayRef = Arc::new(NullArray::new(array.len()));
        assert_eq!(differences(array.clone(), other.clone()).total, 1);
        assert_eq!(differences(other, array).total, 1);
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
    // SAFETY: not upheld, and that is the point: the key 100 has no value. The comparison looks
    // every key up with a bounds check.
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
