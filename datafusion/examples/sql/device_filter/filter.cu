// The filter's kernels. Compiled in the repository only. A column is: its kind, the address of row 0, its validity bitmap (without one no row is null) and the
// bit of row 0 in it, least significant bit first. Any grid covers any number of rows.

#include "../../../../examples/cuda_kernel/compaction.cuh"

using i64 = long long;
using i32 = int;

enum Kind : u64 { I32, I64, F64 };

// passing[i] = 0 where row i is null, or where bit (ordering of row i and literal) of `orderings` is unset; bit 0 is less, 1 equal,
// 2 greater. Floats are compared by their keys: see below.
extern "C" __global__ void compare(u64 kind, const void *values, const u8 *bits, u64 bit, u64 rows, u64 orderings, i64 literal,
                                   u8 *passing) {
    u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 row = u64(blockIdx.x) * blockDim.x + threadIdx.x; row < rows; row += step) {
        bool passes = is_valid(bits, bit, row);
        if (passes) {
            i64 key = kind == I32 ? static_cast<const i32 *>(values)[row] : static_cast<const i64 *>(values)[row];
            if (kind == F64) {
                // An integer that orders floats: both zeros are 0, and of negative ones all bits but the sign flip.
                key = u64(key) << 1 == 0 ? 0 : key;
                key ^= key >> 63 & 0x7fffffffffffffff;
            }
            u64 ordering = key < literal ? 1 : key > literal ? 4 : 2;
            passes = (ordering & orderings) != 0;
        }
        if (!passes) { // what earlier conditions said stays
            passing[row] = 0;
        }
    }
}

// counts[tile] = how many rows of the tile pass.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) count_passing(const u8 *passing, u64 rows, u64 tiles, u64 *counts) {
    count_tiles(rows, tiles, counts, [=](u64 row) { return passing[row] != 0; });
}

// picked = the numbers of the rows that pass, in their order; those of a tile begin at starts[tile].
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    select(const u8 *passing, u64 rows, u64 tiles, const u64 *starts, u64 *picked) {
    scatter_tiles(
        rows, tiles, starts, [=](u64 row) { return passing[row] != 0; }, [=](u64 place, u64 row) { picked[place] = row; });
}

// out = the picked rows, counts[0] of them; adds those that are null to nulls[0].
extern "C" __global__ void gather(u64 kind, const void *values, const u8 *bits, u64 bit, const u64 *picked, const u64 *counts,
                                  u64 *nulls, void *out, u8 *out_bits) {
    // A thread has 8 rows, and so a byte of out_bits to itself; its bits after the last row are 0.
    u64 count = counts[0];
    u64 groups = count / 8 + (count % 8 != 0);
    u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 group = u64(blockIdx.x) * blockDim.x + threadIdx.x; group < groups; group += step) {
        u64 first = group * 8;
        u64 end = min(first + 8, count);
        u32 byte = 0;
#pragma unroll 1
        for (u64 row = first; row < end; ++row) {
            u64 from = picked[row];
            if (kind == I32) {
                static_cast<u32 *>(out)[row] = static_cast<const u32 *>(values)[from];
            } else {
                static_cast<u64 *>(out)[row] = static_cast<const u64 *>(values)[from];
            }
            byte |= u32(is_valid(bits, bit, from)) << (row - first);
        }
        out_bits[group] = u8(byte);
        u32 null = u32(end - first) - __popc(byte);
        if (null != 0) {
            atomicAdd(nulls, u64(null));
        }
    }
}
