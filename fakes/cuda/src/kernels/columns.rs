//! The kernels of filters that read columns: numbers, bits, and bytes in several layouts.

use super::filters::{blame, passing};
use super::{View, word};

const SIGN: u64 = 1 << 63;

/// The most bytes that lie in a view.
const INLINE: usize = 12;

/// A value as a number of 256 bits, most significant word first, which compares as the value does.
fn key(family: u64, value: &[u8]) -> Option<[u64; 4]> {
    let unsigned = |bytes: &[u8]| {
        let mut number = [0; 8];
        number[..bytes.len()].copy_from_slice(bytes);
        word(&number)
    };
    let signed = |bytes: &[u8]| {
        let above = 64 - 8 * bytes.len();
        ((unsigned(bytes) << above) as i64 >> above) as u64
    };
    let mut key = [0; 4];
    match (family, value.len()) {
        (0, 16 | 32) => {
            for (to, from) in key.iter_mut().zip(value.chunks_exact(8).rev()) {
                *to = word(from);
            }
            key[0] ^= SIGN;
        }
        (0, 1 | 2 | 4 | 8) => key[0] = signed(value) ^ SIGN,
        (1, 1 | 2 | 4 | 8) => key[0] = unsigned(value),
        (2, 2 | 4 | 8) => {
            let bits = signed(value);
            // Of a zero, all bits but the sign are unset.
            let zero = bits << (64 - 8 * value.len()) << 1 == 0;
            key[0] = match (zero, bits & SIGN) {
                (true, _) => SIGN,
                (_, 0) => bits ^ SIGN,
                _ => !bits,
            };
        }
        (3, 8) => {
            key[0] = signed(&value[..4]) ^ SIGN;
            key[1] = signed(&value[4..]) ^ SIGN;
        }
        (4, 16) => {
            key[0] = signed(&value[..4]) ^ SIGN;
            key[1] = signed(&value[4..8]) ^ SIGN;
            key[2] = signed(&value[8..]) ^ SIGN;
        }
        _ => return None,
    }
    Some(key)
}

/// Writes 0 for the rows that pass no more.
fn fail(
    view: &mut View<'_, '_>,
    at: u64,
    rows: u64,
    mut passes: impl FnMut(&View<'_, '_>, u64) -> Result<bool, String>,
) -> Result<(), String> {
    let mut left = view.read(at, rows as usize)?;
    for (row, left) in (0..).zip(&mut left) {
        if *left != 0 && !passes(view, row)? {
            *left = 0;
        }
    }
    view.write(at, &left)
}

pub(super) fn keep(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[bits, bit, rows, wanted, passing] = p else {
        return Err("keep takes 5 parameters".into());
    };
    let bits = view.read_mask(bits, bit, rows)?;
    fail(view, passing, rows, |_, row| {
        Ok(bits[row as usize] == (wanted != 0))
    })
}

pub(super) fn compare(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[family, width, values, rows, orderings, a, b, c, d, passing] = p else {
        return Err("compare takes 10 parameters".into());
    };
    let bytes = view.read(values, (rows * width) as usize)?;
    fail(view, passing, rows, |view, row| {
        let start = (row * width) as usize;
        let value = &bytes[start..start + width as usize];
        let what = || format!("there are no values of family {family} and {width} bytes");
        let key = key(family, value).ok_or_else(|| blame(view, what()))?;
        let ordering = 1u64 << (key.cmp(&[a, b, c, d]) as i8 + 1);
        Ok(ordering & orderings != 0)
    })
}

/// The bytes of a row of a layout: of fixed width, with offsets of 4 or 8 bytes, of views.
pub(super) fn bytes(
    view: &View<'_, '_>,
    (layout, width, values, data): (u64, u64, u64, u64),
    row: u64,
) -> Result<Vec<u8>, String> {
    let number = |at: u64, width: u64| {
        let mut bytes = view.read(at, width as usize)?;
        bytes.resize(8, 0);
        Ok::<u64, String>(word(&bytes))
    };
    let (at, len) = match layout {
        0 => (values + row * width, width),
        1 | 2 => {
            let width = 4 * layout;
            let start = number(values + row * width, width)?;
            let end = number(values + (row + 1) * width, width)?;
            (data + start, end - start)
        }
        3 => {
            let at = values + 16 * row;
            let len = number(at, 4)?;
            if len <= INLINE as u64 {
                (at + 4, len)
            } else {
                let buffer = number(data + 8 * number(at + 8, 4)?, 8)?;
                (buffer + number(at + 12, 4)?, len)
            }
        }
        _ => return Err(blame(view, format!("there is no layout {layout}"))),
    };
    match len {
        0 => Ok(Vec::new()),
        len => view.read(at, len as usize),
    }
}

