//! What stands in for kernels: closures with the parameters of real ones.

mod columns;
mod decimals;
mod filters;
mod groups;

use std::ops::Range;
use std::sync::Arc;

use arrow_device::device::sim::SimMemory;

use crate::copy::is_device;
use crate::emulation::{Emulation, Grid};
use crate::engine::Engine;
use crate::ffi::*;
use crate::memory::{Block, pointer};
use crate::registry::{Lane, registry};

impl Emulation {
    /// Queues it.
    pub(crate) fn launch(self, lane: &Lane, grid: &Grid, p: Vec<u64>) -> Outcome {
        let engine = lane.engine.clone();
        let misfit = self.misfit(grid, &p);
        if let Some(text) = &misfit {
            engine.blame(text.clone());
        }
        let host = host(&engine, &p);
        lane.engine.launch(&lane.queue, host, move |memory| {
            let mut view = View { memory, engine };
            if let Some(text) = misfit {
                return Err(view.engine.failure(LAUNCH_FAILED, &text));
            }
            match self {
                Self::ProductF64 => product_f64(&mut view, &p),
                Self::DoubleF64 => double_f64(&mut view, &p),
                Self::CountAboveF64 => filters::count_above_f64(&mut view, &p),
                Self::AboveF64 => filters::above_f64(&mut view, &p),
                Self::ScanU64 => filters::scan_u64(&mut view, &p),
                Self::Keep => columns::keep(&mut view, &p),
                Self::Compare => columns::compare(&mut view, &p),
                Self::CompareBytes => columns::compare_bytes(&mut view, &p),
                Self::CountPassing => filters::count_passing(&mut view, &p),
                Self::Select => filters::select(&mut view, &p),
                Self::CountNulls => columns::count_nulls(&mut view, &p),
                Self::Measure => columns::measure(&mut view, &p),
                Self::Gather => columns::gather(&mut view, &p),
                Self::GatherBits => columns::gather_bits(&mut view, &p),
                Self::GatherBytes => columns::gather_bytes(&mut view, &p),
                Self::Decimal => decimals::decimal(&mut view, &p),
                Self::Group => groups::group(&mut view, &p),
                Self::Accumulate => groups::accumulate(&mut view, &p),
                Self::Finish => groups::finish(&mut view, &p),
                Self::FillI64 => fill_i64(&mut view, &p),
                Self::Fail => Err(view.engine.failure(LAUNCH_FAILED, "the kernel failed")),
            }
        })
    }
}

/// The page-locked and managed memory that parameters point into.
fn host(engine: &Engine, parameters: &[u64]) -> Vec<Range<usize>> {
    let registry = registry();
    let blocks = parameters.iter().filter_map(|p| registry.memory.at(*p));
    blocks
        .map(Block::range)
        .filter(|range| !is_device(engine, range.start, range.len()))
        .collect()
}

/// Memory as a kernel sees it: the device's, page-locked and managed.
struct View<'a, 'b> {
    memory: &'a mut SimMemory<'b>,
    engine: Arc<Engine>,
}

impl View<'_, '_> {
    /// Whether these are page-locked or managed; other host addresses are refused as the device's.
    fn on_host(&self, address: u64, bytes: usize) -> bool {
        let registry = registry();
        let block = registry.memory.at(address);
        block.is_some_and(|block| {
            !is_device(&self.engine, block.start, block.bytes)
                && bytes <= block.range().end - address as usize
        })
    }

    fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>, String> {
        let ptr = pointer(address as usize);
        if self.on_host(address, bytes) {
            // SAFETY: the bytes lie in live page-locked or managed memory (`on_host`), which is not
            // freed while this kernel is queued.
            let bytes = unsafe { std::slice::from_raw_parts(ptr.as_ptr().cast(), bytes) };
            return Ok(bytes.to_vec());
        }
        Ok(self.memory.slice(ptr, bytes)?.to_vec())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let ptr = pointer(address as usize);
        if self.on_host(address, bytes.len()) {
            let to: *mut u8 = ptr.as_ptr().cast();
            // SAFETY: the bytes lie in live page-locked or managed memory (`on_host`), which is not
            // freed while this kernel is queued; `bytes` is this kernel's own.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            return Ok(());
        }
        self.memory.write(ptr, bytes)
    }

