//! The kernels of the simulated device: closures on its queue.

use std::ptr::without_provenance_mut;

use arrow_device::device::DevicePtr;
use arrow_device::device::sim::SimMemory;
use arrow_device::{DeviceBufferMut, Queue, Result};
use datafusion::arrow::buffer::BooleanBuffer;
use datafusion::arrow::datatypes::ArrowNativeType;

use super::column::{Bits, Column, Format};
use super::kernels::{Kernels, Picked, To};
use super::key::{Key, Kind};

#[derive(Debug)]
pub(crate) struct Sim;

type Done = Result<(), String>;

/// # Safety
/// The kernel writes only buffers that are not frozen yet.
unsafe fn launch(
    queue: &Queue,
    kernel: impl FnOnce(&mut SimMemory<'_>) -> Done + Send + 'static,
) -> Result<()> {
    // SAFETY: the caller guarantees that the kernel writes only buffers that are not frozen yet.
    unsafe { queue.as_sim()?.launch(kernel) }
}

/// The address of a number.
fn number(counts: &DeviceBufferMut, count: usize) -> DevicePtr {
    counts.address().offset(count * size_of::<u64>())
}

fn bits(memory: &SimMemory<'_>, bits: Bits, rows: usize) -> Result<BooleanBuffer, String> {
    let start = (!bits.at.is_null()).then_some((bits.at, bits.bit));
    memory.bits(start, rows)
}

/// The rows that pass.
fn rows(memory: &SimMemory<'_>, passing: DevicePtr, rows: usize) -> Result<Vec<bool>, String> {
    let passing = memory.slice::<u8>(passing, rows)?;
    Ok(passing.iter().map(|passes| *passes == 1).collect())
}

/// Sets `passing` to 0 for the rows that fail.
fn fail(
    memory: &mut SimMemory<'_>,
    passing: DevicePtr,
    rows: usize,
    passes: impl Fn(usize) -> bool,
) -> Done {
    let passing = memory.slice_mut::<u8>(passing, rows)?;
    for (row, passing) in passing.iter_mut().enumerate() {
        *passing &= u8::from(passes(row));
    }
    Ok(())
}

impl Kernels for Sim {
    fn keep(
        &self,
        queue: &Queue,
        of: Bits,
        wanted: bool,
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let (rows, passing) = (passing.len(), passing.address());
        let kernel = move |memory: &mut SimMemory<'_>| {
            let bits = bits(memory, of, rows)?;
            fail(memory, passing, rows, |row| bits.value(row) == wanted)
        };
        // SAFETY: the kernel writes `passing`, which is lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn compare(
        &self,
        queue: &Queue,
        column: Column,
        kind: Kind,
        orderings: u8,
        literal: Key,
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let (rows, passing) = (passing.len(), passing.address());
        let kernel = move |memory: &mut SimMemory<'_>| {
            let values = memory.slice::<u8>(column.values.at, rows * kind.width)?;
            let values = values.chunks_exact(kind.width);
            // -1, 0 or 1, in the order of the bits.
            let passes = |value| orderings >> (kind.key(value).cmp(&literal) as i8 + 1) & 1 == 1;
            let passes: Vec<bool> = values.map(passes).collect();
            fail(memory, passing, rows, |row| passes[row])
        };
        // SAFETY: the kernel writes `passing`, which is lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn compare_bytes(
        &self,
        queue: &Queue,
        column: Column,
        orderings: u8,
        literal: (DevicePtr, usize),
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let (of, passing) = (passing.len(), passing.address());
        let kernel = move |memory: &mut SimMemory<'_>| {
            let literal = memory.slice::<u8>(literal.0, literal.1)?;
            let texts = Texts::of(memory, column)?;
            let mut passes = rows(memory, passing, of)?;
            for (row, passes) in passes.iter_mut().enumerate().filter(|(_, passes)| **passes) {
                let ordering = texts.get(row)?.cmp(literal);
                *passes = orderings >> (ordering as i8 + 1) & 1 == 1;
            }
            fail(memory, passing, of, |row| passes[row])
        };
        // SAFETY: the kernel writes `passing`, which is lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn select(
        &self,
        queue: &Queue,
        passing: &DeviceBufferMut,
        picked: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()> {
        let (of, passing) = (passing.len(), passing.address());
        let (picked, count) = (picked.address(), number(counts, count));
        let kernel = move |memory: &mut SimMemory<'_>| {
            let passing = rows(memory, passing, of)?;
            let numbers = (0u64..).zip(passing).filter(|(_, passes)| *passes);
            let numbers: Vec<_> = numbers.map(|(row, _)| row).collect();
            memory.write(count, &[numbers.len() as u64])?;
            memory.write(picked, &numbers)
        };
        // SAFETY: the kernel writes `picked` and `counts`, which are lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn count_nulls(
        &self,
        queue: &Queue,
        column: Column,
        passing: &DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()> {
        let (of, passing) = (passing.len(), passing.address());
        let count = number(counts, count);
        let kernel = move |memory: &mut SimMemory<'_>| {
            let passing = rows(memory, passing, of)?;
            let valid = bits(memory, column.validity, of)?;
            let null = |(passes, valid): &(bool, bool)| *passes && !valid;
            let nulls = passing.into_iter().zip(&valid).filter(null).count();
            memory.slice_mut::<u64>(count, 1)?[0] += nulls as u64;
            Ok(())
        };
        // SAFETY: the kernel writes `counts`, which is lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn measure(
        &self,
        queue: &Queue,
        column: Column,
        passing: &DeviceBufferMut,
        starts: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()> {
        let (of, passing) = (passing.len(), passing.address());
        let (starts, count) = (starts.address(), number(counts, count));
        let kernel = move |memory: &mut SimMemory<'_>| {
            let passing = rows(memory, passing, of)?;
            let valid = bits(memory, column.validity, of)?;
            let texts = Texts::of(memory, column)?;
            let (mut total, mut before) = (0u64, vec![0u64; of]);
            for row in 0..of {
                before[row] = total;
                if passing[row] && valid.value(row) {
                    total += texts.outside(row)? as u64;
                }
            }
            memory.write(starts, &before)?;
            memory.write(count, &[total])
        };
        // SAFETY: the kernel writes `starts` and `counts`, which are lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn gather(
        &self,
        queue: &Queue,
        column: Column,
        picked: &Picked<'_>,
        out: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()> {
        let Format::Fixed { width, .. } = column.format else {
            return Ok(());
        };
        let (picked, count) = (picked.rows.address(), picked.count);
        let out = out.address().offset(to.row * width);
        let kernel = move |memory: &mut SimMemory<'_>| {
            let values = memory.slice::<u8>(column.values.at, column.rows * width)?;
            let picked = memory.slice::<u64>(picked, count)?;
            let mut taken = Vec::with_capacity(count * width);
            for row in picked {
                taken.extend_from_slice(&values[*row as usize * width..][..width]);
            }
            memory.write(out, &taken)
        };
        // SAFETY: the kernel writes `out`, which is lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn gather_bits(
        &self,
        queue: &Queue,
        of: Bits,
        picked: &Picked<'_>,
        out: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()> {
        let (picked, count) = (picked.rows.address(), picked.count);
        let (out, bytes) = (out.address(), out.len());
        let kernel = move |memory: &mut SimMemory<'_>| {
            let picked = memory.slice::<u64>(picked, count)?.to_vec();
            // The picked rows are in order.
            let rows = picked.last().map_or(0, |row| *row as usize + 1);
            let bits = bits(memory, of, rows)?;
            let out = memory.slice_mut::<u8>(out, bytes)?;
            for (i, row) in picked.into_iter().enumerate() {
                let (bit, at) = (bits.value(row as usize), to.row + i);
                out[at / 8] |= u8::from(bit) << (at % 8);
            }
            Ok(())
        };
        // SAFETY: the kernel writes `out`, which is lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }

    fn gather_bytes(
        &self,
        queue: &Queue,
        column: Column,
        picked: &Picked<'_>,
        starts: &DeviceBufferMut,
        out: &mut DeviceBufferMut,
        data: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()> {
        let (picked, count) = (picked.rows.address(), picked.count);
        let (starts, out) = (starts.address(), out.address());
        let data = data.address().offset(to.byte);
        let kernel = move |memory: &mut SimMemory<'_>| {
            let picked = memory.slice::<u64>(picked, count)?;
            let starts = memory.slice::<u64>(starts, column.rows)?;
            let valid = bits(memory, column.validity, column.rows)?;
            let texts = Texts::of(memory, column)?;
            let (mut bytes, mut offsets, mut views) = (Vec::new(), Vec::new(), Vec::new());
            for row in picked.iter().map(|row| *row as usize) {
                let text = if valid.value(row) {
                    texts.get(row)?
                } else {
                    &[]
                };
                let start = to.byte as u64 + starts[row];
                offsets.push(start);
                views.push(view(text, start));
                if column.format != Format::Views || text.len() > INLINE {
                    bytes.extend_from_slice(text);
                }
            }
            offsets.push((to.byte + bytes.len()) as u64);
            memory.write(data, &bytes)?;
            match column.format {
                Format::Offsets { width: 4 } => {
                    let offsets: Vec<i32> = offsets.iter().map(|n| *n as i32).collect();
                    memory.write(out.offset(4 * to.row), &offsets)
                }
                Format::Offsets { .. } => memory.write(out.offset(8 * to.row), &offsets),
                _ => memory.write(out.offset(16 * to.row), &views),
            }
        };
        // SAFETY: the kernel writes `out` and `data`, which are lent for writing and so not frozen.
        unsafe { launch(queue, kernel) }
    }
}

