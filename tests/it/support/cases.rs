//! The arrays and batches that a test of any type goes through.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, BooleanArray, RecordBatch, RecordBatchOptions};
use arrow_buffer::{BooleanBuffer, NullBuffer};
use arrow_schema::{DataType, Field, Schema};

use super::r#gen::{Nulls, array};
use super::types::list;
use super::variants::{Variant, mixed, variants};

/// The rows of a long array: bitmaps of several words, more rows than the smallest keys count. More rows take time only.
const LONG: usize = 140;

/// How many of [`cases`] have the same number of rows in every type: the first ones.
pub(crate) const SAME_ROWS: usize = 12;

/// Whether only a part of what is tested exhaustively elsewhere is tested: where each step takes long, as under a sanitizer.
pub(crate) fn in_part() -> bool {
    std::env::var_os("ARROW_DEVICE_TEST_PART").is_some()
}

/// Empty, short, long, with and without nulls, sliced at odd places, and in all variants. Every second one if
/// [`in_part`], the others for the next seed.
pub(crate) fn cases(data_type: &DataType, seed: u64) -> Vec<(String, ArrayRef)> {
    let all = all_cases(data_type, seed);
    match in_part() {
        true => all.into_iter().skip(seed as usize % 2).step_by(2).collect(),
        false => all,
    }
}

fn all_cases(data_type: &DataType, seed: u64) -> Vec<(String, ArrayRef)> {
    let mut cases = vec![];
    for (rows, nulls) in [
        (0, Nulls::Some),
        (1, Nulls::None),
        (1, Nulls::All),
        (LONG, Nulls::None),
        (LONG, Nulls::Some),
        (LONG, Nulls::All),
    ] {
        cases.push((
            format!("{rows} rows, nulls {nulls:?}"),
            array(data_type, rows, nulls, seed),
        ));
    }
    let long = array(data_type, LONG, Nulls::Some, seed + 1);
    for (offset, rows) in [(1, 0), (3, 5), (7, 61), (LONG - 63, 63)] {
        cases.push((format!("slice({offset}, {rows})"), long.slice(offset, rows)));
    }
    cases.push((
        "slice(51, 80).slice(9, 65)".into(),
        long.slice(51, 80).slice(9, 65),
    ));
    let sliced = array(data_type, 90, Nulls::None, seed + 2).slice(9, 77);
    cases.push(("slice(9, 77), nulls None".into(), sliced));
    let made = variants(&array(data_type, 40, Nulls::Some, seed + 3), seed);
    let plain = array(data_type, 19, Nulls::None, seed + 4);
    let plain = [Variant::Sliced(3), Variant::Both(11)].map(|variant| variant.of(&plain, seed));
    let made = made.into_iter().skip(1).chain(plain.into_iter().flatten());
    cases.extend(made.map(|made| {
        let name = format!("{} rows, {:?}", made.rows.len(), made.variant);
        (name, made.array())
    }));
    cases
}

/// A valid array that `ArrayData::validate` rejects: values at bit 7, and a null buffer without spare bytes.
pub(crate) fn boolean_with_tight_nulls() -> ArrayRef {
    let values = BooleanBuffer::collect_bool(71, |i| i % 3 == 0).slice(7, 64);
    let nulls = NullBuffer::new(BooleanBuffer::collect_bool(64, |i| i % 5 != 0));
    Arc::new(BooleanArray::new(values, Some(nulls)))
}

fn pairs<const N: usize>(pairs: [(&str, &str); N]) -> HashMap<String, String> {
    pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
}

fn schema_metadata() -> HashMap<String, String> {
    pairs([("origin", "tests"), ("ключ", "значение"), ("empty", "")])
}

/// A batch with one column of each type, in one variant after the other; metadata on the schema and on two of every
/// three fields.
pub(crate) fn batch(types: &[DataType], rows: usize, nulls: Nulls, seed: u64) -> RecordBatch {
    mixed(&whole_batch(types, rows, nulls, seed), seed)
}

/// As [`batch`], of whole columns: for tests that count bytes, or say where they lie.
pub(crate) fn whole_batch(types: &[DataType], rows: usize, nulls: Nulls, seed: u64) -> RecordBatch {
    let fields = types.iter().enumerate().map(|(i, data_type)| {
        let field = Field::new(format!("c{i}"), data_type.clone(), true);
        match i % 3 {
            0 => field,
            1 => field.with_metadata(pairs([("note", "plain")])),
            _ => field.with_metadata(pairs([
                ("ARROW:extension:name", "tests.opaque"),
                ("ARROW:extension:metadata", "{\"a\": 1}"),
            ])),
        }
    });
    let schema = Schema::new(fields.collect::<Vec<_>>()).with_metadata(schema_metadata());
    let columns = types
        .iter()
        .zip(seed..)
        .map(|(t, seed)| array(t, rows, nulls, seed))
        .collect();
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::new(schema), columns, &options).unwrap()
}

/// Many columns: fixed width, strings, booleans, views and lists in turn.
pub(crate) fn wide_batch(columns: usize, rows: usize) -> RecordBatch {
    use DataType::*;
    let types = [
        Int64,
        Utf8,
        Boolean,
        list(Int32),
        Float64,
        Utf8View,
        Decimal128(20, 2),
        Int8,
    ];
    let types: Vec<_> = types.into_iter().cycle().take(columns).collect();
    batch(&types, rows, Nulls::Some, 17)
}

/// Rows, but no columns.
pub(crate) fn zero_column_batch(rows: usize) -> RecordBatch {
    batch(&[], rows, Nulls::None, 0)
}
