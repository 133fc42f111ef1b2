//! The kernels of groups and their states.

use std::collections::HashMap;

use super::View;
use super::columns::bytes;
use super::decimals::{integer, number};
use super::filters::blame;

pub(super) fn group(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[
        before,
        table,
        places,
        leaders,
        passing,
        layout,
        width,
        values,
        data,
        bits,
        bit,
        rows,
    ] = p
    else {
        return Err("group takes 12 parameters".into());
    };
    if !places.is_power_of_two() || places <= rows {
        return Err(blame(view, format!("{places} places for {rows} rows")));
    }
    if view
        .read_u64(table, places)?
        .iter()
        .any(|place| *place != 0)
    {
        return Err(blame(view, "the table is not empty".into()));
    }
    let valid = view.read_mask(bits, bit, rows)?;
    let before = view.read_u64(before, rows)?;
    let mut last = HashMap::new();
    let mut of_rows = Vec::new();
    for (row, (before, valid)) in (0..).zip(before.iter().zip(valid)) {
        let key = match valid {
            true => Some(bytes(view, (layout, width, values, data), row)?),
            false => None,
        };
        last.insert((*before, key.clone()), row);
        of_rows.push((*before, key));
    }
    // Any row of a group may be its leader. On a device it depends on the order of the threads: here it is the last.
    let found: Vec<u64> = of_rows.iter().map(|key| last[key]).collect();
    let leads: Vec<u8> = (0..)
        .zip(&found)
        .map(|(row, leader)| u8::from(row == *leader))
        .collect();
    view.write_u64(leaders, &found)?;
    view.write(passing, &leads)
}

pub(super) fn accumulate(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[
        step,
        mask_low,
        mask_high,
        leaders,
        cells,
        seen,
        family,
        width,
        values,
        bits,
        bit,
        rows,
    ] = p
    else {
        return Err("accumulate takes 12 parameters".into());
    };
    let valid = view.read_mask(bits, bit, rows)?;
    let leaders = view.read_u64(leaders, rows)?;
    for ((row, leader), valid) in (0..).zip(leaders).zip(valid) {
        if !valid {
            continue;
        }
        let value = match values {
            0 => 1,
            at => integer(&view.read(at + row * width, width as usize)?, family),
        };
        let value = value ^ number(mask_low, mask_high);
        let (low, high) = (value as u64, (value >> 64) as u64);
        let at = cells + 16 * leader;
        let cell = view.read_u64(at, 2)?;
        let cell = match step {
            0 => {
                let sum = number(cell[0], cell[1]).wrapping_add(value);
                [sum as u64, (sum >> 64) as u64]
            }
            1 => [cell[0], cell[1].max(high)],
            2 if cell[1] == high => [cell[0].max(low), high],
            2 => [cell[0], cell[1]],
            _ => return Err(blame(view, format!("there is no step {step}"))),
        };
        view.write_u64(at, &cell)?;
        let at = seen + leader / 8;
        let bits = view.read(at, 1)?[0] | 1 << (leader % 8);
        view.write(at, &[bits])?;
    }
    Ok(())
}

pub(super) fn finish(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[cells, rows, mask_low, mask_high, width, out] = p else {
        return Err("finish takes 6 parameters".into());
    };
    if !matches!(width, 1 | 2 | 4 | 8 | 16) {
        return Err(blame(view, format!("there are no values of {width} bytes")));
    }
    let mut values = Vec::new();
    for cell in view.read_u64(cells, 2 * rows)?.chunks_exact(2) {
        let value = number(cell[0], cell[1]) ^ number(mask_low, mask_high);
        values.extend(&value.to_le_bytes()[..width as usize]);
    }
    view.write(out, &values)
}
