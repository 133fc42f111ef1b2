//! Equality of arrays by value, bit by bit, that does not rely on `==` of arrow-rs: offsets, slices, unused values
//! and values under nulls may differ; types, metadata, nulls and every value may not.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    BinaryType, BinaryViewType, ByteArrayType, ByteViewType, LargeBinaryType, LargeUtf8Type,
    StringViewType, Utf8Type,
};
use arrow_array::{
    Array, OffsetSizeTrait, RecordBatch, downcast_integer_array, downcast_run_array,
};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Schema};

#[track_caller]
pub(crate) fn assert_same(
    expected: &dyn Array,
    actual: &dyn Array,
    context: impl std::fmt::Display,
) {
    if let Err(difference) = same(expected, actual) {
        panic!("{context}: {difference}");
    }
}

#[track_caller]
pub(crate) fn assert_same_batch(
    expected: &RecordBatch,
    actual: &RecordBatch,
    context: impl std::fmt::Display,
) {
    if let Err(difference) = same_batch(expected, actual) {
        panic!("{context}: {difference}");
    }
}

/// The first difference, as text.
pub(crate) fn same(expected: &dyn Array, actual: &dyn Array) -> Result<(), String> {
    if expected.len() != actual.len() {
        return Err(format!(
            "length: expected {}, actual {}",
            expected.len(),
            actual.len()
        ));
    }
    let pairs = (0..expected.len())
        .map(|row| Pair {
            row,
            e: row,
            a: row,
        })
        .collect();
    compare(expected, actual, pairs, "array")
}

pub(crate) fn same_batch(expected: &RecordBatch, actual: &RecordBatch) -> Result<(), String> {
    let (e, a): (&Schema, &Schema) = (expected.schema_ref(), actual.schema_ref());
    if e != a {
        return Err(format!("schema: expected {e:?}, actual {a:?}"));
    }
    if expected.num_rows() != actual.num_rows() {
        return Err(format!(
            "rows: expected {}, actual {}",
            expected.num_rows(),
            actual.num_rows()
        ));
    }
    for (i, (e, a)) in expected.columns().iter().zip(actual.columns()).enumerate() {
        same(e, a).map_err(|difference| format!("column {i}: {difference}"))?;
    }
    Ok(())
}

/// Two positions that must hold the same value, and the row at the top that they belong to.
#[derive(Clone, Copy)]
struct Pair {
    row: usize,
    e: usize,
    a: usize,
}

