// The filter's kernels. Compiled in the repository only. A bitmap is the address of a byte and the number of the bit in it that is
// row 0's, least significant bit first; without one all bits are set. passing[row] is 1 or 0. Any grid covers any number of rows.

#include "../../../../examples/cuda_kernel/compaction.cuh"

using i64 = long long;

// The order of values: see key.rs.
enum Family : u64 { SIGNED, UNSIGNED, FLOAT, DAY_TIME, MONTH_DAY_NANO };

// Where the bytes of a row are: `width` bytes at a time, between two offsets of 32 or 64 bits, or where a view of 16 bytes says, whose
// data are the addresses of buffers.
enum Layout : u64 { FIXED, OFFSETS_32, OFFSETS_64, VIEWS };

constexpr u64 INLINE = 12; // the most bytes that lie in a view
constexpr u64 SIGN = u64(1) << 63;

__device__ inline u64 first_row() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline u64 all_threads() { return u64(gridDim.x) * blockDim.x; }

// passing[row] = 0 where the bit is not `wanted`.
extern "C" __global__ void keep(const u8 *bits, u64 bit, u64 rows, u64 wanted, u8 *passing) {
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        if (is_valid(bits, bit, row) != (wanted != 0)) {
            passing[row] = 0;
        }
    }
}

// A number of at most 64 bits, with its sign in all bits above it if it is signed.
__device__ inline u64 integer(u64 width, const void *values, u64 at, bool is_signed) {
    switch (width) {
    case 1: return is_signed ? u64(i64(static_cast<const signed char *>(values)[at])) : static_cast<const u8 *>(values)[at];
    case 2: return is_signed ? u64(i64(static_cast<const short *>(values)[at])) : static_cast<const unsigned short *>(values)[at];
    case 4: return is_signed ? u64(i64(static_cast<const int *>(values)[at])) : static_cast<const u32 *>(values)[at];
    default: return static_cast<const u64 *>(values)[at];
    }
}

// A value as a number of 256 bits, most significant word first.
struct Key {
    u64 word[4];
};

__device__ inline Key key_of(u64 family, u64 width, const void *values, u64 row) {
    Key key = {{0, 0, 0, 0}};
    if (family == DAY_TIME) {
        key.word[0] = integer(4, values, 2 * row, true) ^ SIGN;
        key.word[1] = integer(4, values, 2 * row + 1, true) ^ SIGN;
    } else if (family == MONTH_DAY_NANO) {
        key.word[0] = integer(4, values, 4 * row, true) ^ SIGN;
        key.word[1] = integer(4, values, 4 * row + 1, true) ^ SIGN;
        key.word[2] = integer(8, values, 2 * row + 1, true) ^ SIGN;
    } else if (width > 8) {
        u64 words = width / 8;
        for (u64 i = 0; i < words; ++i) {
            key.word[i] = static_cast<const u64 *>(values)[row * words + words - 1 - i];
        }
        key.word[0] ^= SIGN;
    } else {
        u64 bits = integer(width, values, row, family != UNSIGNED);
        if (family == FLOAT) {
            // Both zeros are equal. The larger the magnitude of a negative float, the smaller it is.
            bits = bits << (64 - 8 * width) << 1 == 0 ? 0 : bits;
            key.word[0] = (bits & SIGN) != 0 ? ~bits : bits ^ SIGN;
        } else {
            key.word[0] = family == SIGNED ? bits ^ SIGN : bits;
        }
    }
    return key;
}

// passing[row] = 0 where bit (ordering of row and literal) of `orderings` is unset; bit 0 is less, 1 equal, 2 greater.
extern "C" __global__ void compare(u64 family, u64 width, const void *values, u64 rows, u64 orderings, u64 literal_0, u64 literal_1,
                                   u64 literal_2, u64 literal_3, u8 *passing) {
    Key literal = {{literal_0, literal_1, literal_2, literal_3}};
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        Key key = key_of(family, width, values, row);
        u64 ordering = 2;
        for (u64 i = 0; i < 4 && ordering == 2; ++i) {
            ordering = key.word[i] < literal.word[i] ? 1 : key.word[i] > literal.word[i] ? 4 : 2;
        }
        if ((ordering & orderings) == 0) {
            passing[row] = 0;
        }
    }
}

struct Bytes {
    const u8 *at;
    u64 length;
};

__device__ inline Bytes bytes_of(u64 layout, u64 width, const void *values, const void *data, u64 row) {
    const u8 *bytes = static_cast<const u8 *>(data);
    switch (layout) {
    case FIXED: return {static_cast<const u8 *>(values) + row * width, width};
    case OFFSETS_32: {
        const u32 *offsets = static_cast<const u32 *>(values) + row;
        return {bytes + offsets[0], offsets[1] - offsets[0]};
    }
    case OFFSETS_64: {
        const u64 *offsets = static_cast<const u64 *>(values) + row;
        return {bytes + offsets[0], offsets[1] - offsets[0]};
    }
    default: {
        const u32 *view = static_cast<const u32 *>(values) + 4 * row;
        if (view[0] <= INLINE) {
            return {reinterpret_cast<const u8 *>(view + 1), view[0]};
        }
        return {static_cast<const u8 *const *>(data)[view[2]] + view[3], view[0]};
    }
    }
}

