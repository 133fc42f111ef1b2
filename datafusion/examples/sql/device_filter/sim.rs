//! The kernels of the simulated device: closures on its queue, with the parameters of those in `filter.cu`.

use std::ptr::without_provenance_mut;

use arrow_device::device::DevicePtr;
use arrow_device::device::sim::SimMemory;
use arrow_device::{Queue, Result};
use datafusion::arrow::buffer::BooleanBuffer;

use super::kernels::Grid;
use super::key::{Family, Key, Kind};

type Done = Result<(), String>;

type Kernel = fn(&mut SimMemory<'_>, &[u64]) -> Done;

pub(crate) const KERNELS: [(&str, Kernel); 11] = [
    ("keep", keep),
    ("compare", compare),
    ("compare_bytes", compare_bytes),
    ("count_passing", count_passing),
    ("scan_u64", scan),
    ("select", select),
    ("count_nulls", count_nulls),
    ("measure", measure),
    ("gather", gather),
    ("gather_bits", gather_bits),
    ("gather_bytes", gather_bytes),
];

/// # Safety
/// As [`Launcher::launch`](super::kernels::Launcher::launch).
pub(crate) unsafe fn launch(queue: &Queue, kernel: &str, _: Grid, words: &[u64]) -> Result<()> {
    let words = words.to_vec();
    let known = KERNELS.iter().find(|(name, _)| *name == kernel);
    let run = known.map(|(_, run)| *run);
    let kernel = move |memory: &mut SimMemory<'_>| match run {
        Some(run) => run(memory, &words),
        None => wrong(),
    };
    // SAFETY: the caller guarantees that the kernel writes only memory that is not frozen yet.
    unsafe { queue.as_sim()?.launch(kernel) }
}