fn compare(e: &dyn Array, a: &dyn Array, pairs: Vec<Pair>, path: &str) -> Result<(), String> {
    use DataType::*;
    if e.data_type() != a.data_type() {
        return Err(format!(
            "{path}: type: expected {:?}, actual {:?}",
            e.data_type(),
            a.data_type()
        ));
    }
    let pairs = both_valid(e, a, pairs, path)?;
    match e.data_type() {
        Null => Ok(()),
        Boolean => {
            let (e, a) = (e.as_boolean(), a.as_boolean());
            leaves(&pairs, path, |i| bit(e.value(i)), |i| bit(a.value(i)))
        }
        Utf8 => texts::<Utf8Type>(e, a, &pairs, path),
        LargeUtf8 => texts::<LargeUtf8Type>(e, a, &pairs, path),
        Binary => texts::<BinaryType>(e, a, &pairs, path),
        LargeBinary => texts::<LargeBinaryType>(e, a, &pairs, path),
        Utf8View => views::<StringViewType>(e, a, &pairs, path),
        BinaryView => views::<BinaryViewType>(e, a, &pairs, path),
        List(_) => lists::<i32>(e, a, &pairs, path),
        LargeList(_) => lists::<i64>(e, a, &pairs, path),
        ListView(_) => list_views::<i32>(e, a, &pairs, path),
        LargeListView(_) => list_views::<i64>(e, a, &pairs, path),
        Map(..) => {
            let (e, a) = (e.as_map(), a.as_map());
            let items = items(
                &pairs,
                path,
                range(e.value_offsets()),
                range(a.value_offsets()),
            )?;
            compare(e.entries(), a.entries(), items, &format!("{path}.entries"))
        }
        FixedSizeList(_, size) => {
            let (e, a) = (e.as_fixed_size_list(), a.as_fixed_size_list());
            let size = *size as usize;
            let items = items(&pairs, path, |i| (i * size, size), |i| (i * size, size))?;
            compare(e.values(), a.values(), items, &format!("{path}.item"))
        }
        Struct(fields) => {
            let (e, a) = (e.as_struct(), a.as_struct());
            for (i, field) in fields.iter().enumerate() {
                let path = format!("{path}.{}", field.name());
                compare(e.column(i), a.column(i), pairs.clone(), &path)?;
            }
            Ok(())
        }
        Union(fields, _) => {
            let (e, a) = (e.as_union(), a.as_union());
            let ids = |ids: &[i8], i: usize| [ids[i] as u8];
            for p in &pairs {
                let (e, a) = (ids(e.type_ids(), p.e), ids(a.type_ids(), p.a));
                leaf(p, &format!("{path}.type_id"), &e, &a)?;
            }
            for (id, field) in fields.iter() {
                let chosen = pairs.iter().filter(|p| e.type_id(p.e) == id);
                let chosen = chosen.map(|p| Pair {
                    row: p.row,
                    e: e.value_offset(p.e),
                    a: a.value_offset(p.a),
                });
                compare(
                    e.child(id),
                    a.child(id),
                    chosen.collect(),
                    &format!("{path}.{}", field.name()),
                )?;
            }
            Ok(())
        }
        Dictionary(..) | RunEndEncoded(..) => {
            let ((ek, e), (ak, a)) = (indirect(e), indirect(a));
            let pairs = pairs.iter().map(|p| Pair {
                row: p.row,
                e: ek(p.e).unwrap(),
                a: ak(p.a).unwrap(),
            });
            compare(e, a, pairs.collect(), &format!("{path}.value"))
        }
        data_type => {
            let width = match data_type {
                FixedSizeBinary(width) => *width as usize,
                data_type => data_type
                    .primitive_width()
                    .unwrap_or_else(|| panic!("cannot compare {data_type}")),
            };
            let (e, a) = (e.to_data(), a.to_data());
            leaves(
                &pairs,
                path,
                |i| element(&e, width, i),
                |i| element(&a, width, i),
            )
        }
    }
}

fn texts<T: ByteArrayType>(
    e: &dyn Array,
    a: &dyn Array,
    pairs: &[Pair],
    path: &str,
) -> Result<(), String> {
    let (e, a) = (e.as_bytes::<T>(), a.as_bytes::<T>());
    leaves(
        pairs,
        path,
        |i| e.value(i).as_ref(),
        |i| a.value(i).as_ref(),
    )
}

fn views<T: ByteViewType>(
    e: &dyn Array,
    a: &dyn Array,
    pairs: &[Pair],
    path: &str,
) -> Result<(), String> {
    let (e, a) = (e.as_byte_view::<T>(), a.as_byte_view::<T>());
    leaves(
        pairs,
        path,
        |i| e.value(i).as_ref(),
        |i| a.value(i).as_ref(),
    )
}

fn element(data: &ArrayData, width: usize, i: usize) -> &[u8] {
    &data.buffers()[0].as_slice()[(data.offset() + i) * width..][..width]
}

fn bit(value: bool) -> &'static [u8] {
    if value { &[1] } else { &[0] }
}

fn leaves<'a>(
    pairs: &[Pair],
    path: &str,
    e: impl Fn(usize) -> &'a [u8],
    a: impl Fn(usize) -> &'a [u8],
) -> Result<(), String> {
    pairs.iter().try_for_each(|p| leaf(p, path, e(p.e), a(p.a)))
}

fn leaf(p: &Pair, path: &str, e: &[u8], a: &[u8]) -> Result<(), String> {
    if e == a {
        return Ok(());
    }
    Err(format!(
        "{path}: row {}: value: expected {e:02x?} (at {}), actual {a:02x?} (at {})",
        p.row, p.e, p.a
    ))
}

