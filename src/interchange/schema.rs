//! Import and export of fields and schemas as `ArrowSchema`.
//!
//! **Import** is a walk that checks each member before it reads it, and builds the field as it
//! goes: arrow-rs's getters assert, unwrap, and index by a negative count. arrow-rs parses the
//! formats without children, and metadata. **Export** uses arrow-rs after a check for what it panics on, and then
//! sets flags that it leaves out.
//!
//! arrow-rs's types have no place for the metadata of a dictionary's values, such as an extension type: it is kept in that of the
//! field, with a [prefix](VALUES). Lost are name and flags of these values, and keys that metadata repeats (the last one counts).

#[cfg(feature = "async")]
use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::Arc;

use arrow_schema::ffi::{FFI_ArrowSchema, Flags};
use arrow_schema::{
    ArrowError, DECIMAL32_MAX_PRECISION, DECIMAL64_MAX_PRECISION, DECIMAL128_MAX_PRECISION,
    DECIMAL256_MAX_PRECISION, DataType, Field, FieldRef, Schema, SchemaRef, UnionFields, UnionMode,
};

use crate::abi::ForeignSchema;
use crate::abi::guard::call_foreign;
use crate::data::layout::{
    Layout, MAX_DEPTH, MAX_NODES, TOO_DEEP, TOO_MANY, check_type, child_field, child_type, fault,
};
use crate::error::{Error, Result};
use crate::interchange::Path;

/// What the keys of a dictionary's values begin with in the metadata of the dictionary's field.
const VALUES: &str = "ARROW:dictionary:";

/// Checks a schema and builds its root as a field.
///
/// Reads every string, pointer list and child that the struct declares. The C data interface
/// demands that they exist; everything else is checked.
///
/// # Errors
/// [`Error::InvalidInput`] with the path of the member that is malformed.
pub(crate) fn import_field(schema: &FFI_ArrowSchema) -> Result<Field> {
    // SAFETY: both types are the C struct: size and alignment are asserted, and the members tested,
    // where `ForeignSchema` is defined. The reference is shared, so nothing is moved or released
    // through it.
    let schema = unsafe { &*ptr::from_ref(schema).cast::<ForeignSchema>() };
    field(schema, &Path::Root("schema"), 0, &mut 0)
}

/// Checks the schema of a batch, a struct, and builds it. The struct's metadata becomes the
/// schema's.
///
/// # Errors
/// As [`import_field`]; also if the root is not a struct.
pub(crate) fn import_schema(schema: &FFI_ArrowSchema) -> Result<SchemaRef> {
    let root = import_field(schema)?;
    let DataType::Struct(fields) = root.data_type() else {
        let why = format!(
            "a batch needs a struct, not {}; import arrays of other types one by one, with DeviceArray::import",
            root.data_type()
        );
        return Err(Error::invalid("schema.format", why));
    };
    let schema = Schema::new_with_metadata(fields.clone(), root.metadata().clone());
    Ok(Arc::new(schema))
}