    /// The length in bytes of `n` values at an address, which must be aligned.
    fn values(&self, address: u64, n: u64) -> Result<usize, String> {
        if address % 8 != 0 {
            let text = format!("{address:#x} is not aligned to 8 bytes");
            return Err(self.engine.failure(MISALIGNED_ADDRESS, &text));
        }
        let bytes = n.checked_mul(8).and_then(|n| usize::try_from(n).ok());
        bytes.ok_or_else(|| format!("{n} values: too many"))
    }

    fn read_f64(&self, address: u64, n: u64) -> Result<Vec<f64>, String> {
        let bytes = self.read(address, self.values(address, n)?)?;
        let values = bytes.chunks_exact(8);
        Ok(values.map(|v| f64::from_bits(word(v))).collect())
    }

    fn read_u64(&self, address: u64, n: u64) -> Result<Vec<u64>, String> {
        let bytes = self.read(address, self.values(address, n)?)?;
        Ok(bytes.chunks_exact(8).map(word).collect())
    }

    fn write_u64(&mut self, address: u64, values: &[u64]) -> Result<(), String> {
        self.values(address, values.len() as u64)?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.write(address, &bytes)
    }

    /// `n` bits from `bit` on; all set if there is no mask.
    fn read_mask(&self, address: u64, bit: u64, n: u64) -> Result<Vec<bool>, String> {
        if address == 0 {
            return Ok(vec![true; n as usize]);
        }
        let end = bit.checked_add(n).ok_or("too many bits")?.div_ceil(8);
        let bytes = self.read(address + bit / 8, (end - bit / 8) as usize)?;
        let at = |i: u64| (bit % 8 + i) as usize;
        Ok((0..n)
            .map(|i| bytes[at(i) / 8] >> (at(i) % 8) & 1 == 1)
            .collect())
    }
}

/// Eight bytes as a number.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

fn product_f64(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[a, a_mask, a_bit, b, b_mask, b_bit, out, out_mask, rows] = p else {
        return Err("product_f64 takes 9 parameters".into());
    };
    if rows == 0 {
        return Ok(());
    }
    let (a, b) = (view.read_f64(a, rows)?, view.read_f64(b, rows)?);
    let a_valid = view.read_mask(a_mask, a_bit, rows)?;
    let b_valid = view.read_mask(b_mask, b_bit, rows)?;
    view.values(out, rows)?;
    let mut values = Vec::new();
    let mut mask = vec![0u8; a.len().div_ceil(8)];
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        let valid = a_valid[i] && b_valid[i];
        let product = if valid { a * b } else { 0.0 };
        values.extend(product.to_ne_bytes());
        mask[i / 8] |= u8::from(valid) << (i % 8);
    }
    view.write(out, &values)?;
    view.write(out_mask, &mask)
}

fn double_f64(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[input, output, rows] = p else {
        return Err("double_f64 takes 3 parameters".into());
    };
    let values = view.read_f64(input, rows)?;
    view.values(output, rows)?;
    let doubled: Vec<u8> = values.iter().flat_map(|v| (v + v).to_ne_bytes()).collect();
    view.write(output, &doubled)
}

fn fill_i64(view: &mut View<'_, '_>, p: &[u64]) -> Result<(), String> {
    let &[out, value, n] = p else {
        return Err("fill_i64 takes 3 parameters".into());
    };
    let bytes = view.values(out, n)?;
    if bytes == 0 {
        return Ok(());
    }
    view.write(out, &value.to_ne_bytes().repeat(bytes / 8))
}
