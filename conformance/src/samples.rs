//! Arrays of every type and layout.

use std::sync::Arc;

use arrow_device::arrow_array::types::{
    ArrowDictionaryKeyType, Int8Type, Int16Type, Int32Type, Int64Type, RunEndIndexType, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_device::arrow_array::{
    Array, ArrayRef, BinaryArray, BinaryViewArray, BooleanArray, DictionaryArray,
    FixedSizeListArray, Int32Array, Int64Array, LargeBinaryArray, LargeListArray,
    LargeListViewArray, LargeStringArray, ListArray, ListViewArray, MapArray, NullArray,
    PrimitiveArray, RunArray, StringArray, StringViewArray, StructArray, UnionArray, make_array,
    new_empty_array,
};
use arrow_device::arrow_buffer::{
    ArrowNativeType, MutableBuffer, NullBuffer, OffsetBuffer, ScalarBuffer,
};
use arrow_device::arrow_schema::{DataType, Field, IntervalUnit, TimeUnit, UnionFields};

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

fn runs<R: RunEndIndexType>(rows: usize) -> ArrayRef {
    let ends = [1, 5, 6, 8, rows / 2, rows];
    let end = |end: usize| R::Native::from_usize(end).expect("few rows");
    let ends = PrimitiveArray::<R>::from_iter_values(ends.map(end));
    let values = [Some("a"), None, Some("b"), Some("c"), Some(""), Some("d")];
    let values = StringArray::from_iter(values);
    Arc::new(RunArray::try_new(&ends, &values).expect("valid runs"))
}

fn dictionary<K: ArrowDictionaryKeyType>(rows: usize) -> ArrayRef {
    let value = |i: usize| some(i).then(|| ["x", "yy", "zzz"][i % 3]);
    Arc::new(DictionaryArray::<K>::from_iter((0..rows).map(value)))
}

/// Every type whose values have one width.
fn fixed_types() -> Vec<DataType> {
    use DataType::*;
    use TimeUnit::*;
    vec![
        Int8,
        Int16,
        Int32,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
        Float16,
        Float32,
        Float64,
        Decimal32(9, 2),
        Decimal64(18, 2),
        Decimal128(38, 10),
        Decimal256(76, 10),
        Date32,
        Date64,
        Time32(Second),
        Time32(Millisecond),
        Time64(Microsecond),
        Time64(Nanosecond),
        Timestamp(Second, None),
        Timestamp(Nanosecond, Some("+02:00".into())),
        Duration(Millisecond),
        Interval(IntervalUnit::YearMonth),
        Interval(IntervalUnit::DayTime),
        Interval(IntervalUnit::MonthDayNano),
        FixedSizeBinary(3),
    ]
}

fn fixed(data_type: DataType, rows: usize) -> ArrayRef {
    let width = match data_type {
        DataType::FixedSizeBinary(bytes) => bytes as usize,
        _ => data_type.primitive_width().expect("a width"),
    };
    let mut values = MutableBuffer::from_len_zeroed(rows * width);
    for (i, value) in values.chunks_exact_mut(width).enumerate() {
        // No larger, so that it fits into every decimal, and into a day.
        let number = (i as u16 * 251).to_le_bytes();
        let bytes = width.min(2);
        value[..bytes].copy_from_slice(&number[..bytes]);
    }
    let data = new_empty_array(&data_type).to_data().into_builder();
    let nulls = NullBuffer::from_iter((0..rows).map(some));
    let data = data.len(rows).buffers(vec![values.into()]);
    make_array(data.nulls(Some(nulls)).build().expect("valid values"))
}

fn map(rows: usize) -> MapArray {
    let field = |name: &str, data_type, nullable| Arc::new(Field::new(name, data_type, nullable));
    let fields = vec![
        field("keys", DataType::Utf8, false),
        field("values", DataType::Int64, true),
    ];
    let keys = StringArray::from_iter_values((0..3 * rows).map(|i| format!("key {i}")));
    let columns: Vec<ArrayRef> = vec![Arc::new(keys), Arc::new(int64(3 * rows))];
    let entries = StructArray::new(fields.into(), columns, None);
    let offsets = OffsetBuffer::from_lengths((0..rows).map(|i| i % 4));
    let nulls = NullBuffer::from_iter((0..rows).map(some));
    let entry = field("entries", entries.data_type().clone(), false);
    MapArray::try_new(entry, offsets, entries, Some(nulls), false).expect("a valid map")
}

/// Lists as views, in reverse, which overlap.
fn views(rows: usize) -> (Vec<usize>, Vec<usize>, ArrayRef) {
    let starts = (0..rows).rev().collect();
    let sizes = (0..rows).map(|i| i % 4).collect();
    (starts, sizes, Arc::new(int64(rows + 3)))
}

/// As [`made`], of the types that have no layout of their own.
fn others(rows: usize) -> Vec<ArrayRef> {
    let bytes = |i: usize| text(i).map(String::into_bytes);
    let number =
        |i: usize| some(i).then(|| (0..i % 3).map(|k| Some((i + k) as i32)).collect::<Vec<_>>());
    let item = |array: &ArrayRef| Arc::new(Field::new_list_field(array.data_type().clone(), true));
    let nulls = || Some(NullBuffer::from_iter((0..rows).map(some)));
    let (starts, sizes, values) = views(rows);
    let narrow = |all: &[usize]| ScalarBuffer::from_iter(all.iter().map(|n| *n as i32));
    let wide = |all: &[usize]| ScalarBuffer::from_iter(all.iter().map(|n| *n as i64));
    let few = ListViewArray::try_new(
        item(&values),
        narrow(&starts),
        narrow(&sizes),
        values.clone(),
        nulls(),
    );
    let many =
        LargeListViewArray::try_new(item(&values), wide(&starts), wide(&sizes), values, nulls());
    let structures: ArrayRef = Arc::new(structure(2 * rows));
    let lengths = OffsetBuffer::from_lengths((0..rows).map(|i| i % 3));
    let nested = ListArray::try_new(item(&structures), lengths, structures, nulls());
    let mut all: Vec<ArrayRef> = vec![
        Arc::new(BinaryArray::from_iter((0..rows).map(bytes))),
        Arc::new(LargeBinaryArray::from_iter((0..rows).map(bytes))),
        Arc::new(BinaryViewArray::from_iter((0..rows).map(bytes))),
        Arc::new(LargeListArray::from_iter_primitive::<Int32Type, _, _>(
            (0..rows).map(number),
        )),
        Arc::new(few.expect("valid views")),
        Arc::new(many.expect("valid views")),
        Arc::new(nested.expect("valid lists")),
        Arc::new(map(rows)),
        dictionary::<Int8Type>(rows),
        dictionary::<Int16Type>(rows),
        dictionary::<Int64Type>(rows),
        dictionary::<UInt8Type>(rows),
        dictionary::<UInt16Type>(rows),
        dictionary::<UInt32Type>(rows),
        dictionary::<UInt64Type>(rows),
        runs::<Int16Type>(rows),
        runs::<Int64Type>(rows),
        Arc::new(Int64Array::from_iter_values(0..rows as i64)),
    ];
    all.extend(fixed_types().into_iter().map(|of| fixed(of, rows)));
    all
}

/// Returns, for each type, an array of [`ROWS`] rows and a slice of as many from the middle of a
/// longer array. Slices begin at a byte of their bitmaps or within one, and within a run, and have
/// items and values that no row refers to. The layouts come first.
pub(super) fn all() -> Vec<ArrayRef> {
    let cut = |(i, array): (usize, ArrayRef)| array.slice(7 + i % 2, ROWS);
    let slices = |long: Vec<ArrayRef>| long.into_iter().enumerate().map(cut);
    let layouts = slices(made(ROWS + 17));
    // Miri is slow.
    if cfg!(miri) {
        return layouts.collect();
    }
    let rest = others(ROWS).into_iter().chain(slices(others(ROWS + 17)));
    made(ROWS).into_iter().chain(layouts).chain(rest).collect()
}

fn made(rows: usize) -> Vec<ArrayRef> {
    let items = Int32Array::from_iter((0..rows * 3).map(|i| some(i).then_some(i as i32)));
    let item = Arc::new(Field::new_list_field(DataType::Int32, true));
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
        dictionary::<Int32Type>(rows),
        Arc::new(union(rows, true)),
        Arc::new(union(rows, false)),
        runs::<Int32Type>(rows),
    ]
}

/// Panics unless both hold the same values.
#[track_caller]
pub(super) fn assert_same(expected: &dyn Array, actual: &dyn Array, what: impl std::fmt::Display) {
    assert_eq!(expected.data_type(), actual.data_type(), "{what}");
    assert_eq!(expected.len(), actual.len(), "{what}: rows");
    fn run_of<R: RunEndIndexType>(array: &dyn Array, row: usize) -> Option<ArrayRef> {
        let array = array.as_any().downcast_ref::<RunArray<R>>()?;
        let at = array.get_physical_index(row);
        Some(array.values().slice(at, 1))
    }
    let run = |array: &dyn Array, row| {
        let small = run_of::<Int16Type>(array, row).or_else(|| run_of::<Int32Type>(array, row));
        small.or_else(|| run_of::<Int64Type>(array, row))
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