/// `nodes` is the number of those seen so far, of which 512 bytes of text count as one: structs may share their children, names and
/// metadata, which are built anew for each use.
fn field(
    schema: &ForeignSchema,
    path: &Path<'_>,
    depth: usize,
    nodes: &mut usize,
) -> Result<Field> {
    if schema.release.is_none() {
        return path.error("", "the schema is released");
    }
    if depth > MAX_DEPTH {
        return path.error("", TOO_DEEP);
    }
    let Some(format) = text(schema, schema.format, path, "format")? else {
        return path.error("format", "is null");
    };
    let name = text(schema, schema.name, path, "name")?.unwrap_or("");
    let metadata = schema.as_ref().metadata();
    let mut metadata = metadata.or_else(|e| path.error("metadata", text_of(e)))?;
    let pair = |(key, value): (&String, &String)| 128 + key.len() + value.len();
    *nodes += 1 + (format.len() + name.len() + metadata.iter().map(pair).sum::<usize>()) / 512;
    if *nodes > MAX_NODES {
        let why = format!("{TOO_MANY}, of which 512 bytes of text count as one");
        return path.error("", why);
    }
    let n_children = match usize::try_from(schema.n_children) {
        Ok(n) if n > MAX_NODES => return path.error("n_children", TOO_MANY),
        Ok(n) => n,
        Err(_) => return path.error("n_children", "a negative count"),
    };
    if n_children > 0 {
        path.usable("children", schema.children)?;
    }
    let mut below = |child: *mut ForeignSchema, path: &Path<'_>| {
        path.usable("", child)?;
        // SAFETY: the pointer is usable (checked above). The C data interface demands that it points to a schema that lives as
        // long as its parent, which is borrowed here, and that nobody writes meanwhile.
        field(unsafe { &*child }, path, depth + 1, nodes)
    };
    let child = |i| {
        // SAFETY: `children` is usable (checked above), and the C data interface demands that it has `n_children` pointers; `i` is
        // below that.
        let child = unsafe { *schema.children.add(i) };
        below(child, &Path::Child(path, i)).map(Arc::new)
    };
    let children = (0..n_children).map(child).collect::<Result<_>>()?;
    let mut data_type = data_type(schema, format, children, path)?;
    if !schema.dictionary.is_null() {
        let values = below(schema.dictionary, &Path::Dictionary(path))?;
        let of_values = values.metadata().iter();
        metadata.extend(of_values.map(|(key, value)| (format!("{VALUES}{key}"), value.clone())));
        let values = Box::new(values.data_type().clone());
        data_type = DataType::Dictionary(Box::new(data_type), values);
    }
    if let Some(fault) = fault(&data_type) {
        return path.error("format", fault);
    }
    let has = |flag: Flags| schema.flags & flag.bits() != 0;
    Ok(Field::new(name, data_type, has(Flags::NULLABLE))
        .with_dict_is_ordered(has(Flags::DICTIONARY_ORDERED))
        .with_metadata(metadata))
}

/// Returns the string `text`, a member of `schema`, or `None` if it is null.
fn text<'a>(
    _schema: &'a ForeignSchema,
    text: *const c_char,
    path: &Path<'_>,
    member: &str,
) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the C data interface demands that a string of a schema that is not released ends with
    // a null byte and lives as long as the schema, which the result borrows.
    match unsafe { CStr::from_ptr(text) }.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(e) => path.error(member, format!("not UTF-8: {e}")),
    }
}

/// The type of a node, without regard to its dictionary.
fn data_type(
    schema: &ForeignSchema,
    format: &str,
    children: Vec<FieldRef>,
    path: &Path<'_>,
) -> Result<DataType> {
    use DataType as T;
    let wrong_count = |expected| {
        let n = children.len();
        path.error("n_children", format!("{n}; the format has {expected}"))
    };
    Ok(match (format, &children[..]) {
        ("+s", _) => T::Struct(children.into()),
        ("+l", [item]) => T::List(item.clone()),
        ("+L", [item]) => T::LargeList(item.clone()),
        ("+vl", [item]) => T::ListView(item.clone()),
        ("+vL", [item]) => T::LargeListView(item.clone()),
        ("+m", [entries]) => {
            let sorted = schema.flags & Flags::MAP_KEYS_SORTED.bits() != 0;
            T::Map(entries.clone(), sorted)
        }
        ("+r", [ends, values]) => T::RunEndEncoded(ends.clone(), values.clone()),
        ("+l" | "+L" | "+vl" | "+vL" | "+m", _) => return wrong_count(1),
        ("+r", _) => return wrong_count(2),
        _ => match format.split_once(':') {
            Some(("+w", size)) => match (size.parse(), &children[..]) {
                (Ok(size), [item]) => T::FixedSizeList(item.clone(), size),
                (Ok(_), _) => return wrong_count(1),
                _ => return path.error("format", format!("not a list size: {format:?}")),
            },
            Some((union @ ("+ud" | "+us"), ids)) => {
                let ids = ids.split(',').filter(|_| !ids.is_empty()).map(str::parse);
                let Ok::<Vec<i8>, _>(ids) = ids.collect() else {
                    return path.error("format", format!("not type ids: {format:?}"));
                };
                if ids.len() != children.len() {
                    return wrong_count(ids.len());
                }
                let dense = union == "+ud";
                let mode = [UnionMode::Sparse, UnionMode::Dense][usize::from(dense)];
                match UnionFields::try_new(ids, children) {
                    Ok(fields) => T::Union(fields, mode),
                    Err(e) => return path.error("format", text_of(e)),
                }
            }
            _ if children.is_empty() => leaf(schema, format, path)?,
            _ => return wrong_count(0),
        },
    })
}

