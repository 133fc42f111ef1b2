//! Maps Arrow types to DLPack types and back.

use std::collections::HashMap;

use arrow_schema::extension::{EXTENSION_TYPE_METADATA_KEY, EXTENSION_TYPE_NAME_KEY};
use arrow_schema::{DataType, Field, IntervalUnit};

use super::abi::DLDataType;

/// Arrow's canonical extension type for booleans of a byte each.
const BOOL8: &str = "arrow.bool8";

/// The types of numbers that both have.
const NUMBERS: [(u8, u8, DataType); 11] = [
    (DLDataType::INT, 8, DataType::Int8),
    (DLDataType::INT, 16, DataType::Int16),
    (DLDataType::INT, 32, DataType::Int32),
    (DLDataType::INT, 64, DataType::Int64),
    (DLDataType::UINT, 8, DataType::UInt8),
    (DLDataType::UINT, 16, DataType::UInt16),
    (DLDataType::UINT, 32, DataType::UInt32),
    (DLDataType::UINT, 64, DataType::UInt64),
    (DLDataType::FLOAT, 16, DataType::Float16),
    (DLDataType::FLOAT, 32, DataType::Float32),
    (DLDataType::FLOAT, 64, DataType::Float64),
];

/// The DLPack type that values of an Arrow type are exported as, or `None` if there is none. Times are exported as integers,
/// and booleans as the bytes that hold their bits, unless they are bytes themselves.
pub(super) fn element(data_type: &DataType, field: Option<&Field>) -> Option<DLDataType> {
    use DataType as T;
    let number = match data_type {
        T::Int8 if field.and_then(Field::extension_type_name) == Some(BOOL8) => {
            return Some(DLDataType::new(DLDataType::BOOL, 8));
        }
        T::Boolean => &T::UInt8,
        T::Date32 | T::Time32(_) | T::Interval(IntervalUnit::YearMonth) => &T::Int32,
        T::Date64 | T::Time64(_) | T::Timestamp(_, _) | T::Duration(_) => &T::Int64,
        number => number,
    };
    let found = NUMBERS.iter().find(|(_, _, known)| known == number);
    found.map(|(code, bits, _)| DLDataType::new(*code, *bits))
}

/// The Arrow type of a tensor's elements, as the field of a list's items, or `None` if there is none.
pub(super) fn field(element: DLDataType) -> Option<Field> {
    if element == DLDataType::new(DLDataType::BOOL, 8) {
        let metadata = HashMap::from([
            (EXTENSION_TYPE_NAME_KEY.into(), BOOL8.into()),
            (EXTENSION_TYPE_METADATA_KEY.into(), String::new()),
        ]);
        return Some(Field::new_list_field(DataType::Int8, true).with_metadata(metadata));
    }
    let mut numbers = NUMBERS.iter();
    let found = numbers.find(|(code, bits, _)| DLDataType::new(*code, *bits) == element)?;
    Some(Field::new_list_field(found.2.clone(), true))
}
