use std::thread;

use arrow_array::{Array, ArrayRef, Int32Array, NullArray, StringArray, StructArray};
use arrow_buffer::Buffer;

use arrow_schema::{Field, FieldRef, Fields};

use super::*;
use crate::abi::FFI_ArrowDeviceArray;
use crate::data::DeviceRecordBatch;
use crate::device::Devices;
use crate::interchange::{ExportOptions, ImportOptions, SyncPolicy};
use crate::memory::DeviceBuffer;

fn up(array: &dyn Array) -> DeviceArray {
    Devices::cpu().upload_array(array).unwrap()
}

fn field(name: &str, data_type: &DataType) -> FieldRef {
    Arc::new(Field::new(name, data_type.clone(), true))
}

fn again(array: FFI_ArrowDeviceArray, data_type: &DataType) -> DeviceArray {
    // SAFETY: the array comes from an export of this type.
    let again =
        unsafe { DeviceArray::import_as(array, field("", data_type), &ImportOptions::default()) };
    again.unwrap()
}

/// A struct of a struct and a list, every buffer of which is an allocation of its own. Each part is exported, outlives
/// all others, and is what arrow-rs has.
#[test]
fn parts_of_separate_memory() {
    let strings = StringArray::from(vec!["a", "", "ccc", "dd"]);
    let numbers = Int32Array::from(vec![Some(1), None, Some(3), Some(4)]);
    let fields = Fields::from(vec![
        field("s", &DataType::Utf8),
        field("n", &DataType::Int32),
    ]);
    let columns = [up(&strings), up(&numbers)];
    let validity = up(&numbers).validity();
    let inner = DataType::Struct(fields.clone());
    let inner = DeviceArray::from_children(inner, 4, &columns, validity).unwrap();
    let lists = DataType::FixedSizeList(field("item", &DataType::Int32), 1);
    let lists = DeviceArray::from_children(lists, 4, &[up(&numbers)], None).unwrap();
    let columns = [inner, lists, up(&NullArray::new(4))];
    let schema = ["i", "l", "x"].iter().zip(&columns);
    let schema = schema.map(|(name, column)| field(name, column.data_type()));
    let schema = Arc::new(arrow_schema::Schema::new(schema.collect::<Vec<_>>()));
    let outer = DeviceRecordBatch::try_new(schema, &columns).unwrap();
    drop(columns);
    assert_eq!(outer.as_struct().owners().len(), 4);

    let options = ExportOptions::new(SyncPolicy::Event);
    let part = outer.slice(1, 3).unwrap().column(0).unwrap();
    assert_eq!(part.owners().len(), 3);
    let leaf = part.child(0).unwrap();
    assert_eq!(leaf.owners().len(), 1);
    let exported = [&part, &leaf].map(|array| array.export_array(&options).unwrap());
    let list = outer.column(1).unwrap().child(0).unwrap();
    assert_eq!(outer.column(2).unwrap().owners().len(), 0);
    let whole = outer.export_array(&options).unwrap();
    drop((outer, leaf));
    drop(whole);
    let [struct_, text] = exported;
    let host: Vec<ArrayRef> = vec![Arc::new(strings.clone()), Arc::new(numbers.clone())];
    let host = StructArray::new(fields, host, numbers.nulls().cloned()).slice(1, 3);
    let same = |expected: &dyn Array, found: &DeviceArray| {
        assert_eq!(expected.to_data(), found.to_host().unwrap().to_data());
    };
    same(&host, &part);
    same(&host, &again(struct_, host.data_type()));
    drop(part);
    same(&strings.slice(1, 3), &again(text, &DataType::Utf8));
    same(&numbers, &list);
}

/// A column is taken and its nulls are counted on several threads at once.
#[test]
fn children_on_several_threads() {
    let column = || {
        let bits = DeviceBuffer::from(Buffer::from_vec(vec![0b1011_u8]));
        let values = DeviceBuffer::from(Buffer::from_vec(vec![1u8, 2, 3, 4]));
        let validity = Validity::new(bits, 0, 4).unwrap();
        DeviceArray::from_values(DataType::UInt8, 4, values, Some(validity)).unwrap()
    };
    let schema = [field("a", &DataType::UInt8), field("b", &DataType::UInt8)];
    let schema = Arc::new(arrow_schema::Schema::new(schema.to_vec()));
    let batch = DeviceRecordBatch::try_new(schema, &[column(), column()]).unwrap();
    let early = batch.column(1).unwrap();
    thread::scope(|scope| {
        for i in [0, 1, 0, 1] {
            let batch = batch.clone();
            scope.spawn(move || {
                let column = batch.column(i).unwrap();
                assert_eq!(column.resolve_null_counts().unwrap(), 1);
                drop(batch);
                assert_eq!(column.null_count(), Some(1));
            });
        }
    });
    assert_eq!(batch.as_struct().child(0).unwrap().null_count(), Some(1));
    drop(batch);
    assert_eq!(early.null_count(), Some(1));
}
