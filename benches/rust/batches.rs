//! The batches that are measured.

use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray,
};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{ArrowError, Field, Schema};

use crate::validation;

/// Whatever goes wrong, as text.
pub type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// A batch by the name of its kind: "mixed", "integers", "text", or a type of [`validation`].
///
/// # Errors
/// No such kind; arrow-rs's.
pub fn named(kind: &str, columns: usize, rows: usize) -> Result<RecordBatch, ArrowError> {
    match kind {
        "mixed" => batch(columns, |i| mixed(i, rows)),
        "integers" => batch(columns, |i| {
            Arc::new(Int64Array::from_iter_values(
                (0..rows).map(|row| (row * columns + i) as i64),
            ))
        }),
        "text" => batch(columns, |i| text(i, rows)),
        _ => match validation::array(kind, rows)? {
            Some(array) => batch(columns, |_| array.clone()),
            None => Err(ArrowError::InvalidArgumentError(format!(
                "no batches are called {kind}"
            ))),
        },
    }
}

fn seed(column: usize, row: usize) -> u64 {
    let mixed = (column as u64) << 32 | row as u64;
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

/// In turn 64 bit integers, text, nullable floats and 32 bit integers.
fn mixed(i: usize, rows: usize) -> ArrayRef {
    let values = (0..rows).map(|row| seed(i, row));
    match i % 4 {
        0 => Arc::new(Int64Array::from_iter_values(values.map(|v| v as i64))),
        1 => text(i, rows),
        2 => Arc::new(Float64Array::from_iter(
            values.map(|v| (!v.is_multiple_of(7)).then_some(v as f64)),
        )),
        _ => Arc::new(Int32Array::from_iter_values(values.map(|v| v as i32))),
    }
}

/// Text of 3 to 8 digits.
fn text(i: usize, rows: usize) -> ArrayRef {
    let (mut bytes, mut ends) = (Vec::with_capacity(rows * 8), Vec::with_capacity(rows + 1));
    ends.push(0);
    for row in 0..rows {
        let v = seed(i, row);
        let digits = (v | 0x3030_3030_3030_3030) & 0x3737_3737_3737_3737;
        bytes.extend_from_slice(&digits.to_le_bytes()[..3 + (v >> 60) as usize % 6]);
        ends.push(bytes.len() as i32);
    }
    let ends = OffsetBuffer::new(ScalarBuffer::from(ends));
    bytes.shrink_to_fit();
    Arc::new(StringArray::new(ends, bytes.into(), None))
}

fn batch(columns: usize, column: impl Fn(usize) -> ArrayRef) -> Result<RecordBatch, ArrowError> {
    let columns: Vec<ArrayRef> = (0..columns).map(column).collect();
    let fields = columns.iter().enumerate().map(|(i, column)| {
        Field::new(
            format!("c{i}"),
            column.data_type().clone(),
            column.null_count() > 0,
        )
    });
    RecordBatch::try_new(Arc::new(Schema::new(fields.collect::<Vec<_>>())), columns)
}
