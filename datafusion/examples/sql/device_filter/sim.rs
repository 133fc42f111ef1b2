//! The kernels of the simulated device: closures on its queue, with the parameters of those in `filter.cu`.

use std::array;
use std::collections::HashMap;
use std::ptr::without_provenance_mut;

use arrow_device::device::DevicePtr;
use arrow_device::device::sim::SimMemory;
use arrow_device::{Queue, Result};
use datafusion::arrow::buffer::BooleanBuffer;

use super::key::{Key, Kind, SIGNED};

type Done = Result<(), String>;

/// Names kernels, and calls those of these names.
macro_rules! kernels {
    ($($name:ident)*) => {
        #[cfg(feature = "cuda")]
        pub(crate) const KERNELS: &[&str] = &[$(stringify!($name)),*];

        fn run(kernel: &str, memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
            let wrong = |_| format!("{} parameters of {kernel}", words.len());
            match kernel {
                $(stringify!($name) => $name(memory, words.try_into().map_err(wrong)?),)*
                _ => Err(format!("there is no kernel {kernel}")),
            }
        }
    };
}

kernels! {
    keep compare compare_bytes count_passing scan_u64 select count_nulls measure gather gather_bits gather_bytes
    decimal group accumulate finish
}

/// # Safety
/// As [`Launcher::launch`](super::kernels::Launcher::launch).
pub(crate) unsafe fn launch(
    queue: &Queue,
    kernel: &'static str,
    _: u64,
    words: &[u64],
) -> Result<()> {
    let words = words.to_vec();
    let kernel = move |memory: &mut SimMemory<'_>| run(kernel, memory, &words);
    // SAFETY: the caller guarantees that the kernel writes only memory that is not frozen yet.
    unsafe { queue.as_sim()?.launch(kernel) }
}

fn ptr(word: u64) -> DevicePtr {
    DevicePtr::new(without_provenance_mut(word as usize))
}

/// Bits from a bit of an address on; at address 0 all are set.
fn bits(memory: &SimMemory<'_>, at: u64, bit: u64, rows: u64) -> Result<BooleanBuffer, String> {
    memory.bits((at != 0).then_some((ptr(at), bit as usize)), rows as usize)
}

/// The rows that pass.
fn rows(memory: &SimMemory<'_>, passing: u64, rows: u64) -> Result<Vec<bool>, String> {
    let passing = memory.slice::<u8>(ptr(passing), rows as usize)?;
    Ok(passing.iter().map(|passes| *passes != 0).collect())
}

