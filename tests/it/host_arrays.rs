//! Batches are read array by array, without `ArrayData`: what comes of it is what comes of `ArrayData`.

use std::any::Any;
use std::sync::Arc;

use crate::support::types::structure;
use crate::support::*;
use arrow_array::{
    Array, ArrayRef, Int32Array, Int64Array, RecordBatch, RecordBatchOptions, StringArray,
    StructArray, UnionArray,
};
use arrow_buffer::{NullBuffer, ScalarBuffer};
use arrow_data::ArrayData;
use arrow_device::{DeviceArray, DeviceRecordBatch, Devices, Error};
use arrow_schema::{DataType, Field, Fields, Schema, UnionFields, UnionMode};

fn one_column(array: &ArrayRef) -> RecordBatch {
    let field = Field::new("c", array.data_type().clone(), true);
    RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![array.clone()]).unwrap()
}

/// Type, rows, nulls and where every buffer is, with all descendants.
fn assert_same_memory(a: &DeviceArray, b: &DeviceArray, context: &str) {
    let head = |a: &DeviceArray| {
        let counts = (a.num_buffers(), a.num_children());
        (
            a.data_type().clone(),
            a.len(),
            a.offset(),
            a.null_count(),
            counts,
        )
    };
    assert_eq!(head(a), head(b), "{context}");
    for i in 0..a.num_buffers() {
        let buffer = |a: &DeviceArray| a.buffer(i).map(|b| (b.address(), b.len()));
        assert_eq!(buffer(a), buffer(b), "{context}: buffer {i}");
    }
    for i in 0..a.num_children() {
        let context = format!("{context}: child {i}");
        assert_same_memory(&a.child(i).unwrap(), &b.child(i).unwrap(), &context);
    }
}

/// `array` as a column, after the batch is gone; and as data.
fn both(array: &ArrayRef) -> (DeviceArray, DeviceArray) {
    let cpu = Devices::cpu();
    let batch = cpu.upload(&one_column(array)).unwrap();
    let column = batch.column(0).unwrap();
    (column, cpu.upload_array(array).unwrap())
}

fn check(array: ArrayRef, context: &str) {
    let expected = array.slice(0, array.len());
    let (column, data) = both(&array);
    drop(array);
    assert_same_memory(&column, &data, context);
    drop(data);
    // Masks that start elsewhere than their values show here.
    assert_same(&expected, &column.to_host().unwrap(), context);
}

#[test]
fn columns_of_every_type() {
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        for (case, array) in cases(&data_type, i as u64) {
            check(array, &format!("{name}, {case}"));
        }
    }
    check(boolean_with_tight_nulls(), "boolean with tight nulls");
}

/// An array that arrow-rs does not know; its memory is gone with the data that it hands out.
#[derive(Debug)]
struct Foreign(ArrayRef);

// SAFETY: every method but `as_any` returns what the inner array, which is valid, returns.
unsafe impl Array for Foreign {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn to_data(&self) -> ArrayData {
        // A copy, so that nothing else keeps it.
        let rows = arrow_array::UInt32Array::from_iter_values(0..self.len() as u32);
        let copy = arrow_select::take::take(&self.0, &rows, None);
        copy.unwrap().to_data()
    }
    fn into_data(self) -> ArrayData {
        self.to_data()
    }
    fn data_type(&self) -> &DataType {
        self.0.data_type()
    }
    fn slice(&self, offset: usize, length: usize) -> ArrayRef {
        Arc::new(Self(self.0.slice(offset, length)))
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    fn offset(&self) -> usize {
        self.0.offset()
    }
    fn nulls(&self) -> Option<&NullBuffer> {
        self.0.nulls()
    }
    fn get_buffer_memory_size(&self) -> usize {
        self.0.get_buffer_memory_size()
    }
    fn get_array_memory_size(&self) -> usize {
        self.0.get_array_memory_size()
    }
}

#[test]
fn arrays_of_other_crates() {
    let inner: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("ccc")]));
    let foreign: ArrayRef = Arc::new(Foreign(inner.clone()));
    let ours: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
    let fields = Fields::from(vec![
        Field::new("a", DataType::Int32, true),
        Field::new("b", DataType::Utf8, true),
    ]);
    let nested: ArrayRef = Arc::new(StructArray::new(
        fields.clone(),
        vec![ours.clone(), foreign.clone()],
        None,
    ));
    let expected: ArrayRef = Arc::new(StructArray::new(
        fields,
        vec![ours.clone(), inner.clone()],
        None,
    ));
    for (array, expected) in [(foreign, inner), (nested, expected)] {
        let (column, _) = both(&array);
        drop(array);
        assert_same(&expected, &column.to_host().unwrap(), "of another crate");
    }
}

/// arrow-rs lets a schema have the children of a union in another order: read as the schema says, they
/// would be taken for each other.
#[test]
fn unions_in_another_order_are_refused() {
    let children: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from(vec![1, 2])),
        Arc::new(StringArray::from(vec!["x", "yy"])),
    ];
    refused(children);
    // Only the ids tell.
    let ints = |n| Arc::new(Int64Array::from(vec![n, n])) as ArrayRef;
    refused(vec![ints(1), ints(2)]);
}

fn refused(children: Vec<ArrayRef>) {
    let field = |i: usize| {
        let field = Field::new(format!("f{i}"), children[i].data_type().clone(), true);
        (i as i8, Arc::new(field))
    };
    let fields: UnionFields = [field(0), field(1)].into_iter().collect();
    let turned: UnionFields = [field(1), field(0)].into_iter().collect();
    let ids = ScalarBuffer::from(vec![0i8, 1]);
    let union: ArrayRef = Arc::new(UnionArray::try_new(fields, ids, None, children).unwrap());
    let rows = vec![Arc::new(Field::new("u", union.data_type().clone(), true))];
    let nested: ArrayRef = Arc::new(StructArray::new(rows.into(), vec![union.clone()], None));

    let turned = DataType::Union(turned, UnionMode::Sparse);
    let turned_rows = DataType::Struct(vec![Field::new("u", turned.clone(), true)].into());
    for (array, data_type) in [(union, turned), (nested, turned_rows)] {
        let (column, _) = both(&array);
        assert_same(&array, &column.to_host().unwrap(), "in its own order");
        let schema = Arc::new(Schema::new(vec![Field::new("c", data_type, true)]));
        let options = RecordBatchOptions::new().with_match_field_names(false);
        let batch = RecordBatch::try_new_with_options(schema, vec![array], &options).unwrap();
        let refused = Devices::cpu().upload(&batch).unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument(_)), "{refused}");
    }
}

/// A schema's own names for nested fields are kept, as ever.
#[test]
fn other_names_are_the_schemas() {
    let array = crate::support::array(&structure(vec![("x", DataType::Int32)]), 9, Nulls::Some, 1);
    let renamed = structure(vec![("y", DataType::Int32)]);
    let schema = Arc::new(Schema::new(vec![Field::new("c", renamed.clone(), true)]));
    let options = RecordBatchOptions::new().with_match_field_names(false);
    let batch = RecordBatch::try_new_with_options(schema, vec![array], &options).unwrap();
    let up: DeviceRecordBatch = Devices::cpu().upload(&batch).unwrap();
    let down = up.to_host().unwrap();
    assert_eq!(down.column(0).data_type(), &renamed);
}
