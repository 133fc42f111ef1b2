//! Random bytes and batches.

use std::ops::Deref;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray,
};
use arrow_buffer::{Buffer, ScalarBuffer};
use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::stats::Res;

/// xorshift: enough that nothing on the way finds a pattern.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Fills with random bytes.
pub(crate) fn fill(bytes: &mut [u8], seed: u64) {
    let mut random = Random::new(seed);
    for part in bytes.chunks_mut(8) {
        let word = random.next().to_le_bytes();
        part.copy_from_slice(&word[..part.len()]);
    }
}

/// Ordinary memory of random bytes.
pub(crate) fn ordinary(bytes: usize, seed: u64) -> Buffer {
    let mut memory = vec![0u8; bytes];
    fill(&mut memory, seed);
    Buffer::from_vec(memory)
}

/// A batch of `columns` columns over equal parts of a buffer, without nulls.
pub(crate) fn over(buffer: &Buffer, columns: usize) -> Res<RecordBatch> {
    let fields = (0..columns).map(|i| Field::new(format!("c{i}"), DataType::Int64, false));
    let schema = Schema::new(fields.collect::<Vec<_>>());
    built(&Arc::new(schema), parts(buffer, columns))
}

/// Equal parts of a buffer.
pub(crate) fn parts(buffer: &Buffer, count: usize) -> impl Iterator<Item = Buffer> {
    let bytes = buffer.len() / count;
    (0..count).map(move |i| buffer.slice_with_length(i * bytes, bytes))
}

/// A batch whose columns have these values, without nulls.
pub(crate) fn built(
    schema: &SchemaRef,
    values: impl IntoIterator<Item = Buffer>,
) -> Res<RecordBatch> {
    let columns = values
        .into_iter()
        .map(|values| -> ArrayRef { Arc::new(Int64Array::new(ScalarBuffer::from(values), None)) });
    Ok(RecordBatch::try_new(schema.clone(), columns.collect())?)
}

/// A batch of columns of four kinds in turn: Int64 and Int32 with nulls, Float64 without, text with
/// nulls.
pub(crate) fn mixed(columns: usize, rows: usize) -> Res<RecordBatch> {
    let mut random = Random::new(7);
    let arrays = (0..columns).map(|i| -> (String, ArrayRef) {
        let mut values = (0..rows).map(|_| random.next());
        let valid = |v: &u64| v % 8 != 0;
        let array: ArrayRef = match i % 4 {
            0 => Arc::new(Int64Array::from_iter(
                values.map(|v| valid(&v).then_some(v as i64)),
            )),
            1 => Arc::new(Float64Array::from_iter_values(values.map(|v| v as f64))),
            2 => {
                let texts = values.map(|v| valid(&v).then(|| (v % 1_000_000).to_string()));
                Arc::new(texts.collect::<StringArray>())
            }
            _ => Arc::new(Int32Array::from_iter(
                values.by_ref().map(|v| valid(&v).then_some(v as i32)),
            )),
        };
        (format!("c{i}"), array)
    });
    Ok(RecordBatch::try_from_iter(arrays)?)
}

/// A batch of text columns without nulls.
pub(crate) fn texts(columns: usize, rows: usize) -> Res<RecordBatch> {
    let mut random = Random::new(8);
    let arrays = (0..columns).map(|i| -> (String, ArrayRef) {
        let values = (0..rows).map(|_| format!("{:x}", random.next() >> (random.next() % 60)));
        (
            format!("c{i}"),
            Arc::new(StringArray::from_iter_values(values)),
        )
    });
    Ok(RecordBatch::try_from_iter(arrays)?)
}

/// All buffers of a batch that are not empty, masks included.
pub(crate) fn buffers(batch: &RecordBatch) -> Vec<Buffer> {
    let mut all = Vec::new();
    for column in batch.columns() {
        let data = column.to_data();
        all.extend(data.nulls().map(|nulls| nulls.buffer().clone()));
        all.extend(data.buffers().iter().cloned());
    }
    all.retain(|buffer| !buffer.is_empty());
    all
}

/// Copies buffers behind each other, each to a multiple of 64 bytes.
pub(crate) fn pack<B: Deref<Target = [u8]>>(to: &mut [u8], buffers: impl IntoIterator<Item = B>) {
    let mut at = 0;
    for buffer in buffers {
        to[at..][..buffer.len()].copy_from_slice(&buffer);
        at += buffer.len().next_multiple_of(64);
    }
}
