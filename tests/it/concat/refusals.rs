//! What a concatenation refuses.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, DictionaryArray, RecordBatch, StringArray, types};
use arrow_device::device::sim::SimMode;
use arrow_device::{DeviceArray, DeviceRecordBatch};
use arrow_schema::{DataType, Field, Schema};

use crate::arrays::refused;
use crate::concat::{nullable, plain, texts};
use crate::simkit::*;
use crate::support::*;

/// Every refusal says what, where and what to do, and leaves nothing behind.
#[test]
fn refusals() {
    let sim = Sim::new(SimMode::Deferred);
    let other = Sim::new(SimMode::Deferred);
    let schema = Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, true)]));
    refused(DeviceArray::concat(&[]), &["nothing to concatenate"]);
    refused(
        DeviceRecordBatch::concat(&schema, &[], None),
        &["nothing to concatenate"],
    );

    let ints = sim.upload_array(&nullable(5)).unwrap();
    let strings = sim.upload_array(&texts(5)).unwrap();
    let there = other.upload_array(&nullable(5)).unwrap();
    refused(
        DeviceArray::concat(&[&ints, &ints, &there]),
        &["input 2", "to_device"],
    );
    refused(
        DeviceArray::concat(&[&ints, &strings]),
        &["array is Utf8 in array 1", "Int64", "cast"],
    );

    use crate::support::types::{list, structure};
    let nested = |item| list(structure(vec![("a", DataType::Int64), ("b", item)]));
    let a = sim
        .upload_array(&array(&nested(DataType::Utf8), 5, Nulls::Some, 1))
        .unwrap();
    let b = sim
        .upload_array(&array(&nested(DataType::Binary), 5, Nulls::Some, 1))
        .unwrap();
    let path = "array.children[0].children[1] is Binary in array 1";
    refused(DeviceArray::concat(&[&a, &b]), &[path]);

    let batch = |column: ArrayRef| {
        let batch = RecordBatch::try_from_iter([("id", column)]).unwrap();
        sim.upload(&batch).unwrap()
    };
    let (good, bad) = (batch(nullable(5)), batch(texts(5)));
    let queue = other.default_queue();
    let wrong = DeviceRecordBatch::concat(&schema, std::slice::from_ref(&good), &queue);
    refused(wrong, &["queue"]);
    let wrong = DeviceRecordBatch::concat(&schema, &[good.clone(), bad], None);
    refused(wrong, &["column 'id'", "batch 1", "Utf8", "the schema"]);
    let empty = Arc::new(Schema::empty());
    let wrong = DeviceRecordBatch::concat(&empty, std::slice::from_ref(&good), None);
    refused(wrong, &["batch 0 has 1 columns", "0"]);
    let strict = Arc::new(Schema::new(vec![Field::new("id", DataType::Int64, false)]));
    refused(
        DeviceRecordBatch::concat(&strict, &[good], None),
        &["column 'id'", "2 nulls", "not nullable"],
    );
    // Without nulls it may be.
    let full = batch(plain(5));
    let joined = DeviceRecordBatch::concat(&strict, &[full.clone(), full], None).unwrap();
    assert_eq!(joined.to_host().unwrap().num_rows(), 10);
    drop(joined);

    // Keys of one byte, below a list: 2 * 100 values.
    let keys = (0..100i8).collect();
    let values: ArrayRef = Arc::new(StringArray::from_iter_values(
        (0..100).map(|i| i.to_string()),
    ));
    let dictionary = DictionaryArray::<types::Int8Type>::new(keys, values);
    let item = Arc::new(Field::new("item", dictionary.data_type().clone(), true));
    let offsets = arrow_buffer::OffsetBuffer::from_lengths([60, 40]);
    let lists = arrow_array::ListArray::new(item, offsets, Arc::new(dictionary), None);
    let (one, two) = (
        sim.upload_array(&lists).unwrap(),
        sim.upload_array(&lists).unwrap(),
    );
    let words = [
        "array.children[0]",
        "200 dictionary values, at most 128",
        "wider keys",
        "Int8",
    ];
    refused(DeviceArray::concat(&[&one, &two]), &words);
    // The same dictionary has room.
    assert_eq!(DeviceArray::concat(&[&one, &one]).unwrap().len(), 4);

    let ree = |n| {
        array(
            &crate::support::types::run_ends(DataType::Int16, DataType::Int32),
            n,
            Nulls::None,
            3,
        )
    };
    let long = sim.upload_array(&ree(20_000)).unwrap();
    let rows = "40000 rows, at most 32767";
    refused(
        DeviceArray::concat(&[&long, &long]),
        &["array.children[0]", rows, "wider run ends"],
    );

    drop((ints, strings, there, a, b, one, two, long));
    sim.assert_done();
    other.assert_done();
}