pub(super) fn compare_bytes(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[
        layout,
        width,
        values,
        data,
        rows,
        literal,
        length,
        orderings,
        passing,
    ] = p
    else {
        return Err("compare_bytes takes 9 parameters".into());
    };
    let literal = match length {
        0 => Vec::new(),
        length => view.read(literal, length as usize)?,
    };
    fail(view, passing, rows, |view, row| {
        let found = bytes(view, (layout, width, values, data), row)?;
        // 1, 2 or 4.
        let ordering = 1u64 << (found.cmp(&literal) as i8 + 1);
        Ok(ordering & orderings != 0)
    })
}

pub(super) fn count_nulls(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[at, bits, bit, rows, nulls] = p else {
        return Err("count_nulls takes 5 parameters".into());
    };
    let passing = passing(view, at, rows)?;
    let valid = view.read_mask(bits, bit, rows)?;
    let null = passing
        .iter()
        .zip(&valid)
        .filter(|(passes, valid)| **passes && !**valid);
    let more = null.count() as u64;
    let before = view.read_u64(nulls, 1)?[0];
    view.write_u64(nulls, &[before + more])
}

pub(super) fn measure(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[layout, values, data, bits, bit, rows, at, lengths] = p else {
        return Err("measure takes 8 parameters".into());
    };
    let passing = passing(view, at, rows)?;
    let valid = view.read_mask(bits, bit, rows)?;
    let mut found = vec![0; rows as usize];
    for (row, found) in found.iter_mut().enumerate() {
        if passing[row] && valid[row] {
            let len = bytes(view, (layout, 0, values, data), row as u64)?.len();
            let inside = layout == 3 && len <= INLINE;
            *found = if inside { 0 } else { len as u64 };
        }
    }
    view.write_u64(lengths, &found)
}

pub(super) fn gather(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[unit, width, values, picked, count, out] = p else {
        return Err("gather takes 6 parameters".into());
    };
    if !matches!(unit, 1 | 2 | 4 | 8) || width % unit != 0 || (values | out) % unit != 0 {
        let text = format!("{width} bytes from {values:#x} to {out:#x} in units of {unit}");
        return Err(blame(view, text));
    }
    let mut taken = Vec::new();
    for row in view.read_u64(picked, count)? {
        taken.extend(view.read(values + row * width, width as usize)?);
    }
    view.write(out, &taken)
}

pub(super) fn gather_bits(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[bits, bit, picked, count, out, to] = p else {
        return Err("gather_bits takes 6 parameters".into());
    };
    let picked = view.read_u64(picked, count)?;
    // The kernel reads and writes whole words.
    let (first, end) = (to / 32 * 4, (to + count).div_ceil(32) * 4);
    let mut bytes = view.read(out + first, (end - first) as usize)?;
    for (at, row) in (to % 32..).zip(picked) {
        let set = view.read_mask(bits, bit + row, 1)?[0];
        bytes[at as usize / 8] |= u8::from(set) << (at % 8);
    }
    view.write(out + first, &bytes)
}

pub(super) fn gather_bytes(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[
        layout,
        values,
        data,
        bits,
        bit,
        picked,
        starts,
        count,
        base,
        out,
        out_data,
    ] = p
    else {
        return Err("gather_bytes takes 11 parameters".into());
    };
    let picked = view.read_u64(picked, count)?;
    let (mut places, mut end) = (Vec::new(), base);
    for row in picked {
        let found = match view.read_mask(bits, bit + row, 1)?[0] {
            true => bytes(view, (layout, 0, values, data), row)?,
            false => Vec::new(),
        };
        let start = base + view.read_u64(starts + 8 * row, 1)?[0];
        let inside = layout == 3 && found.len() <= INLINE;
        if layout == 3 {
            places.extend((found.len() as u32).to_le_bytes());
            let mut rest = [0; INLINE];
            if inside {
                rest[..found.len()].copy_from_slice(&found);
            } else {
                rest[..4].copy_from_slice(&found[..4]);
                rest[8..].copy_from_slice(&(start as u32).to_le_bytes());
            }
            places.extend(rest);
        } else {
            places.extend(&start.to_le_bytes()[..4 * layout as usize]);
        }
        if !inside && !found.is_empty() {
            view.write(out_data + start, &found)?;
            end = start + found.len() as u64;
        }
    }
    if layout != 3 {
        places.extend(&end.to_le_bytes()[..4 * layout as usize]);
    }
    view.write(out, &places)
}