/// Sets `passing` to 0 for the rows that fail.
fn fail(
    memory: &mut SimMemory<'_>,
    passing: u64,
    of: u64,
    passes: impl Fn(&SimMemory<'_>, usize) -> Result<bool, String>,
) -> Done {
    let mut left = rows(memory, passing, of)?;
    for (row, left) in left.iter_mut().enumerate().filter(|(_, left)| **left) {
        *left = passes(memory, row)?;
    }
    let left: Vec<u8> = left.into_iter().map(u8::from).collect();
    memory.write(ptr(passing), &left)
}

fn keep(memory: &mut SimMemory<'_>, [at, bit, rows, wanted, passing]: [u64; 5]) -> Done {
    let bits = bits(memory, at, bit, rows)?;
    fail(memory, passing, rows, |_, row| {
        Ok(bits.value(row) == (wanted != 0))
    })
}

fn compare(
    memory: &mut SimMemory<'_>,
    [family, width, values, rows, orderings, a, b, c, d, passing]: [u64; 10],
) -> Done {
    let width = width as usize;
    let (kind, literal) = (Kind { family, width }, Key([a, b, c, d]));
    let values = memory.slice::<u8>(ptr(values), rows as usize * width)?;
    let values = values.to_vec();
    fail(memory, passing, rows, |_, row| {
        let ordering = kind.key(&values[row * width..][..width]).cmp(&literal);
        Ok(orderings >> (ordering as i8 + 1) & 1 == 1)
    })
}

fn compare_bytes(
    memory: &mut SimMemory<'_>,
    [column @ .., rows, literal, length, orderings, passing]: [u64; 9],
) -> Done {
    let texts = Texts(column);
    fail(memory, passing, rows, |memory, row| {
        let literal = memory.slice::<u8>(ptr(literal), length as usize)?;
        let ordering = texts.get(memory, row)?.cmp(literal);
        Ok(orderings >> (ordering as i8 + 1) & 1 == 1)
    })
}

/// The rows of each tile.
fn tiles(passing: &[bool], tiles: u64) -> impl Iterator<Item = &[bool]> {
    let size = passing.len().div_ceil(tiles as usize).next_multiple_of(32);
    let tile = move |i: usize| {
        let start = passing.len().min(i * size);
        &passing[start..passing.len().min(start + size)]
    };
    (0..tiles as usize).map(tile)
}

fn count_passing(memory: &mut SimMemory<'_>, [passing, of, of_tiles, counts]: [u64; 4]) -> Done {
    let passing = rows(memory, passing, of)?;
    let count = |tile: &[bool]| tile.iter().filter(|passes| **passes).count() as u64;
    let of_each: Vec<u64> = tiles(&passing, of_tiles).map(count).collect();
    memory.write(ptr(counts), &of_each)
}

fn scan_u64(memory: &mut SimMemory<'_>, [starts, n, total]: [u64; 3]) -> Done {
    let mut sum = 0;
    for start in memory.slice_mut::<u64>(ptr(starts), n as usize)? {
        let before = sum;
        sum += std::mem::replace(start, before);
    }
    memory.write(ptr(total), &[sum])
}

fn select(memory: &mut SimMemory<'_>, [passing, of, of_tiles, starts, picked]: [u64; 5]) -> Done {
    let passing = rows(memory, passing, of)?;
    let starts = memory.slice::<u64>(ptr(starts), of_tiles as usize)?;
    let starts = starts.to_vec();
    let mut row = 0u64;
    for (tile, start) in tiles(&passing, of_tiles).zip(starts) {
        let numbers = (row..).zip(tile).filter(|(_, passes)| **passes);
        let numbers: Vec<u64> = numbers.map(|(row, _)| row).collect();
        memory.write(ptr(picked + 8 * start), &numbers)?;
        row += tile.len() as u64;
    }
    Ok(())
}

fn count_nulls(memory: &mut SimMemory<'_>, [passing, at, bit, of, count]: [u64; 5]) -> Done {
    let (passing, valid) = (rows(memory, passing, of)?, bits(memory, at, bit, of)?);
    let null = |(passes, valid): &(bool, bool)| *passes && !valid;
    let nulls = passing.into_iter().zip(&valid).filter(null).count();
    memory.slice_mut::<u64>(ptr(count), 1)?[0] += nulls as u64;
    Ok(())
}

fn measure(
    memory: &mut SimMemory<'_>,
    [layout, values, data, at, bit, of, passing, lengths]: [u64; 8],
) -> Done {
    let (passing, valid) = (rows(memory, passing, of)?, bits(memory, at, bit, of)?);
    let texts = Texts([layout, 0, values, data]);
    let length = |row: usize| {
        if !passing[row] || !valid.value(row) {
            return Ok(0);
        }
        // Those in views do not count.
        let len = texts.get(memory, row)?.len();
        Ok(if layout == VIEWS && len <= INLINE {
            0
        } else {
            len as u64
        })
    };
    let of_each: Result<Vec<u64>, String> = (0..of as usize).map(length).collect();
    memory.write(ptr(lengths), &of_each?)
}

fn gather(memory: &mut SimMemory<'_>, [_, width, values, picked, count, out]: [u64; 6]) -> Done {
    let picked = memory.slice::<u64>(ptr(picked), count as usize)?;
    // The picked rows are in order.
    let rows = picked.last().map_or(0, |row| row + 1);
    let values = memory.slice::<u8>(ptr(values), (rows * width) as usize)?;
    let of = |row: &u64| &values[(row * width) as usize..][..width as usize];
    let taken: Vec<u8> = picked.iter().flat_map(of).copied().collect();
    memory.write(ptr(out), &taken)
}

fn gather_bits(memory: &mut SimMemory<'_>, [at, bit, picked, count, out, first]: [u64; 6]) -> Done {
    let picked = memory.slice::<u64>(ptr(picked), count as usize)?.to_vec();
    let of = bits(memory, at, bit, picked.last().map_or(0, |row| row + 1))?;
    let bytes = (first + count).div_ceil(8) as usize;
    let out = memory.slice_mut::<u8>(ptr(out), bytes)?;
    for (at, row) in (first as usize..).zip(picked) {
        out[at / 8] |= u8::from(of.value(row as usize)) << (at % 8);
    }
    Ok(())
}

fn gather_bytes(
    memory: &mut SimMemory<'_>,
    [layout, values, data, at, bit, picked, starts, rest @ ..]: [u64; 11],
) -> Done {
    let [count, base, out, out_data] = rest;
    let picked = memory.slice::<u64>(ptr(picked), count as usize)?.to_vec();
    let valid = bits(memory, at, bit, picked.last().map_or(0, |row| row + 1))?;
    let texts = Texts([layout, 0, values, data]);
    let (mut bytes, mut offsets, mut views) = (Vec::new(), Vec::new(), Vec::new());
    for row in picked {
        let is_valid = valid.value(row as usize);
        let text = if is_valid {
            texts.get(memory, row as usize)?
        } else {
            &[]
        };
        let start = base + memory.slice::<u64>(ptr(starts + 8 * row), 1)?[0];
        offsets.push(start);
        views.push(view(text, start));
        if layout != VIEWS || text.len() > INLINE {
            bytes.extend_from_slice(text);
        }
    }
    offsets.push(base + bytes.len() as u64);
    let narrow: Vec<i32> = offsets.iter().map(|n| *n as i32).collect();
    memory.write(ptr(out_data + base), &bytes)?;
    match layout {
        1 => memory.write(ptr(out), &narrow),
        2 => memory.write(ptr(out), &offsets),
        _ => memory.write(ptr(out), &views),
    }
}

/// A number of its words.
fn number(low: u64, high: u64) -> i128 {
    i128::from(high.cast_signed()) << 64 | i128::from(low)
}

/// Numbers of at most 128 bits; at address 0, ones.
fn integers(
    memory: &SimMemory<'_>,
    [family, width, at, rows]: [u64; 4],
) -> Result<Vec<i128>, String> {
    if at == 0 {
        return Ok(vec![1; rows as usize]);
    }
    let above = 128 - 8 * width;
    let integer = |value: &[u8]| {
        let mut bytes = [0; 16];
        bytes[..value.len()].copy_from_slice(value);
        match family {
            SIGNED => i128::from_le_bytes(bytes) << above >> above,
            _ => i128::from_le_bytes(bytes),
        }
    };
    let bytes = memory.slice::<u8>(ptr(at), (rows * width) as usize)?;
    Ok(bytes.chunks_exact(width as usize).map(integer).collect())
}

fn decimal(memory: &mut SimMemory<'_>, [operation, rows, rest @ ..]: [u64; 21]) -> Done {
    let [low, high, out, out_bits, overflow, operands @ ..] = rest;
    let most = number(low, high).unsigned_abs();
    let operand = |i: usize| {
        let [family, width, at, low, high, of_bits, bit] =
            array::from_fn(|word| operands[7 * i + word]);
        let values = integers(memory, [family, width, at, rows])?.into_iter();
        let factor = number(low, high);
        let values = values.map(move |value| value.checked_mul(factor));
        Ok::<_, String>((values, bits(memory, of_bits, bit, rows)?))
    };
    let ((a, a_valid), (b, b_valid)) = (operand(0)?, operand(1)?);
    let valid = &a_valid & &b_valid;
    let result = |(a, b): (Option<i128>, Option<i128>)| match operation {
        0 => a?.checked_add(b?),
        1 => a?.checked_sub(b?),
        2 => a?.checked_mul(b?),
        _ => a?.checked_div(b?).filter(|n| n.unsigned_abs() <= most),
    };
    let (mut results, mut fits) = (vec![0; rows as usize], true);
    for (row, operands) in a.zip(b).enumerate().filter(|(row, _)| valid.value(*row)) {
        let result = result(operands);
        fits &= result.is_some();
        results[row] = result.unwrap_or_default();
    }
    memory.write(ptr(out), &results)?;
    if !fits {
        memory.write(ptr(overflow), &[1u64])?;
    }
    match out_bits {
        0 => Ok(()),
        at => memory.write(ptr(at), valid.sliced().as_slice()),
    }
}

fn group(
    memory: &mut SimMemory<'_>,
    [before, _, _, leaders, passing, column @ .., at, bit, of]: [u64; 12],
) -> Done {
    let (texts, valid) = (Texts(column), bits(memory, at, bit, of)?);
    let before = memory.slice::<u64>(ptr(before), of as usize)?;
    let (mut first, mut found) = (HashMap::new(), Vec::new());
    for (row, before) in before.iter().enumerate() {
        let text = match valid.value(row) {
            true => Some(texts.get(memory, row)?),
            false => None,
        };
        found.push(*first.entry((before, text)).or_insert(row as u64));
    }
    let leads = (0..).zip(&found).map(|(row, leader)| row == *leader);
    let leads: Vec<u8> = leads.map(u8::from).collect();
    memory.write(ptr(leaders), &found)?;
    memory.write(ptr(passing), &leads)
}

fn accumulate(
    memory: &mut SimMemory<'_>,
    [step, low, high, leaders, cells, seen, column @ ..]: [u64; 12],
) -> Done {
    let [family, width, values, at, bit, rows] = column;
    let valid = bits(memory, at, bit, rows)?;
    let values = integers(memory, [family, width, values, rows])?;
    let leaders = memory.slice::<u64>(ptr(leaders), rows as usize)?.to_vec();
    let of_rows = leaders.into_iter().zip(values).zip(&valid);
    for ((leader, value), _) in of_rows.filter(|(_, valid)| *valid) {
        let value = value ^ number(low, high);
        let cell = &mut memory.slice_mut::<i128>(ptr(cells + 16 * leader), 1)?[0];
        let (of_cell, of_value) = ((*cell >> 64) as u64, (value >> 64) as u64);
        match step {
            0 => *cell = cell.wrapping_add(value),
            1 => *cell = number(0, of_cell.max(of_value)),
            _ if of_cell == of_value => *cell = number((*cell as u64).max(value as u64), of_cell),
            _ => {}
        }
        memory.slice_mut::<u8>(ptr(seen + leader / 8), 1)?[0] |= 1 << (leader % 8);
    }
    Ok(())
}

fn finish(memory: &mut SimMemory<'_>, [cells, rows, low, high, width, out]: [u64; 6]) -> Done {
    let cells = memory.slice::<i128>(ptr(cells), rows as usize)?.iter();
    let values = cells.map(|cell| (cell ^ number(low, high)).to_le_bytes());
    let bytes = values.flat_map(|bytes| bytes.into_iter().take(width as usize));
    let bytes: Vec<u8> = bytes.collect();
    memory.write(ptr(out), &bytes)
}

/// The most bytes that lie in a view.
const INLINE: usize = 12;

/// The layout of views.
const VIEWS: u64 = 3;

/// The view of a text in buffer 0.
fn view(text: &[u8], start: u64) -> u128 {
    let mut view = [0; 16];
    view[..4].copy_from_slice(&(text.len() as u32).to_le_bytes());
    if text.len() <= INLINE {
        view[4..4 + text.len()].copy_from_slice(text);
    } else {
        view[4..8].copy_from_slice(&text[..4]);
        view[12..].copy_from_slice(&(start as u32).to_le_bytes());
    }
    u128::from_le_bytes(view)
}

/// The bytes of each row: layout, width, values and data of a column.
struct Texts([u64; 4]);

impl Texts {
    fn get<'a>(&self, memory: &'a SimMemory<'_>, row: usize) -> Result<&'a [u8], String> {
        let (Self([layout, width, values, data]), row) = (self, row as u64);
        let bytes = |at: u64, n: u64| memory.slice::<u8>(ptr(at), n as usize);
        match *layout {
            0 => bytes(values + row * width, *width),
            1 => {
                let offsets = memory.slice::<u32>(ptr(values + 4 * row), 2)?;
                let (start, end) = (u64::from(offsets[0]), u64::from(offsets[1]));
                bytes(data + start, end - start)
            }
            2 => {
                let offsets = memory.slice::<u64>(ptr(values + 8 * row), 2)?;
                bytes(data + offsets[0], offsets[1] - offsets[0])
            }
            _ => {
                let view = memory.slice::<u32>(ptr(values + 16 * row), 4)?;
                let len = u64::from(view[0]);
                if len <= INLINE as u64 {
                    return bytes(values + 16 * row + 4, len);
                }
                let buffer = memory.slice::<u64>(ptr(data + 8 * u64::from(view[2])), 1)?[0];
                bytes(buffer + u64::from(view[3]), len)
            }
        }
    }
}
