//! The batches that are measured.

use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{ArrowError, Field, Schema};

/// `columns` columns in turn of 64 bit integers, text, nullable floats and 32 bit integers.
///
/// # Errors
/// arrow-rs's.
pub fn mixed(columns: usize, rows: usize) -> Result<RecordBatch, ArrowError> {
    let seed = |column: usize, row: usize| {
        let mixed = (column as u64) << 32 | row as u64;
        mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
    };
    let column = |i: usize| -> ArrayRef {
        let values = (0..rows).map(|row| seed(i, row));
        match i % 4 {
            0 => Arc::new(Int64Array::from_iter_values(values.map(|v| v as i64))),
            1 => Arc::new(StringArray::from_iter_values(values.map(|v| {
                format!("{:0width$}", v % 1_000, width = 3 + (v >> 32) as usize % 6)
            }))),
            2 => Arc::new(Float64Array::from_iter(
                values.map(|v| (!v.is_multiple_of(7)).then_some(v as f64)),
            )),
            _ => Arc::new(Int32Array::from_iter_values(values.map(|v| v as i32))),
        }
    };
    batch(columns, column)
}

/// `columns` columns of 64 bit integers.
///
/// # Errors
/// arrow-rs's.
pub fn integers(columns: usize, rows: usize) -> Result<RecordBatch, ArrowError> {
    batch(columns, |i| {
        Arc::new(Int64Array::from_iter_values(
            (0..rows).map(|row| (row * columns + i) as i64),
        ))
    })
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
