//! The order of values: each type's values become numbers that compare as the values do.

use datafusion::arrow::datatypes::{DataType, IntervalUnit};

/// A value as a number of 256 bits, most significant word first. The keys of two values of a type compare as DataFusion
/// compares the values: both zeros of a float are equal, and NaNs are beyond the infinities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) [u64; 4]);

/// How the kernels read the values of a type whose values they order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) family: u64,
    /// Bytes of a value.
    pub(crate) width: usize,
}

/// How values are ordered. The numbers are those of the CUDA kernels.
pub(crate) const SIGNED: u64 = 0;
pub(crate) const UNSIGNED: u64 = 1;
const FLOAT: u64 = 2;
/// Days, then milliseconds.
const DAY_TIME: u64 = 3;
/// Months, then days, then nanoseconds.
const MONTH_DAY_NANO: u64 = 4;

impl Kind {
    /// Returns `None` for types whose values the kernels do not order.
    pub(crate) fn of(data_type: &DataType) -> Option<Self> {
        use DataType::*;
        let family = match data_type {
            Int8 | Int16 | Int32 | Int64 | Date32 | Date64 | Time32(_) | Time64(_) => SIGNED,
            Timestamp(_, _) | Duration(_) | Interval(IntervalUnit::YearMonth) => SIGNED,
            Decimal32(_, _) | Decimal64(_, _) | Decimal128(_, _) | Decimal256(_, _) => SIGNED,
            UInt8 | UInt16 | UInt32 | UInt64 => UNSIGNED,
            Float16 | Float32 | Float64 => FLOAT,
            Interval(IntervalUnit::DayTime) => DAY_TIME,
            Interval(IntervalUnit::MonthDayNano) => MONTH_DAY_NANO,
            _ => return None,
        };
        let width = data_type.primitive_width()?;
        Some(Self { family, width })
    }

    /// The key of a value of [`width`](Self::width) bytes. The bytes are little-endian, as all devices are.
    pub(crate) fn key(self, value: &[u8]) -> Key {
        const SIGN: u64 = 1 << 63;
        let word = |i: usize| unsigned(&value[8 * i..8 * i + 8]);
        // Negative numbers come before the others if their sign is inverted.
        let half = |i: usize| signed(&value[4 * i..4 * i + 4]) ^ SIGN;
        Key(match self.family {
            SIGNED if self.width == 32 => [word(3) ^ SIGN, word(2), word(1), word(0)],
            SIGNED if self.width == 16 => [word(1) ^ SIGN, word(0), 0, 0],
            SIGNED => [signed(value) ^ SIGN, 0, 0, 0],
            UNSIGNED => [unsigned(value), 0, 0, 0],
            FLOAT => {
                let bits = signed(value);
                // Of a zero, all bits but the sign are unset. The larger the magnitude of a negative float, the smaller it is.
                let is_zero = bits << (64 - 8 * self.width) << 1 == 0;
                let bits = if is_zero { 0 } else { bits };
                [if bits & SIGN != 0 { !bits } else { bits ^ SIGN }, 0, 0, 0]
            }
            DAY_TIME => [half(0), half(1), 0, 0],
            _ => [half(0), half(1), word(1) ^ SIGN, 0],
        })
    }
}

/// At most 8 bytes as a number.
fn unsigned(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// As [`unsigned`], with the sign of the number in all bits above it.
fn signed(bytes: &[u8]) -> u64 {
    let above = 64 - 8 * bytes.len();
    ((unsigned(bytes) << above).cast_signed() >> above).cast_unsigned()
}
