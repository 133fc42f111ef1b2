//! Single values: awkward strings, floats and numbers within the range of their type.

use arrow_buffer::i256;
use arrow_schema::{DataType, IntervalUnit, TimeUnit};

use super::rng::Rng;

fn text(rng: &mut Rng, out: &mut Vec<u8>) {
    const ODD: [&str; 6] = ["é", "☃", "𝄞", "ß\u{301}", "日本語日本語日本語", "\0"];
    match rng.below(8) {
        0 => {}
        1 => out.extend(ODD[rng.below(ODD.len())].bytes()),
        kind => {
            let length = match kind {
                2 => 12, // the longest that a view holds inline
                3 => 13,
                4 | 5 => 14 + rng.below(50),
                _ => 1 + rng.below(11),
            };
            out.extend((0..length).map(|_| b'a' + rng.below(26) as u8));
        }
    }
}

/// A string, or random bytes of the length of one.
pub(super) fn value(rng: &mut Rng, data_type: &DataType) -> Vec<u8> {
    let mut value = vec![];
    text(rng, &mut value);
    if matches!(
        data_type,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView
    ) {
        value.iter_mut().for_each(|byte| *byte = rng.next() as u8);
    }
    value
}

/// One value of a type of fixed width.
pub(super) fn fixed(rng: &mut Rng, data_type: &DataType) -> Vec<u8> {
    use DataType::*;
    let special = rng.one_in(4);
    match data_type {
        // NaNs with payloads, both zeros, an infinity and a subnormal.
        Float16 if special => [0x7e01u16, 0xfe55, 0, 0x8000, 0x7c00, 1][rng.below(6)]
            .to_le_bytes()
            .into(),
        Float32 if special => [0x7fc0_0001u32, 0xff80_1234, 0, 0x8000_0000, 0x7f80_0000, 1]
            [rng.below(6)]
        .to_le_bytes()
        .into(),
        Float64 if special => {
            let bits = [
                0x7ff8_0000_0000_0001u64,
                0xfff0_0000_0000_1234,
                0,
                1 << 63,
                0x7ff << 52,
                1,
            ];
            bits[rng.below(6)].to_le_bytes().into()
        }
        Float16 | Float32 | Float64 => {
            rng.next().to_le_bytes()[..data_type.primitive_width().unwrap()].into()
        }
        Decimal32(precision, _) | Decimal64(precision, _) | Decimal128(precision, _) => {
            let bits = (u128::from(rng.next()) << 64 | u128::from(rng.next())) >> 1;
            let value = bits as i128 % 10i128.pow(1 + rng.below(*precision as usize) as u32);
            let value = if rng.one_in(2) { -value } else { value };
            value.to_le_bytes()[..data_type.primitive_width().unwrap()].into()
        }
        Decimal256(precision, _) if *precision < 76 => {
            i256::from_i128(i128::from(rng.signed()) % 10i128.pow(u32::from(*precision).min(38)))
                .to_le_bytes()
                .into()
        }
        Decimal256(..) => {
            let low = u128::from(rng.next()) << 64 | u128::from(rng.next());
            i256::from_parts(low, i128::from(rng.signed()) << 58)
                .to_le_bytes()
                .into()
        }
        Date64 => ((rng.signed() >> 32) * 86_400_000).to_le_bytes().into(),
        Time32(unit) | Time64(unit) => {
            let day = 86_400usize
                * match unit {
                    TimeUnit::Second => 1,
                    TimeUnit::Millisecond => 1_000,
                    TimeUnit::Microsecond => 1_000_000,
                    TimeUnit::Nanosecond => 1_000_000_000,
                };
            rng.below(day).to_le_bytes()[..data_type.primitive_width().unwrap()].into()
        }
        Interval(IntervalUnit::MonthDayNano) => {
            [rng.next(), rng.next()].map(u64::to_le_bytes).concat()
        }
        FixedSizeBinary(width) => (0..*width).map(|_| rng.next() as u8).collect(),
        _ => {
            let width = data_type
                .primitive_width()
                .unwrap_or_else(|| panic!("no generator for {data_type}"));
            rng.signed().to_le_bytes()[..width].into()
        }
    }
}
