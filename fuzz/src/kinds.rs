//! Arrow types in inputs.

use std::sync::{Arc, LazyLock};

use arrow_schema::{DataType, Field, FieldRef, Fields, UnionFields, UnionMode};

use crate::input::Input;
use crate::support::types::flat_types;

/// Types below a root nest at most so deep.
pub(crate) const DEPTH: usize = 6;
/// Types of an array and its descendants.
pub(crate) const MOST: usize = 40;

/// Types without children.
pub(crate) static FLAT: LazyLock<Vec<DataType>> =
    LazyLock::new(|| flat_types().into_iter().map(|(_, t)| t).collect());

pub(crate) const KEYS: [DataType; 8] = [
    DataType::Int8,
    DataType::Int16,
    DataType::Int32,
    DataType::Int64,
    DataType::UInt8,
    DataType::UInt16,
    DataType::UInt32,
    DataType::UInt64,
];
pub(crate) const RUN_ENDS: [DataType; 3] = [DataType::Int16, DataType::Int32, DataType::Int64];
/// Tags of types with children follow those without.
pub(crate) const NESTED: u8 = 128;

/// Reads a type. Every one can be had.
pub(crate) fn data_type(input: &mut Input<'_>) -> DataType {
    read(input, 0, &mut 1)
}

fn read(input: &mut Input<'_>, depth: usize, types: &mut usize) -> DataType {
    use DataType as T;
    let tag = input.u8();
    if tag < NESTED || depth == DEPTH || *types >= MOST {
        return FLAT[usize::from(tag % NESTED) % FLAT.len()].clone();
    }
    match (tag - NESTED) % 13 {
        0 => T::List(field(input, depth, types)),
        1 => T::LargeList(field(input, depth, types)),
        2 => T::ListView(field(input, depth, types)),
        3 => T::LargeListView(field(input, depth, types)),
        4 => {
            let size = i32::try_from(input.count()).unwrap_or(i32::MAX).max(0);
            T::FixedSizeList(field(input, depth, types), size)
        }
        5 => T::Struct(fields(input, 6, depth, types).into()),
        6 | 7 => {
            let sorted = tag % 2 == 1;
            let entries = vec![
                field(input, depth + 1, types),
                field(input, depth + 1, types),
            ];
            let entries = Field::new("entries", T::Struct(entries.into()), false);
            T::Map(Arc::new(entries), sorted)
        }
        8 | 9 => {
            let mode = [UnionMode::Sparse, UnionMode::Dense][usize::from(tag % 2)];
            let fields = fields(input, 4, depth, types);
            let first = input.u8() % 100;
            let ids = (0..fields.len()).map(|i| ((usize::from(first) + 7 * i) % 128) as i8);
            match UnionFields::try_new(ids, fields) {
                Ok(fields) => T::Union(fields, mode),
                Err(_) => T::Null,
            }
        }
        10 | 11 => {
            let key = KEYS[input.choice(KEYS.len())].clone();
            *types += 1;
            T::Dictionary(Box::new(key), Box::new(read(input, depth + 1, types)))
        }
        _ => {
            let ends = RUN_ENDS[input.choice(RUN_ENDS.len())].clone();
            *types += 1;
            let ends = Arc::new(Field::new("run_ends", ends, false));
            T::RunEndEncoded(ends, field(input, depth, types))
        }
    }
}

fn field(input: &mut Input<'_>, depth: usize, types: &mut usize) -> FieldRef {
    *types += 1;
    let flags = input.u8();
    let name = ["item", "a", "ü", ""][usize::from(flags >> 1) % 4];
    let data_type = read(input, depth + 1, types);
    Arc::new(Field::new(name, data_type, flags & 1 == 0))
}

fn fields(input: &mut Input<'_>, most: usize, depth: usize, types: &mut usize) -> Vec<FieldRef> {
    (0..input.choice(most + 1))
        .map(|_| field(input, depth, types))
        .collect()
}

/// The children's types; a dictionary's values are one.
pub(crate) fn children(data_type: &DataType) -> Vec<&DataType> {
    use DataType as T;
    match data_type {
        T::List(f)
        | T::LargeList(f)
        | T::ListView(f)
        | T::LargeListView(f)
        | T::FixedSizeList(f, _)
        | T::Map(f, _) => vec![f.data_type()],
        T::Struct(fields) => type_of(fields),
        T::Union(fields, _) => fields.iter().map(|(_, f)| f.data_type()).collect(),
        T::Dictionary(_, values) => vec![values],
        T::RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
        _ => vec![],
    }
}

fn type_of(fields: &Fields) -> Vec<&DataType> {
    fields.iter().map(|f| f.data_type()).collect()
}
