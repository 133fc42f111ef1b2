//! Import and export of fields and schemas as `ArrowSchema`.
//!
//! **Import** is a walk that checks each member before it reads it, and builds the field as it
//! goes: arrow-rs's getters assert, unwrap, and index by a negative count. arrow-rs parses the
//! formats without children. **Export** uses arrow-rs after a check for what it panics on, and then
//! sets flags that it leaves out.
//!
//! Lost, because arrow-rs's types have no place for it: name, metadata (an extension type) and flags
//! of a dictionary's values, and keys that metadata repeats (the last one counts).

mod metadata;

use std::collections::HashSet;
use std::ffi::{CStr, c_char};
use std::fmt::Write;
use std::ptr;
use std::sync::Arc;

use arrow_schema::ffi::{FFI_ArrowSchema, Flags};
use arrow_schema::{
    ArrowError, DECIMAL32_MAX_PRECISION, DECIMAL64_MAX_PRECISION, DECIMAL128_MAX_PRECISION,
    DECIMAL256_MAX_PRECISION, DataType, Field, FieldRef, Schema, SchemaRef, UnionFields, UnionMode,
};

use crate::abi::c_data::CSchema;
use crate::abi::guard::call_foreign;
use crate::data::layout::{
    Layout, MAX_DEPTH, MAX_NODES, TOO_DEEP, TOO_MANY, check_type, child_field, child_type, fault,
};
use crate::error::{Error, Result};
use crate::interchange::path::Path;

use metadata::{Budget, decode_within};
#[cfg(feature = "async")]
pub(crate) use metadata::{decode_metadata, encode_metadata};

/// Checks a schema and builds its root as a field.
///
/// Reads every string, pointer list and child that the struct declares. The C data interface
/// demands that they exist; everything else is checked.
///
/// # Errors
/// [`Error::InvalidInput`] with the path of the member that is malformed.
pub(crate) fn import_field(schema: &FFI_ArrowSchema) -> Result<Field> {
    // SAFETY: both types are the C struct: size and alignment are asserted, and the members tested,
    // where `CSchema` is defined. The reference is shared, so nothing is moved or released through
    // it.
    let schema = unsafe { &*ptr::from_ref(schema).cast::<CSchema>() };
    let mut walk = Walk {
        budget: Budget::new(MAX_BYTES, TOO_LARGE),
        fields: 0,
        seen: HashSet::new(),
    };
    walk.field(schema, &Path::Root("schema"), 0)
}

/// Checks the schema of a batch, a struct, and builds it. The struct's metadata becomes the
/// schema's.
///
/// # Errors
/// As [`import_field`]; also if the root is not a struct.
pub(crate) fn import_schema(schema: &FFI_ArrowSchema) -> Result<SchemaRef> {
    let root = import_field(schema)?;
    match root.data_type() {
        DataType::Struct(fields) => Ok(Arc::new(Schema::new_with_metadata(
            fields.clone(),
            root.metadata().clone(),
        ))),
        other => Err(Error::invalid(
            "schema.format",
            format!(
                "a batch needs a struct, not {other}; import arrays of other types one by one, with DeviceArray::import"
            ),
        )),
    }
}

/// The most bytes that a schema may become: fields may share long names and much metadata, which are
/// built anew for each use.
const MAX_BYTES: usize = 1 << 28;
const TOO_LARGE: &str = "a schema of more than 2^28 bytes, where each field counts 512 and each pair of metadata 128 besides its text";
/// What a field takes, without its text. As many as a type may have take half of the limit.
const FIELD: usize = 512;
const _: () = assert!(MAX_BYTES == 2 * MAX_NODES * FIELD);

/// The most fields that may share their children. The interface has each struct belong to one parent,
/// and a few shared ones stand for any number of fields.
const MAX_SHARING: usize = 1 << 12;

struct Walk {
    /// How many more bytes there may be.
    budget: Budget,
    fields: usize,
    /// The addresses of the structs of all fields after [`MAX_SHARING`].
    seen: HashSet<*const CSchema>,
}

