//! Arrays of every layout.

use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BooleanArray, DictionaryArray, FixedSizeListArray, Int32Array, Int64Array,
    LargeStringArray, ListArray, NullArray, RunArray, StringArray, StringViewArray, StructArray,
    UnionArray,
};
use arrow_buffer::ScalarBuffer;
use arrow_schema::{DataType, Field, UnionFields};

/// Rows of each sample.
pub(super) const ROWS: usize = if cfg!(miri) { 20 } else { 100 };

fn some(i: usize) -> bool {
    i % 7 != 3
}

fn int64(rows: usize) -> Int64Array {
    (0..rows).map(|i| some(i).then_some(i as i64 * 3)).collect()
}

fn text(i: usize) -> Option<String> {
    // Some have more than 12 bytes, which views store in other buffers.
    some(i).then(|| "value ".repeat(i % 4) + &i.to_string())
}

fn list(rows: usize) -> ListArray {
    let row =
        |i: usize| some(i).then(|| (0..i % 5).map(|k| Some((i * k) as i32)).collect::<Vec<_>>());
    ListArray::from_iter_primitive::<Int32Type, _, _>((0..rows).map(row))
}

fn structure(rows: usize) -> StructArray {
    let field =
        |name: &str, array: &dyn Array| Arc::new(Field::new(name, array.data_type().clone(), true));
    let a: ArrayRef = Arc::new(int64(rows));
    let b: ArrayRef = Arc::new((0..rows).map(text).collect::<StringArray>());
    let c: ArrayRef = Arc::new(list(rows));
    StructArray::from(vec![
        (field("a", &a), a),
        (field("b", &b), b),
        (field("c", &c), c),
    ])
}

fn union(rows: usize, dense: bool) -> UnionArray {
    let fields = UnionFields::from_fields([
        Field::new("i", DataType::Int64, true),
        Field::new("s", DataType::Utf8, true),
    ]);
    let ids: ScalarBuffer<i8> = (0..rows).map(|i| (i % 3 == 0) as i8).collect();
    let offsets: ScalarBuffer<i32> = (0..rows as i32).rev().collect();
    let children: Vec<ArrayRef> = vec![
        Arc::new(int64(rows)),
        Arc::new((0..rows).map(text).collect::<StringArray>()),
    ];
    UnionArray::try_new(fields, ids, dense.then_some(offsets), children).expect("a valid union")
}

fn runs(rows: usize) -> RunArray<Int32Type> {
    let ends = Int32Array::from(vec![1, 5, 6, 8, rows as i32 / 2, rows as i32]);
    let values = StringArray::from(vec![
        Some("a"),
        None,
        Some("b"),
        Some("c"),
        Some(""),
        Some("d"),
    ]);
    RunArray::try_new(&ends, &values).expect("valid runs")
}

/// Returns, for each layout, an array of [`ROWS`] rows and a slice of as many from the middle of a
/// longer array. Slices begin at a byte of their bitmaps or within one, and within a run, and have
/// items and values that no row refers to.
pub(super) fn all() -> Vec<ArrayRef> {
    let long = made(ROWS + 17).into_iter().enumerate();
    let slices = long.map(|(i, array)| array.slice(7 + i % 2, ROWS));
    // Miri is slow.
    let whole = if cfg!(miri) { vec![] } else { made(ROWS) };
    whole.into_iter().chain(slices).collect()
}

fn made(rows: usize) -> Vec<ArrayRef> {
    let items = Int32Array::from_iter((0..rows * 3).map(|i| some(i).then_some(i as i32)));
    let item = Arc::new(Field::new_list_field(DataType::Int32, true));
    let dictionary: DictionaryArray<Int32Type> = (0..rows)
        .map(|i| some(i).then(|| ["x", "yy", "zzz"][i % 3]))
        .collect();
    vec![
        Arc::new(int64(rows)),
        Arc::new(BooleanArray::from_iter(
            (0..rows).map(|i| some(i).then_some(i % 2 == 0)),
        )),
        Arc::new(NullArray::new(rows)),
        Arc::new((0..rows).map(text).collect::<StringArray>()),
        Arc::new((0..rows).map(text).collect::<LargeStringArray>()),
        Arc::new((0..rows).map(text).collect::<StringViewArray>()),
        Arc::new(list(rows)),
        Arc::new(FixedSizeListArray::new(item, 3, Arc::new(items), None)),
        Arc::new(structure(rows)),
        Arc::new(dictionary),
        Arc::new(union(rows, true)),
        Arc::new(union(rows, false)),
        Arc::new(runs(rows)),
    ]
}

/// Panics unless both hold the same values.
#[track_caller]
pub(super) fn assert_same(expected: &dyn Array, actual: &dyn Array, what: impl std::fmt::Display) {
    assert_eq!(expected.data_type(), actual.data_type(), "{what}");
    assert_eq!(expected.len(), actual.len(), "{what}: rows");
    let run = |array: &dyn Array, row| {
        let array = array.as_any().downcast_ref::<RunArray<Int32Type>>()?;
        let at = array.get_physical_index(row);
        Some(array.values().slice(at, 1))
    };
    match expected.data_type() {
        // Equal runs may be cut differently.
        DataType::RunEndEncoded(_, _) => {
            for row in 0..expected.len() {
                let (expected, actual) = (run(expected, row), run(actual, row));
                assert!(
                    expected.is_some() && expected == actual,
                    "{what}: row {row}"
                );
            }
        }
        _ => assert!(
            expected == actual,
            "{what}: {expected:?} came back as {actual:?}"
        ),
    }
}
