//! Maps Arrow types to DLPack types and back.

use arrow_schema::{DataType, IntervalUnit};

use super::abi::DLDataType;

/// The DLPack type that values of an Arrow type are exported as, or `None` if there is none. Times are exported as integers,
/// and booleans as the bytes that hold their bits.
pub(super) fn element(data_type: &DataType) -> Option<DLDataType> {
    use DataType as T;
    let (code, bits) = match data_type {
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

/// The Arrow type of a tensor's elements, or `None` if there is none. Booleans, which are bytes, become `UInt8`.
pub(super) fn data_type(element: DLDataType) -> Option<DataType> {
    use DLDataType as D;
    if element.lanes != 1 {
        return None;
    }
    Some(match (element.code, element.bits) {
        (D::INT, 8) => DataType::Int8,
        (D::INT, 16) => DataType::Int16,
        (D::INT, 32) => DataType::Int32,
        (D::INT, 64) => DataType::Int64,
        (D::UINT | D::BOOL, 8) => DataType::UInt8,
        (D::UINT, 16) => DataType::UInt16,
        (D::UINT, 32) => DataType::UInt32,
        (D::UINT, 64) => DataType::UInt64,
        (D::FLOAT, 16) => DataType::Float16,
        (D::FLOAT, 32) => DataType::Float32,
        (D::FLOAT, 64) => DataType::Float64,
        _ => return None,
    })
}
