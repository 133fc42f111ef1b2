//! The order of values: each type's values become numbers that compare as the values do.

use datafusion::arrow::datatypes::{DataType, IntervalUnit};

/// A value as a number of 256 bits, most significant word first. The keys of two values of a type compare as DataFusion
/// compares the values: both zeros of a float are equal, and NaNs are beyond the infinities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) [u64; 4]);

/// How the kernels read the values of a type whose values they order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) family: Family,
    /// Bytes of a value.
    pub(crate) width: usize,
}

/// The numbers are those of the CUDA kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Signed = 0,
    Unsigned = 1,
    Float = 2,
    /// Days, then milliseconds.
    DayTime = 3,
    /// Months, then days, then nanoseconds.
    MonthDayNano = 4,
}

impl Family {
    pub(crate) const ALL: [Self; 5] = [
        Self::Signed,
        Self::Unsigned,
        Self::Float,
        Self::DayTime,
        Self::MonthDayNano,
    ];
}

impl Kind {
    /// Returns `None` for types whose values the kernels do not order.
    pub(crate) fn of(data_type: &DataType) -> Option<Self> {
        use DataType::*;
        let family = match data_type {
            Int8 | Int16 | Int32 | Int64 | Date32 | Date64 | Time32(_) | Time64(_) => {
                Family::Signed
            }
            Timestamp(_, _) | Duration(_) | Interval(IntervalUnit::YearMonth) => Family::Signed,
            Decimal32(_, _) | Decimal64(_, _) | Decimal128(_, _) | Decimal256(_, _) => {
                Family::Signed
            }
            UInt8 | UInt16 | UInt32 | UInt64 => Family::Unsigned,
            Float16 | Float32 | Float64 => Family::Float,
            Interval(IntervalUnit::DayTime) => Family::DayTime,
            Interval(IntervalUnit::MonthDayNano) => Family::MonthDayNano,
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
        Key(match self.family {
            Family::Signed if self.width == 32 => [word(3) ^ SIGN, word(2), word(1), word(0)],
            Family::Signed if self.width == 16 => [word(1) ^ SIGN, word(0), 0, 0],
            Family::Signed => [signed(value) ^ SIGN, 0, 0, 0],
            Family::Unsigned => [unsigned(value), 0, 0, 0],
            Family::Float => {
                let mut bits = signed(value);
                let magnitude = bits << (64 - 8 * self.width) << 1;
                if magnitude == 0 {
                    bits = 0;
                }
                // The larger the magnitude of a negative float, the smaller it is.
                let negative = bits & SIGN != 0;
                [(if negative { !bits } else { bits ^ SIGN }), 0, 0, 0]
            }
            Family::DayTime => [
                signed(&value[..4]) ^ SIGN,
                signed(&value[4..8]) ^ SIGN,
                0,
                0,
            ],
            Family::MonthDayNano => [
                signed(&value[..4]) ^ SIGN,
                signed(&value[4..8]) ^ SIGN,
                word(1) ^ SIGN,
                0,
            ],
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