impl Walk {
    /// Charges `bytes` bytes.
    fn spend(&mut self, bytes: usize, path: &Path<'_>, member: &str) -> Result<()> {
        self.budget
            .spend(bytes)
            .or_else(|message| path.error(member, message))
    }

    fn field(&mut self, schema: &CSchema, path: &Path<'_>, depth: usize) -> Result<Field> {
        if schema.is_released() {
            return path.error("", "the schema is released");
        }
        if depth > MAX_DEPTH {
            return path.error("", TOO_DEEP);
        }
        self.fields += 1;
        if self.fields > MAX_SHARING && !self.seen.insert(schema) {
            return path.error(
                "",
                "a struct that occurs twice, among more than 2^12 fields",
            );
        }
        self.spend(FIELD, path, "")?;
        let Some(format) = text(schema, schema.format, path, "format")? else {
            return path.error("format", "a null pointer");
        };
        let name = text(schema, schema.name, path, "name")?.unwrap_or("");
        self.spend(format.len(), path, "format")?;
        self.spend(name.len(), path, "name")?;
        // SAFETY: the C data interface demands that the metadata of a schema that is not released
        // is null or encoded as it says, and lives as long as the schema, which is borrowed here.
        let metadata = match unsafe { decode_within(schema.metadata, &mut self.budget) } {
            Ok(metadata) => metadata,
            Err(message) => return path.error("metadata", message),
        };
        let mut data_type = self.data_type(schema, format, path, depth)?;
        if !schema.dictionary.is_null() {
            let values = self.step(schema.dictionary, &Path::Dictionary(path), depth)?;
            data_type =
                DataType::Dictionary(Box::new(data_type), Box::new(values.data_type().clone()));
        }
        if let Some(fault) = fault(&data_type) {
            return path.error("format", fault);
        }
        let has = |flag: Flags| schema.flags & flag.bits() != 0;
        Ok(Field::new(name, data_type, has(Flags::NULLABLE))
            .with_dict_is_ordered(has(Flags::DICTIONARY_ORDERED))
            .with_metadata(metadata))
    }

