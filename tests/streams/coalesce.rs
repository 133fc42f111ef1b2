//! Small batches that are joined before they go to a device.

use std::sync::Arc;

use arrow_array::builder::PrimitiveRunBuilder;
use arrow_array::types::{Int16Type, Int64Type};
use arrow_array::{
    ArrayRef, Int32Array, RecordBatch, RecordBatchIterator, RecordBatchOptions, RecordBatchReader,
    StringArray,
};
use arrow_device::device::sim::SimMode;
use arrow_device::{CoalescingReader, DeviceRecordBatchReader, UploadingReader};
use arrow_schema::{ArrowError, DataType, Field, Schema};

use crate::simkit::Sim;
use crate::support::{Nulls, all_types, assert_same_batch, batch};

fn coalesce(
    batches: Vec<Result<RecordBatch, ArrowError>>,
    rows: usize,
) -> CoalescingReader<impl RecordBatchReader> {
    let schema = batches.iter().flatten().next().unwrap().schema();
    CoalescingReader::new(RecordBatchIterator::new(batches, schema), rows)
}

fn ints(rows: usize) -> RecordBatch {
    let values: ArrayRef = Arc::new(Int32Array::from_iter_values(0..rows as i32));
    RecordBatch::try_from_iter([("i", values)]).unwrap()
}

fn rows(reader: CoalescingReader<impl RecordBatchReader>) -> Vec<usize> {
    reader.map(|b| b.unwrap().num_rows()).collect()
}

fn has_dictionary(data_type: &DataType) -> bool {
    format!("{data_type:?}").contains("Dictionary")
}

