//! Which kernels there are stand-ins for.

use crate::ffi::{INVALID_VALUE, Outcome};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Emulation {
    /// `product_f64(a, a_mask, a_bit, b, b_mask, b_bit, out, out_mask, rows)`: out[i] = a[i] *
    /// b[i], 0 where one of them is null. A mask of 0 has no nulls.
    ProductF64,
    /// `double_f64(input, output, rows)`: output[i] = 2 * input[i].
    DoubleF64,
    /// `count_above_f64(values, bits, bit, limit, rows, tiles, counts)`: how many valid values of
    /// each tile are above limit. Bits of 0 have no nulls.
    CountAboveF64,
    /// `above_f64(values, bits, bit, limit, rows, tiles, starts, kept)`: kept = these values in
    /// their order, those of a tile from its start on.
    AboveF64,
    /// `scan_u64(starts, n, total)`: each number becomes the sum of those before it, total that of
    /// all.
    ScanU64,
    /// `keep(bits, bit, rows, wanted, passing)`: passing[i] = 0 where the bit is not wanted.
    Keep,
    /// `compare(family, width, values, rows, orderings, 4 words of a literal, passing)`: passing[i]
    /// = 0 where the ordering of row i and the literal is none of these.
    Compare,
    /// `compare_bytes(layout, width, values, data, rows, literal, length, orderings, passing)`: passing[i] = 0
    /// for rows whose bytes compare with the literal's in no way of `orderings` (1 less, 2 equal, 4 greater).
    CompareBytes,
    /// `count_passing(passing, rows, tiles, counts)`: how many rows of each tile pass.
    CountPassing,
    /// `select(passing, rows, tiles, starts, picked)`: picked = the numbers of the rows that pass.
    Select,
    /// `count_nulls(passing, bits, bit, rows, nulls)`: more nulls among the rows that pass.
    CountNulls,
    /// `measure(layout, values, data, bits, bit, rows, passing, lengths)`: the bytes of the rows
    /// that pass, outside of views.
    Measure,
    /// `gather(unit, width, values, picked, count, out)`: the picked rows.
    Gather,
    /// `gather_bits(bits, bit, picked, count, out, to)`: the bits of the picked rows.
    GatherBits,
    /// `gather_bytes(layout, values, data, bits, bit, picked, starts, count, base, out, out_data)`:
    /// the bytes of the picked rows, and their offsets or views.
    GatherBytes,
    /// `fill_i64(out, value, n)`
    FillI64,
    /// `fail()`: the engine fails with 719.
    Fail,
}

impl Emulation {
    pub(crate) fn of(name: &str) -> Option<Self> {
        match name {
            "product_f64" => Some(Self::ProductF64),
            "double_f64" => Some(Self::DoubleF64),
            "count_above_f64" => Some(Self::CountAboveF64),
            "above_f64" => Some(Self::AboveF64),
            "scan_u64" => Some(Self::ScanU64),
            "keep" => Some(Self::Keep),
            "compare" => Some(Self::Compare),
            "compare_bytes" => Some(Self::CompareBytes),
            "count_passing" => Some(Self::CountPassing),
            "select" => Some(Self::Select),
            "count_nulls" => Some(Self::CountNulls),
            "measure" => Some(Self::Measure),
            "gather" => Some(Self::Gather),
            "gather_bits" => Some(Self::GatherBits),
            "gather_bytes" => Some(Self::GatherBytes),
            "fill_i64" => Some(Self::FillI64),
            "fail" => Some(Self::Fail),
            _ => None,
        }
    }

    /// How many parameters it takes; each has 8 bytes.
    pub(crate) fn parameters(self) -> usize {
        match self {
            Self::GatherBytes => 11,
            Self::Compare => 10,
            Self::ProductF64 | Self::CompareBytes => 9,
            Self::AboveF64 | Self::Measure => 8,
            Self::CountAboveF64 => 7,
            Self::Gather | Self::GatherBits => 6,
            Self::Select | Self::Keep | Self::CountNulls => 5,
            Self::CountPassing => 4,
            Self::DoubleF64 | Self::FillI64 | Self::ScanU64 => 3,
            Self::Fail => 0,
        }
    }

    /// What is wrong with a launch of it, if anything: the real kernel would leave rows out, write
    /// wrong numbers, or hang.
    pub(crate) fn misfit(self, grid: &Grid, parameters: &[u64]) -> Option<String> {
        let wrong = match self {
            Self::Fail => return None,
            _ if grid.blocks[1..] != [1, 1] || grid.threads[1..] != [1, 1] => {
                "has one dimension".to_owned()
            }
            Self::DoubleF64 | Self::FillI64 => {
                let rows = parameters.last().copied().unwrap_or(0);
                if grid.blocks[0] * grid.threads[0] >= rows {
                    return None;
                }
                format!("needs a thread for each of {rows} rows")
            }
            Self::ScanU64 if grid.blocks[0] != 1 => "has one block".to_owned(),
            Self::ScanU64
            | Self::CountAboveF64
            | Self::AboveF64
            | Self::CountPassing
            | Self::Select
                if grid.threads[0] % 32 != 0 =>
            {
                "needs whole warps".to_owned()
            }
            _ => return None,
        };
        Some(format!("{self:?} {wrong}: {grid:?}"))
    }
}

/// How many blocks a launch has, and how many threads each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    blocks: [u64; 3],
    threads: [u64; 3],
}

impl Grid {
    pub(crate) fn new(blocks: [u32; 3], threads: [u32; 3]) -> Outcome<Self> {
        let of_block: u64 = threads.iter().map(|n| u64::from(*n)).product();
        if blocks.contains(&0) || !(1..=1024).contains(&of_block) {
            return Err(INVALID_VALUE);
        }
        Ok(Self {
            blocks: blocks.map(u64::from),
            threads: threads.map(u64::from),
        })
    }
}
