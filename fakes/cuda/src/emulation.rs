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
    /// `decimal(operation, rows, 2 words of the most, out, out_bits, overflow, then family, width, values, 2 words
    /// of a number, bits, bit of both operands)`: out[i] = a[i] + b[i], or -, * or /.
    Decimal,
    /// `group(before, table, places, leaders, passing, layout, width, values, data, bits, bit, rows)`: leaders[i]
    /// = a row with the same bytes and the same number before.
    Group,
    /// `accumulate(step, 2 words of a mask, leaders, cells, seen, family, width, values, bits, bit, rows)`: the
    /// leaders' cells become sums, or the largest values.
    Accumulate,
    /// `finish(cells, rows, 2 words of a mask, width, out)`: the cells as values.
    Finish,
    /// `fill_i64(out, value, n)`
    FillI64,
    /// `fail()`: the engine fails with 719.
    Fail,
}

/// Names, and numbers of parameters.
const KERNELS: [(&str, Emulation, usize); 21] = [
    ("product_f64", Emulation::ProductF64, 9),
    ("double_f64", Emulation::DoubleF64, 3),
    ("count_above_f64", Emulation::CountAboveF64, 7),
    ("above_f64", Emulation::AboveF64, 8),
    ("scan_u64", Emulation::ScanU64, 3),
    ("keep", Emulation::Keep, 5),
    ("compare", Emulation::Compare, 10),
    ("compare_bytes", Emulation::CompareBytes, 9),
    ("count_passing", Emulation::CountPassing, 4),
    ("select", Emulation::Select, 5),
    ("count_nulls", Emulation::CountNulls, 5),
    ("measure", Emulation::Measure, 8),
    ("gather", Emulation::Gather, 6),
    ("gather_bits", Emulation::GatherBits, 6),
    ("gather_bytes", Emulation::GatherBytes, 11),
    ("decimal", Emulation::Decimal, 21),
    ("group", Emulation::Group, 12),
    ("accumulate", Emulation::Accumulate, 12),
    ("finish", Emulation::Finish, 6),
    ("fill_i64", Emulation::FillI64, 3),
    ("fail", Emulation::Fail, 0),
];

impl Emulation {
    pub(crate) fn of(name: &str) -> Option<Self> {
        let found = KERNELS.iter().find(|(known, ..)| *known == name);
        found.map(|(_, kernel, _)| *kernel)
    }

    /// How many parameters it takes; each has 8 bytes.
    pub(crate) fn parameters(self) -> usize {
        let found = KERNELS.iter().find(|(_, kernel, _)| *kernel == self);
        found.map_or(0, |(.., parameters)| *parameters)
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
            | Self::Decimal
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