/// Parses a format without children with arrow-rs.
fn leaf(schema: &ForeignSchema, format: &str, path: &Path<'_>) -> Result<DataType> {
    // A copy without children, dictionary and metadata, so that arrow-rs does not follow them.
    let leaf = ForeignSchema {
        format: schema.format,
        ..ForeignSchema::empty()
    };
    let Ok(data_type) = DataType::try_from(leaf.as_ref()) else {
        return path.error(
            "format",
            format!("{format:?} is not a format that arrow-rs knows"),
        );
    };
    // arrow-rs indexes tables by precision.
    let (precision, most) = match data_type {
        DataType::Decimal32(p, _) => (p, DECIMAL32_MAX_PRECISION),
        DataType::Decimal64(p, _) => (p, DECIMAL64_MAX_PRECISION),
        DataType::Decimal128(p, _) => (p, DECIMAL128_MAX_PRECISION),
        DataType::Decimal256(p, _) => (p, DECIMAL256_MAX_PRECISION),
        _ => return Ok(data_type),
    };
    path.check((1..=most).contains(&precision), "format", || {
        format!("a precision of {precision}; from 1 to {most} is possible")
    })?;
    Ok(data_type)
}

/// Returns the text of an arrow-rs error without the prefix that names its kind.
pub(super) fn text_of(e: ArrowError) -> String {
    match e {
        ArrowError::CDataInterface(text) | ArrowError::InvalidArgumentError(text) => text,
        e => e.to_string(),
    }
}

/// Decodes metadata in the encoding of `ArrowSchema.metadata`; a null pointer means that there is none. If keys repeat, the
/// last one counts.
///
/// # Safety
/// `metadata` is null or points to metadata, with all the bytes that the counts in it announce.
///
/// # Errors
/// A message for negative counts, and text that is not UTF-8.
#[cfg(feature = "async")]
pub(crate) unsafe fn decode_metadata(
    metadata: *const c_char,
) -> Result<HashMap<String, String>, String> {
    // arrow-rs decodes it as that of a schema, which the caller's guarantee makes right.
    let schema = ForeignSchema {
        metadata,
        ..ForeignSchema::empty()
    };
    schema.as_ref().metadata().map_err(text_of)
}

/// Encodes metadata as that of a schema without fields, whose pointer is null if there is none.
///
/// # Errors
/// [`Error::InvalidInput`] for a text longer than 2^31 - 1 bytes.
#[cfg(feature = "async")]
pub(crate) fn encode_metadata(metadata: Option<&HashMap<String, String>>) -> Result<ForeignSchema> {
    let Some(metadata) = metadata else {
        return Ok(ForeignSchema::empty());
    };
    let schema = Schema::new_with_metadata(Vec::<FieldRef>::new(), metadata.clone());
    let schema = FFI_ArrowSchema::try_from(&schema);
    let mut schema = schema.map_err(|e| Error::invalid("metadata", text_of(e)))?;
    // SAFETY: arrow-rs has just made the schema, and nothing else uses it.
    Ok(unsafe { ForeignSchema::from_raw(&raw mut schema) })
}

/// Exports `field` as a C struct.
///
/// # Errors
/// [`Error::InvalidInput`] with the path, if no array can have the type or the C struct cannot
/// express it: a NUL in a name or time zone, or a type without a format.
pub(crate) fn export_field(field: &Field) -> Result<FFI_ArrowSchema> {
    check_text(&Path::Root("schema"), "name", field.name())?;
    export(field.data_type(), || FFI_ArrowSchema::try_from(field))
}

