// Stream compaction: keeps some rows in their order, with three kernels that run one after another.
//
// The rows are cut into tiles of equal size. `count_tiles` counts the rows of each tile that are kept, `scan_u64` turns the
// counts into the place of each tile's first kept row, and `scatter_tiles` passes on each kept row with its place.
//
// No block waits for another, so any grid is right for any number of rows and tiles, which must be the same in all launches.
// A block has a multiple of 32 threads, at most 1,024, and `scan_u64` has one block. All threads of a block run the same
// rounds, because they meet in each of them.

#pragma once

using u64 = unsigned long long;
using u32 = unsigned int;
using u8 = unsigned char;

enum : u32 { WARP = 32, MOST_THREADS = 1024 };

// Whether a row is valid: bit `bit + row` of `bits`, least significant bit first. No row is null without `bits`.
__device__ inline bool is_valid(const u8 *bits, u64 bit, u64 row) {
    if (bits == nullptr) {
        return true;
    }
    u64 at = bit + row;
    return (bits[at / 8] >> (at % 8) & 1) != 0;
}

// How many rows a tile has: whole warps. The last tiles have what is left, or nothing.
__device__ inline u64 rows_of_tile(u64 rows, u64 tiles) {
    u64 share = rows / tiles + (rows % tiles != 0);
    return (share + WARP - 1) / WARP * WARP;
}

// counts[tile] = how many rows of the tile `keep(row)` keeps.
template <class Keep>
__device__ void count_tiles(u64 rows, u64 tiles, u64 *counts, Keep keep) {
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 size = rows_of_tile(rows, tiles);
        u64 end = min((tile + 1) * size, rows);
        u64 count = 0;
        for (u64 first = tile * size; first < end; first += blockDim.x) {
            u64 row = first + threadIdx.x;
            count += __syncthreads_count(row < end && keep(row));
        }
        if (threadIdx.x == 0) {
            counts[tile] = count;
        }
    }
}

// How many of the block's threads are marked: those before this one, and all.
struct Marked {
    u32 before, all;
};

__device__ inline Marked marked(bool mark) {
    __shared__ u32 warps[MOST_THREADS / WARP];
    u32 lane = threadIdx.x % WARP;
    u32 ballot = __ballot_sync(0xffffffff, mark);
    __syncthreads(); // every thread has read the last round's counts
    if (lane == 0) {
        warps[threadIdx.x / WARP] = __popc(ballot);
    }
    __syncthreads();
    Marked found = {u32(__popc(ballot & ((1u << lane) - 1))), 0};
#pragma unroll 1
    for (u32 warp = 0; warp < blockDim.x / WARP; ++warp) {
        found.before += warp < threadIdx.x / WARP ? warps[warp] : 0;
        found.all += warps[warp];
    }
    return found;
}

// Calls `put(place, row)` for each row that `keep(row)` keeps. starts[tile] is the place of the tile's first kept row.
template <class Keep, class Put>
__device__ void scatter_tiles(u64 rows, u64 tiles, const u64 *starts, Keep keep, Put put) {
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 size = rows_of_tile(rows, tiles);
        u64 end = min((tile + 1) * size, rows);
        u64 place = starts[tile];
        for (u64 first = tile * size; first < end; first += blockDim.x) {
            u64 row = first + threadIdx.x;
            bool kept = row < end && keep(row);
            Marked found = marked(kept);
            if (kept) {
                put(place + found.before, row);
            }
            place += found.all;
        }
    }
}

// starts[i] = the sum of the first i values of starts; total[0] = the sum of all n. One block.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) scan_u64(u64 *starts, u64 n, u64 *total) {
    __shared__ u64 sums[MOST_THREADS];
    u64 before = 0; // the sum of earlier rounds, the same in every thread
    for (u64 first = 0; first < n; first += blockDim.x) {
        u64 i = first + threadIdx.x;
        u64 own = i < n ? starts[i] : 0;
        sums[threadIdx.x] = own;
        __syncthreads();
        // Afterwards sums[t] is the sum of this round's values up to that of thread t.
        for (u32 step = 1; step < blockDim.x; step *= 2) {
            u64 other = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
            __syncthreads();
            sums[threadIdx.x] += other;
            __syncthreads();
        }
        if (i < n) {
            starts[i] = before + sums[threadIdx.x] - own;
        }
        before += sums[blockDim.x - 1];
        __syncthreads(); // every thread has read the last sum
    }
    if (threadIdx.x == 0) {
        *total = before;
    }
}