/// Nulls must agree; the pairs that are not null remain.
fn both_valid(
    e: &dyn Array,
    a: &dyn Array,
    mut pairs: Vec<Pair>,
    path: &str,
) -> Result<Vec<Pair>, String> {
    let (e_null, a_null) = (null(e), null(a));
    let text = |null| if null { "null" } else { "a value" };
    for p in &pairs {
        let (e, a) = (e_null(p.e), a_null(p.a));
        if e != a {
            let (e, a) = (text(e), text(a));
            return Err(format!(
                "{path}: row {}: null: expected {e} (at {}), actual {a} (at {})",
                p.row, p.e, p.a
            ));
        }
    }
    pairs.retain(|p| !e_null(p.e));
    Ok(pairs)
}

/// Logical nulls, except that a union is never null: its children are compared.
fn null(array: &dyn Array) -> Box<dyn Fn(usize) -> bool + '_> {
    match array.data_type() {
        DataType::Null => Box::new(|_| true),
        DataType::Dictionary(..) | DataType::RunEndEncoded(..) => {
            let (index, values) = indirect(array);
            let value_null = null(values);
            Box::new(move |i| index(i).is_none_or(&value_null))
        }
        _ => Box::new(|i| array.is_null(i)),
    }
}

type Index<'a> = Box<dyn Fn(usize) -> Option<usize> + 'a>;

/// Where a dictionary or run-end encoded array has its values.
fn indirect(array: &dyn Array) -> (Index<'_>, &dyn Array) {
    if let Some(dictionary) = array.as_any_dictionary_opt() {
        let keys = dictionary.keys();
        let keys: Vec<Option<usize>> = downcast_integer_array!(
            keys => keys.iter().map(|key| key.map(|key| key as usize)).collect(),
            other => panic!("dictionary keys of type {other}")
        );
        return (Box::new(move |i| keys[i]), dictionary.values());
    }
    downcast_run_array!(
        array => (Box::new(move |i| Some(array.get_physical_index(i))), array.values()),
        other => panic!("{other} has no values elsewhere")
    )
}

fn range<O: OffsetSizeTrait>(offsets: &[O]) -> impl Fn(usize) -> (usize, usize) {
    |i| {
        (
            offsets[i].as_usize(),
            offsets[i + 1].as_usize() - offsets[i].as_usize(),
        )
    }
}

/// Pairs of items from the ranges (start, length) of each list; the lengths must agree.
fn items(
    pairs: &[Pair],
    path: &str,
    e: impl Fn(usize) -> (usize, usize),
    a: impl Fn(usize) -> (usize, usize),
) -> Result<Vec<Pair>, String> {
    let mut items = vec![];
    for p in pairs {
        let ((e, e_length), (a, a_length)) = (e(p.e), a(p.a));
        if e_length != a_length {
            return Err(format!(
                "{path}: row {}: list length: expected {e_length}, actual {a_length}",
                p.row
            ));
        }
        items.extend((0..e_length).map(|i| Pair {
            row: p.row,
            e: e + i,
            a: a + i,
        }));
    }
    Ok(items)
}

fn lists<O: OffsetSizeTrait>(
    e: &dyn Array,
    a: &dyn Array,
    pairs: &[Pair],
    path: &str,
) -> Result<(), String> {
    let (e, a) = (e.as_list::<O>(), a.as_list::<O>());
    let items = items(
        pairs,
        path,
        range(e.value_offsets()),
        range(a.value_offsets()),
    )?;
    compare(e.values(), a.values(), items, &format!("{path}.item"))
}

fn list_views<O: OffsetSizeTrait>(
    e: &dyn Array,
    a: &dyn Array,
    pairs: &[Pair],
    path: &str,
) -> Result<(), String> {
    let (e, a) = (e.as_list_view::<O>(), a.as_list_view::<O>());
    let items = items(
        pairs,
        path,
        |i| (e.value_offset(i).as_usize(), e.value_size(i).as_usize()),
        |i| (a.value_offset(i).as_usize(), a.value_size(i).as_usize()),
    )?;
    compare(e.values(), a.values(), items, &format!("{path}.item"))
}
