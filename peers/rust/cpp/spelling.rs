//! Types as Arrow C++ spells them when it hands them back: it names a map's columns `key` and `value`, whatever their
//! names were, and writes the metadata of the extension type that it knows (`arrow.uuid`) even if it is empty.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, FieldRef, Schema};

pub(super) fn field(from: &Field) -> Field {
    let mut metadata = from.metadata().clone();
    if metadata
        .get("ARROW:extension:name")
        .is_some_and(|n| n == "arrow.uuid")
    {
        let known = metadata.entry("ARROW:extension:metadata".into());
        known.or_default();
    }
    let field = from.clone().with_data_type(data_type(from.data_type()));
    field.with_metadata(metadata)
}

fn data_type(from: &DataType) -> DataType {
    use DataType::*;
    let again = |from: &FieldRef| Arc::new(field(from));
    match from {
        List(item) => List(again(item)),
        LargeList(item) => LargeList(again(item)),
        ListView(item) => ListView(again(item)),
        LargeListView(item) => LargeListView(again(item)),
        FixedSizeList(item, size) => FixedSizeList(again(item), *size),
        Struct(fields) => Struct(fields.iter().map(again).collect()),
        Map(entries, sorted) => Map(Arc::new(map_entries(entries)), *sorted),
        Union(fields, mode) => {
            let fields = fields.iter().map(|(id, field)| (id, again(field)));
            Union(fields.collect(), *mode)
        }
        Dictionary(keys, values) => Dictionary(keys.clone(), Box::new(data_type(values))),
        RunEndEncoded(ends, values) => RunEndEncoded(again(ends), again(values)),
        flat => flat.clone(),
    }
}

fn map_entries(entries: &FieldRef) -> Field {
    let DataType::Struct(fields) = entries.data_type() else {
        return field(entries);
    };
    let names = ["key", "value"];
    let fields = fields.iter().zip(names);
    let fields = fields.map(|(from, name)| field(from).with_name(name));
    let entries = entries.as_ref().clone();
    entries.with_data_type(DataType::Struct(fields.collect()))
}

fn children(of: &DataType) -> Vec<&DataType> {
    use DataType::*;
    match of {
        List(f)
        | LargeList(f)
        | ListView(f)
        | LargeListView(f)
        | FixedSizeList(f, _)
        | Map(f, _) => vec![f.data_type()],
        Struct(fields) => fields.iter().map(|f| f.data_type()).collect(),
        Union(fields, _) => fields.iter().map(|(_, f)| f.data_type()).collect(),
        Dictionary(_, values) => vec![values],
        RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
        _ => vec![],
    }
}

/// Whether there is a map with sorted keys: arrow-rs 59 does not say so in the schemas that it exports.
pub(super) fn has_sorted_map(of: &DataType) -> bool {
    matches!(of, DataType::Map(_, true)) || children(of).into_iter().any(has_sorted_map)
}

/// The same values; only names and metadata in the type are others.
pub(super) fn array(from: &dyn Array) -> ArrayRef {
    make_array(retyped(from.to_data(), &data_type(from.data_type())))
}

fn retyped(data: ArrayData, to: &DataType) -> ArrayData {
    if data.data_type() == to {
        return data;
    }
    let children = data.child_data().iter().zip(children(to));
    let children = children.map(|(child, to)| retyped(child.clone(), to));
    let children = children.collect();
    let builder = data
        .into_builder()
        .data_type(to.clone())
        .child_data(children);
    // SAFETY: the data is valid, and the layout of `to` is that of its type.
    unsafe { builder.build_unchecked() }
}

pub(super) fn batch(from: &RecordBatch) -> RecordBatch {
    let from_schema = from.schema();
    let fields: Vec<_> = from_schema.fields().iter().map(|f| field(f)).collect();
    let schema = Schema::new(fields).with_metadata(from_schema.metadata().clone());
    let columns = from.columns().iter().map(|column| array(column)).collect();
    let rows = RecordBatchOptions::new().with_row_count(Some(from.num_rows()));
    RecordBatch::try_new_with_options(Arc::new(schema), columns, &rows)
        .expect("as many columns of the same lengths")
}
