//! A schema as bytes, and back.

use std::panic::catch_unwind;

use arrow_ipc::{Endianness, Field, Int, MessageHeader, TimeUnit, Type};
use arrow_schema::Schema;
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
    if !is_ours || !fields.all(is_possible) {
        return Error::broken("a schema without fields, or that Arrow does not have");
    }
    // `is_possible` refuses what arrow-ipc is known to panic on; this catches what it does not know.
    let read = catch_unwind(|| arrow_ipc::convert::try_schema_from_flatbuffer_bytes(bytes));
    match read {
        Ok(Ok(schema)) => Ok(schema),
        Ok(Err(e)) => Error::broken(format!("a schema: {e}")),
        Err(_) => Error::broken("a schema that arrow-ipc cannot read"),
    }
}

/// Whether arrow-ipc reads the field without a panic. The depth is bound: the message was verified.
fn is_possible(field: Field<'_>) -> bool {
    let is_int = |int: Int<'_>| matches!(int.bitWidth(), 8 | 16 | 32 | 64);
    let children = field.children();
    let number = children.map_or(0, |children| children.len());
    let keys = field
        .dictionary()
        .map(|of| of.indexType().is_some_and(is_int));
    let is_type = match field.type_type() {
        Type::Null | Type::Bool | Type::Binary | Type::BinaryView | Type::LargeBinary => true,
        Type::Utf8 | Type::Utf8View | Type::LargeUtf8 | Type::Struct_ => true,
        Type::Int => field.type_as_int().is_some_and(is_int),
        Type::FixedSizeBinary => field.type_as_fixed_size_binary().is_some(),
        Type::FloatingPoint => field
            .type_as_floating_point()
            .is_some_and(|of| of.precision().variant_name().is_some()),
        Type::Date => field
            .type_as_date()
            .is_some_and(|of| of.unit().variant_name().is_some()),
        Type::Time => field.type_as_time().is_some_and(|of| match of.bitWidth() {
            32 => [TimeUnit::SECOND, TimeUnit::MILLISECOND].contains(&of.unit()),
            64 => [TimeUnit::MICROSECOND, TimeUnit::NANOSECOND].contains(&of.unit()),
            _ => false,
        }),
        Type::Timestamp => field
            .type_as_timestamp()
            .is_some_and(|of| of.unit().variant_name().is_some()),
        Type::Duration => field
            .type_as_duration()
            .is_some_and(|of| of.unit().variant_name().is_some()),
        Type::Interval => field
            .type_as_interval()
            .is_some_and(|of| of.unit().variant_name().is_some()),
        Type::List | Type::LargeList | Type::ListView | Type::LargeListView => number == 1,
        Type::FixedSizeList => number == 1 && field.type_as_fixed_size_list().is_some(),
        Type::Map => number == 1 && field.type_as_map().is_some(),
        Type::RunEndEncoded => number == 2,
        Type::Decimal => field.type_as_decimal().is_some_and(|of| {
            matches!(of.bitWidth(), 32 | 64 | 128 | 256)
                && u8::try_from(of.precision()).is_ok()
                && i8::try_from(of.scale()).is_ok()
        }),
        Type::Union => field.type_as_union().is_some_and(|of| {
            of.mode().variant_name().is_some()
                && of
                    .typeIds()
                    .map_or(number < 128, |ids| are_ids(ids.iter(), number))
        }),
        _ => false,
    };
    is_type && keys.unwrap_or(true) && children.into_iter().flatten().all(is_possible)
}

/// Whether these can be the ids of so many types.
fn are_ids(ids: impl Iterator<Item = i32>, number: usize) -> bool {
    let ids: Vec<_> = ids.collect();
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let is_id = |id: &i32| (0..128).contains(id);
    ids.len() == number && distinct.len() == number && ids.iter().all(is_id)
}
