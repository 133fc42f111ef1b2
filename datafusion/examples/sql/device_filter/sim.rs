//! The kernels of the simulated device: closures on its queue.

use arrow_device::device::DevicePtr;
use arrow_device::device::sim::SimMemory;
use arrow_device::{DeviceBufferMut, Queue, Result};
use datafusion::arrow::datatypes::ArrowNativeType;

use super::column::Column;
use super::predicate::{Condition, Kind, float_key};

/// Whether these kernels run on this device.
pub(crate) fn is_queue(queue: &Queue) -> bool {
    queue.as_sim().is_ok()
}

/// # Safety
/// The kernel writes only buffers that are not frozen yet.
unsafe fn launch(
    queue: &Queue,
    kernel: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String> + Send + 'static,
) -> Result<()> {
    // SAFETY: the caller guarantees that the kernel writes only buffers that are not frozen yet.
    unsafe { queue.as_sim()?.launch(kernel) }
}

/// Sets `passing` to 0 for rows that fail the condition.
pub(crate) fn compare(
    queue: &Queue,
    column: Column,
    condition: Condition,
    passing: &mut DeviceBufferMut,
) -> Result<()> {
    let passing = passing.address();
    let kernel = move |memory: &mut SimMemory<'_>| {
        let keys: Vec<i64> = match column.kind {
            Kind::Int32 => keys::<i32>(memory, column, i64::from)?,
            Kind::Int64 => keys(memory, column, |value| value)?,
            Kind::Float64 => keys(memory, column, float_key)?,
        };
        let valid = valid(memory, column)?;
        let passing = memory.slice_mut::<u8>(passing, column.rows)?;
        for (row, passes) in passing.iter_mut().enumerate() {
            // -1, 0 or 1, in the order of the bits of `passing`.
            let ordering = keys[row].cmp(&condition.literal) as i8 + 1;
            *passes &= u8::from(valid[row]) & (condition.passing >> ordering);
        }
        Ok(())
    };
    // SAFETY: the kernel writes `passing`, which is lent for writing and so not frozen.
    unsafe { launch(queue, kernel) }
}

fn keys<T: ArrowNativeType>(
    memory: &SimMemory<'_>,
    column: Column,
    key: impl Fn(T) -> i64,
) -> Result<Vec<i64>, String> {
    let values = memory.slice::<T>(column.values, column.rows)?;
    Ok(values.iter().copied().map(key).collect())
}

fn valid(memory: &SimMemory<'_>, column: Column) -> Result<Vec<bool>, String> {
    if column.mask.is_null() {
        return Ok(vec![true; column.rows]);
    }
    let mask = memory.read(column.mask, (column.bit + column.rows).div_ceil(8))?;
    let bits = column.bit..column.bit + column.rows;
    Ok(bits
        .map(|bit| mask[bit / 8] >> (bit % 8) & 1 == 1)
        .collect())
}

/// Writes the numbers of the rows that pass, in their order, and how many there are.
pub(crate) fn select(
    queue: &Queue,
    passing: &DeviceBufferMut,
    picked: &mut DeviceBufferMut,
    counts: &mut DeviceBufferMut,
) -> Result<()> {
    let (rows, passing) = (passing.len(), passing.address());
    let (picked, counts) = (picked.address(), counts.address());
    let kernel = move |memory: &mut SimMemory<'_>| {
        let passing = memory.slice::<u8>(passing, rows)?;
        let numbers = (0i64..).zip(passing).filter(|(_, passes)| **passes == 1);
        let numbers: Vec<_> = numbers.map(|(row, _)| row).collect();
        memory.write(counts, &[numbers.len() as i64])?;
        memory.write(picked, &numbers)
    };
    // SAFETY: the kernel writes `picked` and `counts`, which are lent for writing and so not
    // frozen.
    unsafe { launch(queue, kernel) }
}

/// Writes the picked rows of column `i` of the result: values, validity bitmap, and the number of
/// nulls.
pub(crate) fn gather(
    queue: &Queue,
    column: Column,
    picked: &DeviceBufferMut,
    i: usize,
    counts: &mut DeviceBufferMut,
    values: &mut DeviceBufferMut,
    mask: &mut DeviceBufferMut,
) -> Result<()> {
    let (picked, counts) = (picked.address(), counts.address());
    let (values, mask) = (values.address(), mask.address());
    let kernel = move |memory: &mut SimMemory<'_>| {
        let count = memory.slice::<i64>(counts, 1)?[0] as usize;
        let picked = memory.slice::<i64>(picked, count)?.to_vec();
        let valid = valid(memory, column)?;
        let mut bits = vec![0u8; count.div_ceil(8)];
        let mut nulls = 0i64;
        for (to, from) in picked.iter().enumerate() {
            bits[to / 8] |= u8::from(valid[*from as usize]) << (to % 8);
            nulls += i64::from(!valid[*from as usize]);
        }
        match column.kind.width() {
            4 => take::<i32>(memory, column, &picked, values)?,
            _ => take::<i64>(memory, column, &picked, values)?,
        }
        memory.write(mask, &bits)?;
        memory.write(counts.offset((1 + i) * size_of::<i64>()), &[nulls])
    };
    // SAFETY: the kernel writes `counts`, `values` and `mask`, which are lent for writing and so
    // not frozen.
    unsafe { launch(queue, kernel) }
}

/// Values are copied as bits, whatever their type.
fn take<T: ArrowNativeType>(
    memory: &mut SimMemory<'_>,
    column: Column,
    picked: &[i64],
    to: DevicePtr,
) -> Result<(), String> {
    let values = memory.slice::<T>(column.values, column.rows)?;
    let taken: Vec<T> = picked.iter().map(|row| values[*row as usize]).collect();
    memory.write(to, &taken)
}