// As `compare`, of the bytes of rows and literal. Rows that do not pass are not read.
extern "C" __global__ void compare_bytes(u64 layout, u64 width, const void *values, const void *data, u64 rows, const u8 *literal,
                                         u64 length, u64 orderings, u8 *passing) {
    bool only_equality = (orderings & 1) == orderings >> 2;
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        if (passing[row] == 0) {
            continue;
        }
        Bytes bytes = bytes_of(layout, width, values, data, row);
        // If one is the start of the other.
        u64 ordering = bytes.length < length ? 1 : bytes.length > length ? 4 : 2;
        u64 common = bytes.length < length ? bytes.length : length;
        if (only_equality && ordering != 2) {
            common = 0;
        }
        for (u64 i = 0; i < common; ++i) {
            if (bytes.at[i] != literal[i]) {
                ordering = bytes.at[i] < literal[i] ? 1 : 4;
                break;
            }
        }
        if ((ordering & orderings) == 0) {
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

// Adds to nulls[0] how many of the rows that pass are null.
extern "C" __global__ void count_nulls(const u8 *passing, const u8 *bits, u64 bit, u64 rows, u64 *nulls) {
    u64 count = 0;
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        count += passing[row] != 0 && !is_valid(bits, bit, row);
    }
    if (count != 0) {
        atomicAdd(nulls, count);
    }
}

// lengths[row] = how many bytes the row has, if it passes and is not null, else 0. Those that lie in a view do not count.
extern "C" __global__ void measure(u64 layout, const void *values, const void *data, const u8 *bits, u64 bit, u64 rows,
                                   const u8 *passing, u64 *lengths) {
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        u64 length = 0;
        if (passing[row] != 0 && is_valid(bits, bit, row)) {
            length = bytes_of(layout, 0, values, data, row).length;
        }
        lengths[row] = layout == VIEWS && length <= INLINE ? 0 : length;
    }
}

template <class T>
__device__ void gather_units(u64 units, const void *values, const u64 *picked, u64 count, void *out) {
    for (u64 i = first_row(); i < count * units; i += all_threads()) {
        static_cast<T *>(out)[i] = static_cast<const T *>(values)[picked[i / units] * units + i % units];
    }
}

// out = the picked rows, of `width` bytes each, in units of `unit` bytes.
extern "C" __global__ void gather(u64 unit, u64 width, const void *values, const u64 *picked, u64 count, void *out) {
    switch (unit) {
    case 1: return gather_units<u8>(width, values, picked, count, out);
    case 2: return gather_units<unsigned short>(width / 2, values, picked, count, out);
    case 4: return gather_units<u32>(width / 4, values, picked, count, out);
    default: return gather_units<u64>(width / 8, values, picked, count, out);
    }
}

// Sets the bits of the picked rows in `out`, from bit `to` on. All of its bits were unset.
extern "C" __global__ void gather_bits(const u8 *bits, u64 bit, const u64 *picked, u64 count, u32 *out, u64 to) {
    // A thread has the rows of a word of `out`. The words at both ends are also those of other batches, whose kernels run before or
    // after this one.
    u64 words = (to % 32 + count + 31) / 32;
    for (u64 word = first_row(); word < words; word += all_threads()) {
        u32 set = 0;
        for (u64 i = 0; i < 32; ++i) {
            u64 row = word * 32 + i - to % 32; // before row 0 it is beyond the last one
            if (row < count && is_valid(bits, bit, picked[row])) {
                set |= 1u << i;
            }
        }
        out[to / 32 + word] |= set;
    }
}

// The picked rows' bytes, of null none: bytes as out_data, from `base` on, and offsets or views as `out`. starts[row] is how many bytes
// the picked rows before it have. Views refer to buffer 0.
extern "C" __global__ void gather_bytes(u64 layout, const void *values, const void *data, const u8 *bits, u64 bit, const u64 *picked,
                                        const u64 *starts, u64 count, u64 base, void *out, u8 *out_data) {
    for (u64 i = first_row(); i < count; i += all_threads()) {
        u64 row = picked[i];
        Bytes bytes = {nullptr, 0};
        if (is_valid(bits, bit, row)) {
            bytes = bytes_of(layout, 0, values, data, row);
        }
        u64 start = base + starts[row];
        u8 *to = out_data + start;
        if (layout == VIEWS) {
            u32 *view = static_cast<u32 *>(out) + 4 * i;
            u8 *prefix = reinterpret_cast<u8 *>(view + 1);
            bool is_inline = bytes.length <= INLINE;
            view[0] = u32(bytes.length);
            view[1] = view[2] = 0;
            view[3] = is_inline ? 0 : u32(start);
            for (u64 j = 0; !is_inline && j < 4; ++j) {
                prefix[j] = bytes.at[j];
            }
            to = is_inline ? prefix : to;
        } else if (layout == OFFSETS_32) {
            static_cast<u32 *>(out)[i] = u32(start);
        } else {
            static_cast<u64 *>(out)[i] = start;
        }
        for (u64 j = 0; j < bytes.length; ++j) {
            to[j] = bytes.at[j];
        }
        if (i == count - 1 && layout == OFFSETS_32) {
            static_cast<u32 *>(out)[count] = u32(start + bytes.length);
        } else if (i == count - 1 && layout == OFFSETS_64) {
            static_cast<u64 *>(out)[count] = start + bytes.length;
        }
    }
}
