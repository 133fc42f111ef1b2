//! Maps Arrow types to DLPack types and back.

use std::collections::HashMap;

use arrow_schema::extension::{EXTENSION_TYPE_METADATA_KEY, EXTENSION_TYPE_NAME_KEY};
use arrow_schema::{DataType, Field, IntervalUnit};

use super::abi::DLDataType;

/// Arrow's canonical extension type for booleans of a byte each.
const BOOL8: &str = "arrow.bool8";

/// The DLPack type that values of an Arrow type are exported as, or `None` if there is none. Times are exported as integers,
/// and booleans as the bytes that hold their bits, unless they are bytes themselves.
pub(super) fn element(data_type: &DataType, field: Option<&Field>) -> Option<DLDataType> {
    use DataType as T;
    let (code, bits) = match data_type {
        T::Int8 if field.and_then(Field::extension_type_name) == Some(BOOL8) => {
            (DLDataType::BOOL, 8)
        }
        T::Boolean | T::UInt8 => (DLDataType::UINT, 8),
        T::Int8 => (DLDataType::INT, 8),
        T::Int16 => (DLDataType::INT, 16),
        T::UInt16 => (DLDataType::UINT, 16),
        T::Int32 | T::Date32 | T::Time32(_) | T::Interval(IntervalUnit::YearMonth) => {
            (DLDataType::INT, 32)
        }
        T::UInt32 => (DLDataType::UINT, 32),
        T::Int64 | T::Date64 | T::Time64(_) | T::Timestamp(_, _) | T::Duration(_) => {
            (DLDataType::INT, 64)
        }
        T::UInt64 => (DLDataType::UINT, 64),
        T::Float16 => (DLDataType::FLOAT, 16),
        T::Float32 => (DLDataType::FLOAT, 32),
        T::Float64 => (DLDataType::FLOAT, 64),
        _ => return None,
    };
    Some(DLDataType::new(code, bits))
}

/// The Arrow type of a tensor's elements, as the field of a list's items, or `None` if there is none.
pub(super) fn field(element: DLDataType) -> Option<Field> {
    use DLDataType as D;
    if element.lanes != 1 {
        return None;
    }
    let data_type = match (element.code, element.bits) {
        (D::INT | D::BOOL, 8) => DataType::Int8,
        (D::INT, 16) => DataType::Int16,
        (D::INT, 32) => DataType::Int32,
        (D::INT, 64) => DataType::Int64,
        (D::UINT, 8) => DataType::UInt8,
        (D::UINT, 16) => DataType::UInt16,
        (D::UINT, 32) => DataType::UInt32,
        (D::UINT, 64) => DataType::UInt64,
        (D::FLOAT, 16) => DataType::Float16,
        (D::FLOAT, 32) => DataType::Float32,
        (D::FLOAT, 64) => DataType::Float64,
        _ => return None,
    };
    let extension = [
        (EXTENSION_TYPE_NAME_KEY, BOOL8),
        (EXTENSION_TYPE_METADATA_KEY, ""),
    ];
    let metadata: HashMap<_, _> = match element.code {
        D::BOOL => extension.map(|(k, v)| (k.into(), v.into())).into(),
        _ => HashMap::new(),
    };
    Some(Field::new_list_field(data_type, true).with_metadata(metadata))
}