/// What a launch with other parameters fails with.
fn wrong() -> Done {
    Err("there is no such kernel with so many parameters".into())
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

fn keep(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[at, bit, rows, wanted, passing] = words else {
        return wrong();
    };
    let bits = bits(memory, at, bit, rows)?;
    fail(memory, passing, rows, |_, row| {
        Ok(bits.value(row) == (wanted != 0))
    })
}

fn compare(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[family, width, values, rows, orderings, a, b, c, d, passing] = words else {
        return wrong();
    };
    let (family, width) = (Family::ALL[family as usize], width as usize);
    let kind = Kind { family, width };
    let values = memory.slice::<u8>(ptr(values), rows as usize * kind.width)?;
    let orderings_of = values.chunks_exact(kind.width).map(|value| {
        let ordering = kind.key(value).cmp(&Key([a, b, c, d]));
        1 << (ordering as i8 + 1)
    });
    let orderings_of: Vec<u64> = orderings_of.collect();
    fail(memory, passing, rows, |_, row| {
        Ok(orderings_of[row] & orderings != 0)
    })
}

fn compare_bytes(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
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
    ] = words
    else {
        return wrong();
    };
    let texts = Texts([layout, width, values, data]);
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

fn count_passing(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[passing, of, of_tiles, counts] = words else {
        return wrong();
    };
    let passing = rows(memory, passing, of)?;
    let count = |tile: &[bool]| tile.iter().filter(|passes| **passes).count() as u64;
    let of_each: Vec<u64> = tiles(&passing, of_tiles).map(count).collect();
    memory.write(ptr(counts), &of_each)
}

fn scan(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[starts, n, total] = words else {
        return wrong();
    };
    let mut sum = 0;
    for start in memory.slice_mut::<u64>(ptr(starts), n as usize)? {
        let before = sum;
        sum += std::mem::replace(start, before);
    }
    memory.write(ptr(total), &[sum])
}

fn select(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[passing, of, of_tiles, starts, picked] = words else {
        return wrong();
    };
    let passing = rows(memory, passing, of)?;
    let starts = memory
        .slice::<u64>(ptr(starts), of_tiles as usize)?
        .to_vec();
    let mut row = 0u64;
    for (tile, start) in tiles(&passing, of_tiles).zip(starts) {
        let numbers = (row..).zip(tile).filter(|(_, passes)| **passes);
        let numbers: Vec<u64> = numbers.map(|(row, _)| row).collect();
        memory.write(ptr(picked + 8 * start), &numbers)?;
        row += tile.len() as u64;
    }
    Ok(())
}

fn count_nulls(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[passing, at, bit, of, count] = words else {
        return wrong();
    };
    let (passing, valid) = (rows(memory, passing, of)?, bits(memory, at, bit, of)?);
    let null = |(passes, valid): &(bool, bool)| *passes && !valid;
    let nulls = passing.into_iter().zip(&valid).filter(null).count();
    memory.slice_mut::<u64>(ptr(count), 1)?[0] += nulls as u64;
    Ok(())
}

fn measure(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[layout, values, data, at, bit, of, passing, lengths] = words else {
        return wrong();
    };
    let (passing, valid) = (rows(memory, passing, of)?, bits(memory, at, bit, of)?);
    let texts = Texts([layout, 0, values, data]);
    let length = |row| match passing[row] && valid.value(row) {
        true => texts.outside(memory, row),
        false => Ok(0),
    };
    let of_each: Vec<u64> = (0..of as usize).map(length).collect::<Result<_, _>>()?;
    memory.write(ptr(lengths), &of_each)
}

fn gather(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[_, width, values, picked, count, out] = words else {
        return wrong();
    };
    let picked = memory.slice::<u64>(ptr(picked), count as usize)?;
    // The picked rows are in order.
    let rows = picked.last().map_or(0, |row| row + 1);
    let values = memory.slice::<u8>(ptr(values), (rows * width) as usize)?;
    let of = |row: &u64| &values[(row * width) as usize..][..width as usize];
    let taken: Vec<u8> = picked.iter().flat_map(of).copied().collect();
    memory.write(ptr(out), &taken)
}

fn gather_bits(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[at, bit, picked, count, out, first] = words else {
        return wrong();
    };
    let picked = memory.slice::<u64>(ptr(picked), count as usize)?.to_vec();
    let of = bits(memory, at, bit, picked.last().map_or(0, |row| row + 1))?;
    let bytes = (first + count).div_ceil(8) as usize;
    let out = memory.slice_mut::<u8>(ptr(out), bytes)?;
    for (at, row) in (first as usize..).zip(picked) {
        out[at / 8] |= u8::from(of.value(row as usize)) << (at % 8);
    }
    Ok(())
}

fn gather_bytes(memory: &mut SimMemory<'_>, words: &[u64]) -> Done {
    let &[
        layout,
        values,
        data,
        at,
        bit,
        picked,
        starts,
        count,
        base,
        out,
        out_data,
    ] = words
    else {
        return wrong();
    };
    let picked = memory.slice::<u64>(ptr(picked), count as usize)?.to_vec();
    let valid = bits(memory, at, bit, picked.last().map_or(0, |row| row + 1))?;
    let texts = Texts([layout, 0, values, data]);
    let (mut bytes, mut offsets, mut views) = (Vec::new(), Vec::new(), Vec::new());
    for row in picked {
        let text = match valid.value(row as usize) {
            true => texts.get(memory, row as usize)?,
            false => &[],
        };
        let start = base + memory.slice::<u64>(ptr(starts + 8 * row), 1)?[0];
        offsets.push(start);
        views.push(view(text, start));
        if layout != VIEWS || text.len() > INLINE {
            bytes.extend_from_slice(text);
        }
    }
    offsets.push(base + bytes.len() as u64);
    memory.write(ptr(out_data + base), &bytes)?;
    match layout {
        VIEWS => memory.write(ptr(out), &views),
        2 => memory.write(ptr(out), &offsets),
        _ => {
            let offsets: Vec<i32> = offsets.iter().map(|n| *n as i32).collect();
            memory.write(ptr(out), &offsets)
        }
    }
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

    /// How many bytes a row has outside of views.
    fn outside(&self, memory: &SimMemory<'_>, row: usize) -> Result<u64, String> {
        let len = self.get(memory, row)?.len();
        let inside = self.0[0] == VIEWS && len <= INLINE;
        Ok(if inside { 0 } else { len as u64 })
    }
}
