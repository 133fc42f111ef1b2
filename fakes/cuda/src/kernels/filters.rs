//! The kernels of filters, which run in steps: each checks what the one before it has written.

use super::View;

/// How many rows a tile has.
fn rows_of_tile(rows: u64, tiles: u64) -> u64 {
    rows.div_ceil(tiles).next_multiple_of(32)
}

/// The number of kept rows of each tile.
fn count_tiles(kept: &[bool], tiles: u64) -> Vec<u64> {
    let mut counts = vec![0; tiles as usize];
    let size = match tiles {
        0 => return counts,
        tiles => rows_of_tile(kept.len() as u64, tiles) as usize,
    };
    for (row, _) in kept.iter().enumerate().filter(|(_, kept)| **kept) {
        counts[row / size] += 1;
    }
    counts
}

/// The rows that are kept, in their order. Their tiles' starts must be right, and all rows must
/// have a tile.
fn scatter(
    view: &View<'_, '_>,
    kept: &[bool],
    starts: u64,
    tiles: u64,
) -> Result<Vec<u64>, String> {
    let mut place = 0;
    let found = view.read_u64(starts, tiles)?;
    for (tile, (count, start)) in count_tiles(kept, tiles).iter().zip(found).enumerate() {
        if start != place {
            return Err(blame(
                view,
                format!("tile {tile} starts at {start}, not {place}"),
            ));
        }
        place += count;
    }
    check_tiles(view, kept.len() as u64, tiles)?;
    let rows = (0..).zip(kept).filter(|(_, kept)| **kept);
    Ok(rows.map(|(row, _)| row).collect())
}

fn check_tiles(view: &View<'_, '_>, rows: u64, tiles: u64) -> Result<(), String> {
    if tiles == 0 && rows > 0 {
        return Err(blame(view, format!("{rows} rows have no tile")));
    }
    Ok(())
}

/// Notes a violation; the kernel fails with it.
pub(super) fn blame(view: &View<'_, '_>, text: String) -> String {
    view.engine.blame(text.clone());
    text
}

fn write_counts(
    view: &mut View<'_, '_>,
    kept: &[bool],
    tiles: u64,
    counts: u64,
) -> Result<(), String> {
    check_tiles(view, kept.len() as u64, tiles)?;
    view.write_u64(counts, &count_tiles(kept, tiles))
}

fn is_above(view: &View<'_, '_>, p: &[u64], rows: u64) -> Result<Vec<bool>, String> {
    let &[values, bits, bit, limit] = p else {
        return Err("a filter by a limit takes 4 parameters for it".into());
    };
    let valid = view.read_mask(bits, bit, rows)?;
    let limit = f64::from_bits(limit);
    let values = view.read_f64(values, rows)?;
    let above = values.iter().zip(valid);
    Ok(above
        .map(|(value, valid)| valid && *value > limit)
        .collect())
}

pub(super) fn count_above_f64(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[.., rows, tiles, counts] = p else {
        return Err("count_above_f64 takes 7 parameters".into());
    };
    let kept = is_above(view, &p[..p.len() - 3], rows)?;
    write_counts(view, &kept, tiles, counts)
}

pub(super) fn above_f64(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[values, _, _, _, rows, tiles, starts, out] = p else {
        return Err("above_f64 takes 8 parameters".into());
    };
    let kept = is_above(view, &p[..4], rows)?;
    let places = scatter(view, &kept, starts, tiles)?;
    let values = view.read_u64(values, rows)?;
    let kept: Vec<u64> = places.iter().map(|row| values[*row as usize]).collect();
    view.write_u64(out, &kept)
}

pub(super) fn scan_u64(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[starts, n, total] = p else {
        return Err("scan_u64 takes 3 parameters".into());
    };
    let mut sum = 0u64;
    let mut sums = view.read_u64(starts, n)?;
    for value in &mut sums {
        let own = std::mem::replace(value, sum);
        sum = sum.wrapping_add(own);
    }
    view.write_u64(starts, &sums)?;
    view.write_u64(total, &[sum])
}

/// Which rows pass.
pub(super) fn passing(view: &View<'_, '_>, at: u64, rows: u64) -> Result<Vec<bool>, String> {
    let bytes = view.read(at, rows as usize)?;
    Ok(bytes.iter().map(|passes| *passes != 0).collect())
}

pub(super) fn count_passing(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[at, rows, tiles, counts] = p else {
        return Err("count_passing takes 4 parameters".into());
    };
    let kept = passing(view, at, rows)?;
    write_counts(view, &kept, tiles, counts)
}

pub(super) fn select(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[at, rows, tiles, starts, picked] = p else {
        return Err("select takes 5 parameters".into());
    };
    let kept = passing(view, at, rows)?;
    let places = scatter(view, &kept, starts, tiles)?;
    view.write_u64(picked, &places)
}
