// The example's kernels. The bit of row i of a validity bitmap is bit `bit + i`, least significant first; without a bitmap no row
// is null. Nothing is read beyond the rows.

#include "compaction.cuh"

// out[i] = a[i] * b[i] where both are valid, 0 elsewhere; bit i of out_bits says which. Any grid covers any number of rows.
extern "C" __global__ void product_f64(const double *a, const u8 *a_bits, u64 a_bit, const double *b, const u8 *b_bits, u64 b_bit,
                                       double *out, u8 *out_bits, u64 rows) {
    // A thread has 8 rows, and so a byte of out_bits to itself; its bits after the last row are 0.
    u64 groups = rows / 8 + (rows % 8 != 0);
    u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 group = u64(blockIdx.x) * blockDim.x + threadIdx.x; group < groups; group += step) {
        u64 first = group * 8;
        u64 end = min(first + 8, rows);
        u32 byte = 0;
#pragma unroll 1
        for (u64 row = first; row < end; ++row) {
            bool valid = is_valid(a_bits, a_bit, row) && is_valid(b_bits, b_bit, row);
            out[row] = valid ? a[row] * b[row] : 0.0;
            byte |= u32(valid) << (row - first);
        }
        out_bits[group] = u8(byte);
    }
}

// output[i] = 2 * input[i]. One thread has one row.
extern "C" __global__ void double_f64(const double *input, double *output, u64 rows) {
    u64 row = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row < rows) {
        output[row] = input[row] + input[row];
    }
}

// Whether a valid value is above the limit. A value that is not a number is not.
__device__ inline bool is_above(const double *values, const u8 *bits, u64 bit, double limit, u64 row) {
    return is_valid(bits, bit, row) && values[row] > limit;
}

// counts[tile] = how many valid values of the tile are above the limit.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    count_above_f64(const double *values, const u8 *bits, u64 bit, double limit, u64 rows, u64 tiles, u64 *counts) {
    count_tiles(rows, tiles, counts, [=](u64 row) { return is_above(values, bits, bit, limit, row); });
}

// kept = the valid values above the limit, in their order; those of a tile begin at starts[tile].
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    above_f64(const double *values, const u8 *bits, u64 bit, double limit, u64 rows, u64 tiles, const u64 *starts, double *kept) {
    scatter_tiles(
        rows, tiles, starts, [=](u64 row) { return is_above(values, bits, bit, limit, row); },
        [=](u64 place, u64 row) { kept[place] = values[row]; });
}
