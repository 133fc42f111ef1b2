//! One column of each type, for the checks of an import: arrays whose values have to be looked at, every seventh row null.

use std::sync::Arc;

use arrow_array::types::{Decimal128Type, Decimal256Type, Int32Type, Int64Type};
use arrow_array::{
    ArrayRef, BinaryViewArray, BooleanArray, DictionaryArray, FixedSizeBinaryArray,
    FixedSizeListArray, GenericBinaryArray, GenericListArray, GenericListViewArray,
    GenericStringArray, Int32Array, MapArray, NullArray, OffsetSizeTrait, PrimitiveArray, RunArray,
    StringArray, StringViewArray, StructArray, UnionArray,
};
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer, i256};
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Fields, UnionFields};

/// Text as programs have it, in ASCII and not; every third is too long for a view.
const ASCII: [&str; 3] = ["nine", "caterpillar", "a text of more than twelve bytes"];
const WIDE: [&str; 3] = ["füñf", "Raupe № 7", "Größe über zwölf Bytes: ÄÖÜ"];

/// Rows of each list, and of each run.
const ITEMS: usize = 3;

/// An array by the name of its type, or `None` if there is none of that name.
///
/// # Errors
/// arrow-rs's.
pub fn array(kind: &str, rows: usize) -> Result<Option<ArrayRef>, ArrowError> {
    let nulls = Some((0..rows).map(|row| row % 7 != 3).collect::<NullBuffer>());
    let ints = |rows: usize| Arc::new(Int32Array::from_iter_values((0..rows).map(number)));
    let item: FieldRef = Field::new("item", DataType::Int32, false).into();
    let array: ArrayRef = match kind {
        "int64" => {
            let values = (0..rows).map(|row| i64::from(number(row)));
            Arc::new(PrimitiveArray::<Int64Type>::new(values.collect(), nulls))
        }
        "decimal128" => {
            let values = (0..rows).map(|row| i128::from(number(row)));
            Arc::new(PrimitiveArray::<Decimal128Type>::new(
                values.collect(),
                nulls,
            ))
        }
        "decimal256" => {
            let values = (0..rows).map(|row| i256::from(i64::from(number(row))));
            let values = values.collect::<Vec<_>>().into();
            Arc::new(PrimitiveArray::<Decimal256Type>::new(values, nulls))
        }
        "boolean" => {
            let values = (0..rows).map(|row| number(row) % 2 == 0);
            Arc::new(BooleanArray::new(values.collect(), nulls))
        }
        "fixed_size_binary" => {
            let values = Buffer::from(vec![0xA5_u8; 12 * rows]);
            Arc::new(FixedSizeBinaryArray::try_new(12, values, nulls)?)
        }
        "utf8" => text::<i32>(&ASCII, rows, nulls)?,
        "utf8 not ASCII" => text::<i32>(&WIDE, rows, nulls)?,
        "large_utf8" => text::<i64>(&ASCII, rows, nulls)?,
        "binary" => binary::<i32>(rows, nulls)?,
        "large_binary" => binary::<i64>(rows, nulls)?,
        "utf8_view" => Arc::new(StringViewArray::from_iter(some(&ASCII, rows))),
        "utf8_view not ASCII" => Arc::new(StringViewArray::from_iter(some(&WIDE, rows))),
        "binary_view" => {
            let values = some(&ASCII, rows).map(|text| text.map(str::as_bytes));
            Arc::new(BinaryViewArray::from_iter(values))
        }
        "list" => list::<i32>(item, ints(ITEMS * rows), nulls)?,
        "large_list" => list::<i64>(item, ints(ITEMS * rows), nulls)?,
        "list_view" => list_view::<i32>(item, ints(ITEMS * rows), nulls)?,
        "large_list_view" => list_view::<i64>(item, ints(ITEMS * rows), nulls)?,
        "fixed_size_list" => {
            let values = ints(ITEMS * rows);
            let size = ITEMS as i32;
            Arc::new(FixedSizeListArray::try_new(item, size, values, nulls)?)
        }
        "struct" => {
            let (fields, columns) = pair(rows, nulls.as_ref())?;
            Arc::new(StructArray::try_new(fields, columns, nulls)?)
        }
        "map" => {
            let (fields, columns) = pair(ITEMS * rows, None)?;
            let entries = StructArray::try_new(fields.clone(), columns, None)?;
            let field = Field::new("entries", DataType::Struct(fields), false).into();
            let offsets = OffsetBuffer::from_repeated_length(ITEMS, rows);
            Arc::new(MapArray::try_new(field, offsets, entries, nulls, false)?)
        }
        "dictionary" => {
            let words = text::<i32>(&ASCII, 1000, None)?;
            let keys = (0..rows).map(|row| number(row) % 1000);
            let keys = PrimitiveArray::<Int32Type>::new(keys.collect(), nulls);
            Arc::new(DictionaryArray::try_new(keys, words)?)
        }
        "run_end_encoded" => {
            let ends = (1..=rows.div_ceil(ITEMS)).map(|run| (run * ITEMS).min(rows) as i32);
            let ends = Int32Array::from_iter_values(ends);
            let values = ints(ends.len());
            Arc::new(RunArray::<Int32Type>::try_new(&ends, &*values)?)
        }
        "dense_union" | "sparse_union" => union(kind == "dense_union", rows)?,
        "null" => Arc::new(NullArray::new(rows)),
        _ => return Ok(None),
    };
    Ok(Some(array))
}