/// The most bytes that lie in a view.
const INLINE: usize = 12;

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

/// The bytes of each row.
struct Texts<'a, 'm> {
    memory: &'a SimMemory<'m>,
    column: Column,
}

impl<'a, 'm> Texts<'a, 'm> {
    fn of(memory: &'a SimMemory<'m>, column: Column) -> Result<Self, String> {
        Ok(Self { memory, column })
    }

    fn values<T: ArrowNativeType>(&self, row: usize, n: usize) -> Result<&'a [T], String> {
        let at = self.column.values.at.offset(row * size_of::<T>());
        self.memory.slice(at, n)
    }

    fn get(&self, row: usize) -> Result<&'a [u8], String> {
        let data = self.column.data;
        let of = |start: usize, end: usize| self.memory.slice(data.offset(start), end - start);
        match self.column.format {
            Format::Fixed { width, .. } => {
                let at = self.column.values.at.offset(row * width);
                self.memory.slice(at, width)
            }
            Format::Offsets { width: 4 } => {
                let offsets = self.values::<i32>(row, 2)?;
                of(offsets[0] as usize, offsets[1] as usize)
            }
            Format::Offsets { .. } => {
                let offsets = self.values::<i64>(row, 2)?;
                of(offsets[0] as usize, offsets[1] as usize)
            }
            Format::Views => {
                let view = self.values::<u32>(4 * row, 4)?;
                let len = view[0] as usize;
                if len <= INLINE {
                    return Ok(&self.values::<u8>(16 * row, 16)?[4..4 + len]);
                }
                let address = data.offset(view[2] as usize * size_of::<u64>());
                let address = self.memory.slice::<u64>(address, 1)?[0];
                let buffer = DevicePtr::new(without_provenance_mut(address as usize));
                self.memory.slice(buffer.offset(view[3] as usize), len)
            }
            Format::Bits => Err("booleans have no bytes".into()),
        }
    }

    /// How many bytes a row has outside of views.
    fn outside(&self, row: usize) -> Result<usize, String> {
        let len = self.get(row)?.len();
        let inside = self.column.format == Format::Views && len <= INLINE;
        Ok(if inside { 0 } else { len })
    }
}
