//! Exported schemas, node by node: what each says about its field.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{RecordBatch, new_empty_array};
use arrow_device::{Devices, SyncPolicy};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, FieldRef, Schema};

use crate::support::all_types;
use crate::support::types::{dictionary, field, list, run_ends, structure};

/// `field` is `None` for the values of a dictionary, of which nothing is known: they may be null.
fn check(schema: &FFI_ArrowSchema, field: Option<&Field>, data_type: &DataType, path: &str) {
    use DataType as T;
    let is_nullable = field.is_none_or(Field::is_nullable);
    assert_eq!(schema.nullable(), is_nullable, "nullable: {path}");
    let is_ordered = field.and_then(Field::dict_is_ordered) == Some(true);
    assert_eq!(schema.dictionary_ordered(), is_ordered, "ordered: {path}");
    let is_sorted = matches!(data_type, T::Map(_, true));
    assert_eq!(schema.map_keys_sorted(), is_sorted, "sorted: {path}");
    let name = field.map_or("", |field| field.name());
    assert_eq!(schema.name().unwrap_or(""), name, "{path}");
    let mut metadata = HashMap::new();
    if let Some(field) = field {
        let all = field.metadata().iter();
        metadata.extend(all.map(|(key, value)| (key.clone(), value.clone())));
    }
    assert_eq!(schema.metadata().unwrap(), metadata, "{path}");
    let children: Vec<&FieldRef> = match data_type {
        T::List(f) | T::LargeList(f) | T::ListView(f) | T::LargeListView(f) => vec![f],
        T::FixedSizeList(f, _) | T::Map(f, _) => vec![f],
        T::Struct(fields) => fields.iter().collect(),
        T::Union(fields, _) => fields.iter().map(|(_, f)| f).collect(),
        T::RunEndEncoded(ends, values) => vec![ends, values],
        _ => vec![],
    };
    assert_eq!(schema.children().count(), children.len(), "{path}");
    for (i, (schema, field)) in schema.children().zip(children).enumerate() {
        let path = format!("{path}.children[{i}]");
        check(schema, Some(field), field.data_type(), &path);
    }
    match (data_type, schema.dictionary()) {
        (T::Dictionary(_, values), Some(schema)) => {
            check(schema, None, values, &format!("{path}.dictionary"));
        }
        (_, dictionary) => assert!(dictionary.is_none(), "{path}"),
    }
}

/// Of every type, and of dictionaries at every depth, alone and as columns.
#[test]
fn flags_names_and_metadata() {
    let mut types = all_types();
    let texts = || dictionary(DataType::Int8, DataType::Utf8);
    for (name, data_type) in [
        (
            "dictionary<dictionary>",
            dictionary(DataType::Int16, texts()),
        ),
        (
            "dictionary<list<dictionary>>",
            dictionary(DataType::Int32, list(texts())),
        ),
        (
            "dictionary<struct<dictionary, ree<dictionary>>>",
            dictionary(
                DataType::UInt8,
                structure(vec![
                    ("d", texts()),
                    ("r", run_ends(DataType::Int16, texts())),
                ]),
            ),
        ),
    ] {
        types.push((name.to_owned(), data_type));
    }
    let ordered = |name: &str| Field::clone(&field(name, texts())).with_dict_is_ordered(true);
    types.push((
        "list<ordered dictionary>".to_owned(),
        DataType::List(Arc::new(ordered("item"))),
    ));
    let cpu = Devices::cpu();
    let mut fields = vec![ordered("ordered")];
    for (i, (name, data_type)) in types.into_iter().enumerate() {
        let metadata = HashMap::from([("note".to_owned(), name.clone())]);
        let of = Field::new(name.as_str(), data_type.clone(), i % 2 == 0).with_metadata(metadata);
        let array = cpu.upload_array(&new_empty_array(&data_type)).unwrap();
        let (_array, schema) = array.export(SyncPolicy::Event).unwrap();
        check(
            &schema,
            Some(&Field::new("", data_type.clone(), true)),
            &data_type,
            &name,
        );
        let array = array.with_field(Arc::new(of.clone())).unwrap();
        let (_array, schema) = array.export(SyncPolicy::Event).unwrap();
        check(&schema, Some(&of), &data_type, &name);
        fields.push(of);
    }
    let metadata = HashMap::from([("k".to_owned(), "v".to_owned())]);
    let schema = Schema::new_with_metadata(fields, metadata.clone());
    let root = DataType::Struct(schema.fields().clone());
    let of = Field::new("", root.clone(), false).with_metadata(metadata);
    let batch = cpu
        .upload(&RecordBatch::new_empty(Arc::new(schema)))
        .unwrap();
    let (_array, schema) = batch.export(SyncPolicy::Event).unwrap();
    check(&schema, Some(&of), &root, "batch");
}
