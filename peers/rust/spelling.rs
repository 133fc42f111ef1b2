//! Types as Arrow C++ gives them back: it names the fields of a map's entries itself, and writes the metadata of the
//! extension type `arrow.uuid` out where it was left out. Values stay as they are.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Schema, UnionFields};

/// `of` as Arrow C++ writes it.
pub(crate) fn data_type(of: &DataType) -> DataType {
    use DataType::*;
    match of {
        List(f) => List(field(f)),
        LargeList(f) => LargeList(field(f)),
        ListView(f) => ListView(field(f)),
        LargeListView(f) => LargeListView(field(f)),
        FixedSizeList(f, n) => FixedSizeList(field(f), *n),
        Struct(fields) => Struct(fields.iter().map(field).collect()),
        Union(fields, mode) => {
            let fields = fields.iter().map(|(id, f)| (id, field(f)));
            Union(fields.collect::<UnionFields>(), *mode)
        }
        Dictionary(key, value) => Dictionary(key.clone(), Box::new(data_type(value))),
        RunEndEncoded(ends, values) => RunEndEncoded(ends.clone(), field(values)),
        Map(entries, sorted) => {
            let entries = match entries.data_type() {
                Struct(fields) if fields.len() == 2 => {
                    let named =
                        |f: &FieldRef, name: &str| field(f).as_ref().clone().with_name(name);
                    let fields = [named(&fields[0], "key"), named(&fields[1], "value")];
                    let fields = Struct(fields.into_iter().collect());
                    Arc::new(entries.as_ref().clone().with_data_type(fields))
                }
                _ => entries.clone(),
            };
            Map(entries, *sorted)
        }
        other => other.clone(),
    }
}

fn field(of: &FieldRef) -> FieldRef {
    const METADATA: &str = "ARROW:extension:metadata";
    let changed = data_type(of.data_type());
    let mut field = Field::clone(of).with_data_type(changed);
    if field.extension_type_name() == Some("arrow.uuid") {
        let mut metadata = field.metadata().clone();
        metadata.entry(METADATA.into()).or_default();
        field = field.with_metadata(metadata);
    }
    Arc::new(field)
}

pub(crate) fn schema(of: &Schema) -> Schema {
    let fields: Vec<FieldRef> = of.fields().iter().map(field).collect();
    Schema::new_with_metadata(fields, of.metadata().clone())
}

pub(crate) fn array(of: &dyn Array) -> ArrayRef {
    make_array(retyped(of.to_data(), data_type(of.data_type())))
}

pub(crate) fn batch(of: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let columns = of.columns().iter().map(|column| array(column)).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(of.num_rows()));
    RecordBatch::try_new_with_options(Arc::new(schema(of.schema_ref())), columns, &options)
}

/// The same values under a type that differs in names and metadata only.
fn retyped(data: ArrayData, to: DataType) -> ArrayData {
    let children = data.child_data().iter().zip(child_types(&to));
    let children = children.map(|(child, to)| retyped(child.clone(), to.clone()));
    let children = children.collect();
    let builder = data.into_builder().data_type(to).child_data(children);
    // SAFETY: the values are those of `data`, which is valid.
    unsafe { builder.build_unchecked() }
}

fn child_types(of: &DataType) -> Vec<&DataType> {
    use DataType::*;
    match of {
        List(f) | LargeList(f) | ListView(f) | LargeListView(f) | FixedSizeList(f, _) => {
            vec![f.data_type()]
        }
        Map(entries, _) => vec![entries.data_type()],
        Struct(fields) => fields.iter().map(|f| f.data_type()).collect(),
        Union(fields, _) => fields.iter().map(|(_, f)| f.data_type()).collect(),
        Dictionary(_, value) => vec![value.as_ref()],
        RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
        _ => vec![],
    }
}
