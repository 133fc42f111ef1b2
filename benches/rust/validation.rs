//! Nested columns, for the checks of an import: arrays whose values have to be looked at, every seventh row null.

use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, DictionaryArray, Int32Array, ListArray, PrimitiveArray, StringArray, StructArray,
    UnionArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_schema::{ArrowError, DataType, Field, Fields, UnionFields};

/// Rows of each list.
const ITEMS: usize = 3;

/// An array by the name of its type, or `None` if there is none of that name.
///
/// # Errors
/// arrow-rs's.
pub fn array(kind: &str, rows: usize) -> Result<Option<ArrayRef>, ArrowError> {
    let nulls = Some((0..rows).map(|row| row % 7 != 3).collect::<NullBuffer>());
    let array: ArrayRef = match kind {
        "list" => {
            let item = Field::new("item", DataType::Int32, false).into();
            let offsets = OffsetBuffer::from_repeated_length(ITEMS, rows);
            let items = Int32Array::from_iter_values((0..ITEMS * rows).map(number));
            Arc::new(ListArray::try_new(item, offsets, Arc::new(items), nulls)?)
        }
        "struct" => {
            let numbers: Vec<_> = (0..rows).map(number).collect();
            // Null only where the struct is.
            let numbers = Int32Array::new(numbers.into(), nulls.clone());
            let fields = vec![
                Field::new("keys", DataType::Int32, false),
                Field::new("values", DataType::Utf8, true),
            ];
            let columns = vec![Arc::new(numbers) as ArrayRef, texts(rows)];
            Arc::new(StructArray::try_new(Fields::from(fields), columns, nulls)?)
        }
        "dictionary" => {
            let keys = (0..rows).map(|row| number(row) % 1000);
            let keys = PrimitiveArray::<Int32Type>::new(keys.collect(), nulls);
            Arc::new(DictionaryArray::try_new(keys, texts(1000))?)
        }
        "dense_union" => union(rows)?,
        _ => return Ok(None),
    };
    Ok(Some(array))
}

fn number(row: usize) -> i32 {
    (row.wrapping_mul(0x9e37_79b9) >> 3) as i32 & 0x00ff_ffff
}

fn texts(rows: usize) -> ArrayRef {
    const TEXTS: [&str; 3] = ["nine", "caterpillar", "a text of more than twelve bytes"];
    let texts = (0..rows).map(|row| TEXTS[row % TEXTS.len()]);
    Arc::new(StringArray::from_iter_values(texts))
}

/// Numbers and texts in turn.
fn union(rows: usize) -> Result<ArrayRef, ArrowError> {
    let fields = [
        Field::new("number", DataType::Int32, true),
        Field::new("text", DataType::Utf8, true),
    ];
    let fields = UnionFields::try_new([3, 7], fields)?;
    let ids = (0..rows).map(|row| if row % 2 == 0 { 3_i8 } else { 7 });
    let offsets = (0..rows).map(|row| row as i32 / 2).collect();
    let each = rows.div_ceil(2);
    let numbers = Int32Array::from_iter_values((0..each).map(number));
    let children = vec![Arc::new(numbers) as ArrayRef, texts(each)];
    let array = UnionArray::try_new(fields, ids.collect(), Some(offsets), children)?;
    Ok(Arc::new(array))
}