/// Exports `schema` as a C struct: a struct without a name, with the schema's metadata.
///
/// # Errors
/// As [`export_field`].
pub(crate) fn export_schema(schema: &Schema) -> Result<FFI_ArrowSchema> {
    let root = DataType::Struct(schema.fields().clone());
    export(&root, || FFI_ArrowSchema::try_from(schema))
}

fn export(
    data_type: &DataType,
    convert: impl FnOnce() -> Result<FFI_ArrowSchema, ArrowError>,
) -> Result<FFI_ArrowSchema> {
    check_type(data_type)?;
    check_texts(data_type, &Path::Root("schema"))?;
    let mut schema = call_foreign("exporting a schema", convert)?
        .map_err(|e| Error::invalid("schema", text_of(e)))?;
    // SAFETY: arrow-rs has just built `schema` and its descendants from `data_type`, and nothing
    // else refers to them. Both types are the C struct, as `import_field` says.
    let completed = unsafe { complete((&raw mut schema).cast(), data_type) };
    completed.map_err(|e| Error::invalid("schema", text_of(e)))?;
    Ok(schema)
}

fn check_text(path: &Path<'_>, member: &str, text: &str) -> Result<()> {
    path.check(!text.contains('\0'), member, || {
        format!("{text:?} has a NUL, which a C string cannot hold")
    })
}

/// Checks the strings of all descendants: arrow-rs panics on NUL in a format.
fn check_texts(data_type: &DataType, path: &Path<'_>) -> Result<()> {
    if let DataType::Timestamp(_, Some(zone)) = data_type {
        check_text(path, "format", zone)?;
    }
    let layout = Layout::of(data_type);
    for i in 0..layout.n_children() {
        let path = path.below(layout.nesting, i);
        if let Some(field) = child_field(data_type, i) {
            check_text(&path, "name", field.name())?;
        }
        if let Some(child) = child_type(data_type, i) {
            check_texts(child, &path)?;
        }
    }
    Ok(())
}

/// Sets what arrow-rs 59 leaves out: the flag of maps with sorted keys, and of a dictionary's values their metadata, and that they
/// may be null, as nothing in their type says otherwise.
///
/// # Safety
/// `schema` was built by arrow-rs from `data_type`, is alive, and nothing else uses it or its descendants.
unsafe fn complete(schema: *mut ForeignSchema, data_type: &DataType) -> Result<(), ArrowError> {
    // SAFETY: the caller guarantees that `schema` is alive and not used elsewhere, and that it was built from `data_type`, so that it
    // has these children or a dictionary, which were built from the types of the children, and are not used elsewhere either.
    unsafe {
        if let DataType::Map(_, true) = data_type {
            (*schema).flags |= Flags::MAP_KEYS_SORTED.bits();
        }
        for i in 0..Layout::of(data_type).n_children() {
            let child = match data_type {
                DataType::Dictionary(_, _) => (*schema).dictionary,
                _ => *(*schema).children.add(i),
            };
            if let DataType::Dictionary(_, _) = data_type {
                (*child).flags |= Flags::NULLABLE.bits();
                let metadata = (*schema).as_ref().metadata()?.into_iter();
                let (of_values, own): (Vec<_>, Vec<_>) =
                    metadata.partition(|(key, _)| key.starts_with(VALUES));
                if !of_values.is_empty() {
                    let of_values = of_values.iter().map(|(k, v)| (&k[VALUES.len()..], &v[..]));
                    set_metadata(child.cast(), of_values)?;
                    set_metadata(schema.cast(), own)?;
                }
            }
            if let Some(data_type) = child_type(data_type, i) {
                complete(child, data_type)?;
            }
        }
    }
    Ok(())
}

/// # Safety
/// `schema` points to a schema of arrow-rs's, which nothing else uses.
unsafe fn set_metadata<S: AsRef<str>>(
    schema: *mut FFI_ArrowSchema,
    metadata: impl IntoIterator<Item = (S, S)>,
) -> Result<(), ArrowError> {
    // SAFETY: the caller guarantees that the schema may be moved out, and back; after an error an empty one is left.
    unsafe { *schema = FFI_ArrowSchema::from_raw(schema).with_metadata(metadata)? };
    Ok(())
}

#[cfg(test)]
mod tests;
