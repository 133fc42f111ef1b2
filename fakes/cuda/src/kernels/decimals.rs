//! The kernel of decimals of 128 bits.

use super::{View, word};

/// A number of two words, the lower one first.
pub(super) fn number(low: u64, high: u64) -> i128 {
    (u128::from(high) << 64 | u128::from(low)) as i128
}

/// A value of at most 128 bits, of family 0 with a sign.
pub(super) fn integer(value: &[u8], family: u64) -> i128 {
    let mut bytes = [0; 16];
    bytes[..value.len()].copy_from_slice(value);
    let number = number(word(&bytes[..8]), word(&bytes[8..]));
    let above = 128 - 8 * value.len() as u32;
    match family {
        0 => number << above >> above,
        _ => number,
    }
}

pub(super) fn decimal(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let (&[operation, rows, low, high, out, out_bits, overflow], operands) =
        p.split_first_chunk().ok_or("decimal takes 21 parameters")?;
    let (a, b) = operands.split_at(7);
    let (a, b) = (operand(view, a, rows)?, operand(view, b, rows)?);
    let most = number(low, high).unsigned_abs();
    let mut results = Vec::new();
    let mut bits = vec![0u8; rows.div_ceil(32) as usize * 4];
    for (row, (a, b)) in a.into_iter().zip(b).enumerate() {
        let (Some(a), Some(b)) = (a, b) else {
            results.push(0);
            continue;
        };
        bits[row / 8] |= 1 << (row % 8);
        let found = a.zip(b).and_then(|(a, b)| match operation {
            0 => a.checked_add(b),
            1 => a.checked_sub(b),
            2 => a.checked_mul(b),
            3 => a
                .checked_div(b)
                .filter(|found| found.unsigned_abs() <= most),
            _ => None,
        });
        if found.is_none() {
            view.write_u64(overflow, &[1])?;
        }
        results.push(found.unwrap_or(0));
    }
    let words: Vec<u64> = results
        .iter()
        .flat_map(|value: &i128| [*value as u64, (value >> 64) as u64])
        .collect();
    view.write_u64(out, &words)?;
    match out_bits {
        0 => Ok(()),
        at => view.write(at, &bits),
    }
}

/// The rows of an operand: `None` for nulls, and `Some(None)` for what has more than 128 bits.
fn operand(view: &View<'_, '_>, p: &[u64], rows: u64) -> Result<Vec<Option<Option<i128>>>, String> {
    let &[family, width, values, low, high, bits, bit] = p else {
        return Err("an operand takes 7 parameters".into());
    };
    let valid = view.read_mask(bits, bit, rows)?;
    let values = match values {
        0 => vec![1; rows as usize],
        at => {
            let bytes = view.read(at, (rows * width) as usize)?;
            let values = bytes.chunks_exact(width as usize);
            values.map(|value| integer(value, family)).collect()
        }
    };
    let rows = values.into_iter().zip(valid);
    Ok(rows
        .map(|(value, valid)| valid.then(|| value.checked_mul(number(low, high))))
        .collect())
}