    fn data_type(
        &mut self,
        schema: &CSchema,
        format: &str,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<DataType> {
        let sorted = schema.flags & Flags::MAP_KEYS_SORTED.bits() != 0;
        Ok(match format {
            "+s" => DataType::Struct(self.children(schema, None, path, depth)?.into()),
            "+l" => DataType::List(self.only_child(schema, path, depth)?),
            "+L" => DataType::LargeList(self.only_child(schema, path, depth)?),
            "+vl" => DataType::ListView(self.only_child(schema, path, depth)?),
            "+vL" => DataType::LargeListView(self.only_child(schema, path, depth)?),
            "+m" => DataType::Map(self.only_child(schema, path, depth)?, sorted),
            "+r" => {
                let mut children = self.children(schema, Some(2), path, depth)?;
                let values = children.remove(1);
                DataType::RunEndEncoded(children.remove(0), values)
            }
            _ => match format.split_once(':') {
                Some(("+w", size)) => {
                    let Ok(size) = size.parse() else {
                        return path.error("format", format!("not a list size: {format:?}"));
                    };
                    DataType::FixedSizeList(self.only_child(schema, path, depth)?, size)
                }
                Some(("+ud", ids)) => self.union(schema, ids, UnionMode::Dense, path, depth)?,
                Some(("+us", ids)) => self.union(schema, ids, UnionMode::Sparse, path, depth)?,
                _ => {
                    let leaf = leaf(schema, format, path)?;
                    self.children(schema, Some(0), path, depth)?;
                    leaf
                }
            },
        })
    }

    fn union(
        &mut self,
        schema: &CSchema,
        ids: &str,
        mode: UnionMode,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<DataType> {
        let parsed = ids
            .split(',')
            .filter(|_| !ids.is_empty())
            .map(str::parse)
            .collect();
        let Ok::<Vec<i8>, _>(parsed) = parsed else {
            return path.error("format", format!("not type ids: {ids:?}"));
        };
        let children = self.children(schema, Some(parsed.len()), path, depth)?;
        match UnionFields::try_new(parsed, children) {
            Ok(fields) => Ok(DataType::Union(fields, mode)),
            Err(e) => path.error("format", text_of(e)),
        }
    }

    fn only_child(&mut self, schema: &CSchema, path: &Path<'_>, depth: usize) -> Result<FieldRef> {
        Ok(self.children(schema, Some(1), path, depth)?.remove(0))
    }

    fn children(
        &mut self,
        schema: &CSchema,
        expected: Option<usize>,
        path: &Path<'_>,
        depth: usize,
    ) -> Result<Vec<FieldRef>> {
        let n = match usize::try_from(schema.n_children) {
            Ok(n) if expected.is_some_and(|expected| n != expected) => {
                let expected = expected.unwrap_or(0);
                return path.error("n_children", format!("{n}; the format has {expected}"));
            }
            Ok(n) if n > MAX_NODES => return path.error("n_children", TOO_MANY),
            Ok(n) => n,
            Err(_) => return path.error("n_children", "a negative count"),
        };
        if n > 0 && (schema.children.is_null() || !schema.children.is_aligned()) {
            return path.error("children", "a null or misaligned pointer");
        }
        (0..n)
            .map(|i| {
                // SAFETY: `children` is neither null nor misaligned (checked above), and the C data
                // interface demands that it has `n_children` pointers; `i` is below that.
                let child = unsafe { *schema.children.add(i) };
                self.step(child, &Path::Child(path, i), depth).map(Arc::new)
            })
            .collect()
    }

    fn step(&mut self, schema: *const CSchema, path: &Path<'_>, depth: usize) -> Result<Field> {
        if schema.is_null() || !schema.is_aligned() {
            return path.error("", "a null or misaligned pointer");
        }
        // SAFETY: the pointer is neither null nor misaligned (checked above). The C data interface
        // demands that it points to a schema that lives as long as its parent, which is borrowed
        // here, and that nobody writes meanwhile.
        self.field(unsafe { &*schema }, path, depth + 1)
    }
}

/// Returns the string `text`, a member of `schema`, or `None` if it is null.
fn text<'a>(
    _schema: &'a CSchema,
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

/// All formats that arrow-rs knows.
const FORMATS: &str = "n b c C s S i I l L e f g z Z u U vz vu w:SIZE d:PRECISION,SCALE[,BITS] tdD tdm tts ttm ttu ttn \
                       tss:ZONE tsm:ZONE tsu:ZONE tsn:ZONE tDs tDm tDu tDn tiM tiD tin \
                       +s +l +L +vl +vL +w:SIZE +m +r +ud:IDS +us:IDS";

/// Parses a format without children with arrow-rs.
fn leaf(schema: &CSchema, format: &str, path: &Path<'_>) -> Result<DataType> {
    // A copy without children, dictionary and metadata, so that arrow-rs does not follow them.
    let leaf = CSchema {
        format: schema.format,
        ..CSchema::empty()
    };
    let parsed = call_foreign("parsing a format", || DataType::try_from(leaf.as_arrow()))?;
    let Ok(data_type) = parsed else {
        return path.error(
            "format",
            format!("{format:?} is none of the formats {FORMATS}"),
        );
    };
    // arrow-rs indexes tables by precision.
    let most = match data_type {
        DataType::Decimal32(p, _) => Some((p, DECIMAL32_MAX_PRECISION)),
        DataType::Decimal64(p, _) => Some((p, DECIMAL64_MAX_PRECISION)),
        DataType::Decimal128(p, _) => Some((p, DECIMAL128_MAX_PRECISION)),
        DataType::Decimal256(p, _) => Some((p, DECIMAL256_MAX_PRECISION)),
        _ => None,
    };
    match most {
        Some((p, most)) if p == 0 || p > most => path.error(
            "format",
            format!("a precision of {p}; from 1 to {most} is possible"),
        ),
        _ => Ok(data_type),
    }
}

/// Returns the text of an arrow-rs error without the prefix that names its kind.
fn text_of(e: ArrowError) -> String {
    match e {
        ArrowError::CDataInterface(text) | ArrowError::InvalidArgumentError(text) => text,
        e => e.to_string(),
    }
}

/// Exports `field` as a C struct.
///
/// # Errors
/// [`Error::InvalidInput`] with the path, if no array can have the type or the C struct cannot
/// express it: a NUL in a name or time zone, or a type without a format.
pub(crate) fn export_field(field: &Field) -> Result<FFI_ArrowSchema> {
    let mut path = "schema".to_owned();
    check_text(&path, ".name", field.name())?;
    export(field.data_type(), &mut path, || {
        FFI_ArrowSchema::try_from(field)
    })
}

/// Exports `schema` as a C struct: a struct without a name, with the schema's metadata.
///
/// # Errors
/// As [`export_field`].
pub(crate) fn export_schema(schema: &Schema) -> Result<FFI_ArrowSchema> {
    let root = DataType::Struct(schema.fields().clone());
    export(&root, &mut "schema".to_owned(), || {
        FFI_ArrowSchema::try_from(schema)
    })
}

fn export(
    data_type: &DataType,
    path: &mut String,
    convert: impl FnOnce() -> Result<FFI_ArrowSchema, ArrowError>,
) -> Result<FFI_ArrowSchema> {
    check_type(data_type)?;
    check_texts(data_type, path)?;
    let schema = call_foreign("exporting a schema", convert)?
        .map_err(|e| Error::invalid("schema", text_of(e)))?;
    let mut schema = CSchema::from_arrow(schema);
    // SAFETY: arrow-rs has just built `schema` and its descendants from `data_type`, and nothing
    // else refers to them.
    unsafe { set_flags(&raw mut schema, data_type) };
    Ok(schema.into_arrow())
}

fn check_text(path: &str, member: &str, text: &str) -> Result<()> {
    if text.contains('\0') {
        return Err(Error::invalid(
            format!("{path}{member}"),
            format!("{text:?} has a NUL, which a C string cannot hold"),
        ));
    }
    Ok(())
}

/// Checks the strings of all descendants: arrow-rs panics on NUL in a format.
fn check_texts(data_type: &DataType, path: &mut String) -> Result<()> {
    if let DataType::Timestamp(_, Some(zone)) = data_type {
        check_text(path, ".format", zone)?;
    }
    let parent = path.len();
    for i in 0..Layout::of(data_type).n_children() {
        match child_field(data_type, i) {
            Some(child) => {
                // Writing to a `String` does not fail.
                let _ = write!(path, ".children[{i}]");
                check_text(path, ".name", child.name())?;
            }
            None => path.push_str(".dictionary"),
        }
        if let Some(child) = child_type(data_type, i) {
            check_texts(child, path)?;
        }
        path.truncate(parent);
    }
    Ok(())
}

/// Sets what arrow-rs 59 leaves out: the flag of maps with sorted keys, and that a dictionary's values
/// may be null, as nothing in its type says otherwise.
///
/// # Safety
/// `schema` was built from `data_type`, is alive, and nothing else uses it or its descendants.
unsafe fn set_flags(schema: *mut CSchema, data_type: &DataType) {
    if let DataType::Map(_, true) = data_type {
        // SAFETY: the caller guarantees that `schema` is alive and not used elsewhere.
        unsafe { (*schema).flags |= Flags::MAP_KEYS_SORTED.bits() };
    }
    for i in 0..Layout::of(data_type).n_children() {
        let Some(child_type) = child_type(data_type, i) else {
            continue;
        };
        // SAFETY: the caller guarantees that `schema` is alive and not used elsewhere, and that it was
        // built from `data_type`, so it has this child or a dictionary, which are not used elsewhere
        // either.
        let child = unsafe {
            match data_type {
                DataType::Dictionary(_, _) => {
                    let values = (*schema).dictionary;
                    (*values).flags |= Flags::NULLABLE.bits();
                    values
                }
                _ => *(*schema).children.add(i),
            }
        };
        // SAFETY: `child` is a descendant of the caller's schema and was built from `child_type`;
        // the caller guarantees that it is alive and not used elsewhere.
        unsafe { set_flags(child, child_type) };
    }
}

#[cfg(test)]
mod tests;
