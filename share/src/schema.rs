//! A schema as bytes, and back.

use std::panic::catch_unwind;

use arrow_ipc::{Endianness, Field, Int, MessageHeader, TimeUnit, Type};
use arrow_schema::{DataType, Schema, UnionFields};
use flatbuffers::FlatBufferBuilder;

use crate::error::{Error, Result};
use crate::manifest::message;

/// Returns a schema as Arrow's IPC message.
pub(crate) fn to_bytes(schema: &Schema) -> Vec<u8> {
    let mut builder = FlatBufferBuilder::new();
    let mut dictionaries = arrow_ipc::writer::DictionaryTracker::new(false);
    let schema = arrow_ipc::convert::IpcSchemaEncoder::new()
        .with_dictionary_tracker(&mut dictionaries)
        .schema_to_fb_offset(&mut builder, schema)
        .as_union_value();
    message(builder, MessageHeader::Schema, schema)
}

/// # Errors
/// Returns [`Error::Protocol`] for bytes that are no schema.
pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Schema> {
    let message = arrow_ipc::root_as_message(bytes);
    let message = message.map_err(|e| Error::protocol(format!("a schema: {e}")))?;
    let schema = message.header_as_schema();
    let schema = schema.ok_or_else(|| Error::protocol("a message that is no schema"))?;
    let mut fields = schema.fields().into_iter().flatten();
    let is_ours = schema.fields().is_some() && schema.endianness() == Endianness::Little;
    if !is_ours || !fields.all(|field| is_possible(field) == Some(true)) {
        return Error::broken("a schema without fields, or that Arrow does not have");
    }
    // `is_possible` refuses what arrow-ipc is known to panic on; this catches what it does not know.
    let read = catch_unwind(|| arrow_ipc::convert::fb_to_schema(schema));
    read.map_err(|_| Error::protocol("a schema that arrow-ipc cannot read"))
}

/// Whether arrow-rs reads the field, and makes arrays of its type, without a panic; `None` if it lacks a part. The message was verified: its
/// depth is bound, and each known type has its table.
fn is_possible(field: Field<'_>) -> Option<bool> {
    let is_int = |int: Int<'_>| matches!(int.bitWidth(), 8 | 16 | 32 | 64);
    let children = field.children();
    let number = children.map_or(0, |children| children.len());
    let is_type = match field.type_type() {
        Type::Null | Type::Bool | Type::Binary | Type::BinaryView | Type::LargeBinary => true,
        Type::Utf8 | Type::Utf8View | Type::LargeUtf8 | Type::Struct_ => true,
        Type::FixedSizeBinary => field.type_as_fixed_size_binary()?.byteWidth() >= 0,
        Type::Int => is_int(field.type_as_int()?),
        Type::FloatingPoint => {
            let precision = field.type_as_floating_point()?.precision();
            precision.variant_name().is_some()
        }
        Type::Date => field.type_as_date()?.unit().variant_name().is_some(),
        Type::Timestamp => field.type_as_timestamp()?.unit().variant_name().is_some(),
        Type::Duration => field.type_as_duration()?.unit().variant_name().is_some(),
        Type::Interval => field.type_as_interval()?.unit().variant_name().is_some(),
        Type::Time => {
            let of = field.type_as_time()?;
            match of.bitWidth() {
                32 => [TimeUnit::SECOND, TimeUnit::MILLISECOND].contains(&of.unit()),
                64 => [TimeUnit::MICROSECOND, TimeUnit::NANOSECOND].contains(&of.unit()),
                _ => false,
            }
        }
        Type::List | Type::LargeList | Type::ListView | Type::LargeListView => number == 1,
        Type::FixedSizeList | Type::Map => number == 1,
        Type::RunEndEncoded => number == 2,
        Type::Decimal => {
            let of = field.type_as_decimal()?;
            let is_width = matches!(of.bitWidth(), 32 | 64 | 128 | 256);
            is_width && u8::try_from(of.precision()).is_ok() && i8::try_from(of.scale()).is_ok()
        }
        // As many as there are numbers for them.
        Type::Union if number <= 128 => {
            let of = field.type_as_union()?;
            let ids: Vec<_> = match of.typeIds() {
                Some(ids) => ids.iter().map(|id| id as i8).collect(),
                None => (0..=i8::MAX).take(number).collect(),
            };
            let fields = vec![arrow_schema::Field::new("", DataType::Null, true); number];
            of.mode().variant_name().is_some() && UnionFields::try_new(ids, fields).is_ok()
        }
        _ => false,
    };
    let keys = field.dictionary().map(|of| of.indexType());
    let are_keys = keys.is_none_or(|of| of.is_some_and(is_int));
    let are_possible = |child| is_possible(child).unwrap_or(false);
    Some(is_type && are_keys && children.into_iter().flatten().all(are_possible))
}