/// Every type: whole batches, slices, with and without nulls.
#[test]
fn values_are_those_of_the_parts() {
    let mut joined_types = 0;
    for (name, data_type) in all_types() {
        let types = [data_type.clone(), DataType::Int32];
        let parts: Vec<_> = [
            (7, Nulls::Some),
            (1, Nulls::None),
            (30, Nulls::Some),
            (5, Nulls::All),
        ]
        .into_iter()
        .zip(1..)
        .map(|((rows, nulls), seed)| batch(&types, rows + 4, nulls, seed).slice(3, rows))
        .collect();
        let all: Vec<_> = coalesce(parts.iter().cloned().map(Ok).collect(), 1000).collect();
        if has_dictionary(&data_type) {
            assert_eq!(all.len(), 4, "{name}");
            continue;
        }
        joined_types += 1;
        let [Ok(joined)] = all.as_slice() else {
            panic!("{name}: {} batches", all.len());
        };
        assert_eq!(joined.num_rows(), 43);
        let mut first = 0;
        for (i, part) in parts.iter().enumerate() {
            let rows = joined.slice(first, part.num_rows());
            assert_same_batch(part, &rows, format!("{name}, part {i}"));
            first += part.num_rows();
        }
        for column in joined.columns() {
            column
                .to_data()
                .validate_full()
                .unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
    assert!(joined_types > 30, "{joined_types} types");
}

#[test]
fn where_batches_end() {
    let joined =
        |sizes: &[usize], n: usize| rows(coalesce(sizes.iter().map(|n| Ok(ints(*n))).collect(), n));
    assert_eq!(joined(&[4, 4, 4, 4, 4], 8), [8, 8, 4]);
    assert_eq!(joined(&[3, 3, 3, 3, 3], 8), [9, 6], "none is cut");
    assert_eq!(joined(&[3, 20, 3, 3], 8), [3, 20, 6], "large ones pass");
    assert_eq!(joined(&[8, 1, 8], 8), [8, 1, 8]);
    assert_eq!(joined(&[0, 5, 0, 0, 2, 0], 8), [7], "no empty ones");
    assert_eq!(joined(&[0, 0], 8), [0; 0]);
    assert_eq!(joined(&[2, 0, 2], 0), [2, 0, 2], "nothing is joined");
    // What passes is not copied.
    let large = ints(20);
    let first = coalesce(vec![Ok(large.clone())], 8)
        .next()
        .unwrap()
        .unwrap();
    assert!(Arc::ptr_eq(first.column(0), large.column(0)));
}

#[test]
fn batches_without_columns() {
    let options = RecordBatchOptions::new().with_row_count(Some(5));
    let schema = Arc::new(Schema::empty());
    let part = RecordBatch::try_new_with_options(schema, vec![], &options).unwrap();
    assert_eq!(rows(coalesce(vec![Ok(part.clone()), Ok(part)], 100)), [10]);
}

#[test]
fn errors_and_other_schemas_keep_their_place() {
    let error = || Err(ArrowError::ParseError("line 7".into()));
    let mut reader = coalesce(vec![Ok(ints(2)), Ok(ints(3)), error(), Ok(ints(4))], 100);
    assert_eq!(reader.next().unwrap().unwrap().num_rows(), 5);
    assert!(
        reader
            .next()
            .unwrap()
            .unwrap_err()
            .to_string()
            .contains("line 7")
    );
    // An error is the end.
    assert!(reader.next().is_none() && reader.next().is_none());
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    let other = RecordBatch::try_from_iter([("t", text)]).unwrap();
    assert_eq!(
        rows(coalesce(
            vec![Ok(ints(2)), Ok(ints(3)), Ok(other), Ok(ints(4))],
            100
        )),
        [5, 1, 4]
    );
}

/// What does not fit in one array comes as it was.
#[test]
fn what_cannot_be_joined_passes() {
    let mut runs = PrimitiveRunBuilder::<Int16Type, Int64Type>::new();
    runs.extend((0..20_000).map(|i| Some(i / 1000)));
    let runs: ArrayRef = Arc::new(runs.finish());
    let part = RecordBatch::try_from_iter([("r", runs)]).unwrap();
    let all: Vec<_> = coalesce(vec![Ok(part.clone()), Ok(part.clone())], 30_000).collect();
    assert_eq!(all.len(), 2);
    for back in all {
        assert_same_batch(
            &part,
            &back.unwrap(),
            "40,000 rows are more than 16 bit run ends can say",
        );
    }
}

/// A reader that has ended is not asked again.
#[test]
fn the_end_is_the_end() {
    let mut left = vec![None, Some(Ok(ints(2)))];
    let batches = std::iter::from_fn(move || left.pop().expect("asked again"));
    let reader = RecordBatchIterator::new(batches, ints(0).schema());
    let mut reader = CoalescingReader::new(reader, 100);
    assert_eq!(reader.next().unwrap().unwrap().num_rows(), 2);
    for _ in 0..2 {
        assert!(reader.next().is_none());
    }
}

/// One allocation, one list, one event where there were many.
#[test]
fn one_upload_for_many_batches() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let reader = coalesce((0..100).map(|_| Ok(ints(50))).collect(), 1000);
    let before = sim.stats();
    let host = UploadingReader::new(reader, &sim).into_host_reader();
    let back: Vec<_> = host.map(|b| b.unwrap()).collect();
    let cost = sim.stats().since(&before);
    assert_eq!((cost.allocations, back.len()), (5, 5));
    for back in &back {
        for i in 0..20 {
            assert_same_batch(&ints(50), &back.slice(i * 50, 50), i);
        }
    }
    drop(back);
    sim.assert_done();
}

/// arrow-rs lets a column's type differ from its schema's in what nested fields may be null.
#[test]
fn columns_of_other_types_pass_as_they_are() {
    let list = |nullable| DataType::List(Arc::new(Field::new("item", DataType::Int32, nullable)));
    let schema = |nullable| Arc::new(Schema::new(vec![Field::new("l", list(nullable), true)]));
    let made = |nullable| {
        let mut batch = batch(&[list(nullable)], 5, Nulls::None, 3);
        batch = RecordBatch::try_new(schema(nullable), batch.columns().to_vec()).unwrap();
        batch.with_schema(schema(true)).unwrap()
    };
    let sent = [made(true), made(true), made(false), made(true)];
    let reader = RecordBatchIterator::new(sent.clone().map(Ok), schema(true));
    let rows: Vec<_> = CoalescingReader::new(reader, 100)
        .map(|joined| joined.unwrap().num_rows())
        .collect();
    assert_eq!(rows, [10, 5, 5]);
}