fn number(row: usize) -> i32 {
    (row.wrapping_mul(0x9e37_79b9) >> 3) as i32 & 0x00ff_ffff
}

fn some<'a>(words: &'a [&str; 3], rows: usize) -> impl Iterator<Item = Option<&'a str>> {
    (0..rows).map(|row| (row % 7 != 3).then(|| words[row % words.len()]))
}

/// The offsets and bytes of texts.
fn words<O: OffsetSizeTrait>(words: &[&str; 3], rows: usize) -> (OffsetBuffer<O>, Buffer) {
    let texts = || (0..rows).map(|row| words[row % words.len()]);
    let offsets = OffsetBuffer::from_lengths(texts().map(str::len));
    (offsets, texts().collect::<String>().into_bytes().into())
}

fn text<O: OffsetSizeTrait>(
    of: &[&str; 3],
    rows: usize,
    nulls: Option<NullBuffer>,
) -> Result<ArrayRef, ArrowError> {
    let (offsets, bytes) = words(of, rows);
    Ok(Arc::new(GenericStringArray::<O>::try_new(
        offsets, bytes, nulls,
    )?))
}

fn binary<O: OffsetSizeTrait>(
    rows: usize,
    nulls: Option<NullBuffer>,
) -> Result<ArrayRef, ArrowError> {
    let (offsets, bytes) = words(&ASCII, rows);
    Ok(Arc::new(GenericBinaryArray::<O>::try_new(
        offsets, bytes, nulls,
    )?))
}

fn list<O: OffsetSizeTrait>(
    item: FieldRef,
    values: Arc<Int32Array>,
    nulls: Option<NullBuffer>,
) -> Result<ArrayRef, ArrowError> {
    let offsets = OffsetBuffer::from_repeated_length(ITEMS, values.len() / ITEMS);
    Ok(Arc::new(GenericListArray::<O>::try_new(
        item, offsets, values, nulls,
    )?))
}

fn list_view<O: OffsetSizeTrait>(
    item: FieldRef,
    values: Arc<Int32Array>,
    nulls: Option<NullBuffer>,
) -> Result<ArrayRef, ArrowError> {
    let rows = values.len() / ITEMS;
    let offsets: ScalarBuffer<O> = (0..rows).map(|row| O::usize_as(row * ITEMS)).collect();
    let sizes = std::iter::repeat_n(O::usize_as(ITEMS), rows).collect();
    Ok(Arc::new(GenericListViewArray::<O>::try_new(
        item, offsets, sizes, values, nulls,
    )?))
}

/// Columns of a struct, the first of which has nulls only where the struct has.
fn pair(rows: usize, nulls: Option<&NullBuffer>) -> Result<(Fields, Vec<ArrayRef>), ArrowError> {
    let numbers: Vec<_> = (0..rows).map(number).collect();
    let numbers = Int32Array::new(numbers.into(), nulls.cloned());
    let (offsets, bytes) = words(&ASCII, rows);
    let texts = StringArray::try_new(offsets, bytes, None)?;
    let fields = vec![
        Field::new("keys", DataType::Int32, false),
        Field::new("values", DataType::Utf8, true),
    ];
    Ok((fields.into(), vec![Arc::new(numbers), Arc::new(texts)]))
}

/// Numbers and texts in turn.
fn union(dense: bool, rows: usize) -> Result<ArrayRef, ArrowError> {
    let fields = [
        Field::new("number", DataType::Int32, true),
        Field::new("text", DataType::Utf8, true),
    ];
    let fields = UnionFields::try_new([3, 7], fields)?;
    let ids = (0..rows).map(|row| if row % 2 == 0 { 3_i8 } else { 7 });
    let offsets = dense.then(|| (0..rows).map(|row| row as i32 / 2).collect());
    let each = if dense { rows.div_ceil(2) } else { rows };
    let numbers = Int32Array::from_iter_values((0..each).map(number));
    let children = vec![
        Arc::new(numbers) as ArrayRef,
        text::<i32>(&ASCII, each, None)?,
    ];
    let array = UnionArray::try_new(fields, ids.collect(), offsets, children)?;
    Ok(Arc::new(array))
}
