// The plugin's kernels. Compiled in the repository only. A bitmap is the address of a byte and the number of the bit in it that is
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

using i128 = __int128;
using u128 = unsigned __int128;

__device__ inline i128 number(u64 low, u64 high) { return i128(u128(high) << 64 | low); }

// Decimals are aligned to 8 bytes only.
__device__ inline i128 decimal_at(const void *values, u64 row) {
    const u64 *words = static_cast<const u64 *>(values) + 2 * row;
    return number(words[0], words[1]);
}

__device__ inline void put_decimal(u64 *out, u64 row, i128 value) {
    out[2 * row] = u64(value);
    out[2 * row + 1] = u64(u128(value) >> 64);
}

// These return whether the result has at most 128 bits.
__device__ inline bool add(i128 a, i128 b, i128 *result) {
    u128 sum = u128(a) + u128(b);
    *result = i128(sum);
    return ((~(u128(a) ^ u128(b)) & (u128(a) ^ sum)) >> 127) == 0;
}

__device__ inline bool subtract(i128 a, i128 b, i128 *result) {
    u128 difference = u128(a) - u128(b);
    *result = i128(difference);
    return (((u128(a) ^ u128(b)) & (u128(a) ^ difference)) >> 127) == 0;
}

__device__ inline u128 magnitude(i128 a) { return a < 0 ? -u128(a) : u128(a); }

__device__ inline bool multiply(i128 a, i128 b, i128 *result) {
    u128 x = magnitude(a), y = magnitude(b);
    u64 x_high = u64(x >> 64), y_high = u64(y >> 64);
    u128 low = u128(u64(x)) * u64(y);
    // One of them is zero, or the product is too large.
    u128 high = u128(x_high) * u64(y) + u128(u64(x)) * y_high;
    u128 product = low + (high << 64);
    bool negative = (a < 0) != (b < 0);
    u128 most = (u128(1) << 127) - (negative ? 0 : 1);
    *result = i128(negative ? -product : product);
    return (x_high == 0 || y_high == 0) && (high >> 64) == 0 && product >= low && product <= most;
}

// A number of at most 128 bits; 1 if there are none.
__device__ inline i128 integer_at(u64 family, u64 width, const void *values, u64 row) {
    if (values == nullptr) {
        return 1;
    }
    if (width > 8) {
        return decimal_at(values, row);
    }
    u64 low = integer(width, values, row, family == SIGNED);
    return family == SIGNED ? i128(i64(low)) : i128(u128(low));
}

// out[row] = a + b (operation 0), a - b (1), a * b (2) or a / b (3), each times its number, where neither is null, and out_bits says where, if
// it is there. overflow[0] = 1 if one of them has more than 128 bits, or a quotient a larger magnitude than `most`. A warp has 32 rows, whose
// bits are a word.
extern "C" __global__ void decimal(u64 operation, u64 rows, u64 most_low, u64 most_high, u64 *out, u32 *out_bits, u64 *overflow, u64 a_family,
                                   u64 a_width, const void *a_values, u64 a_low, u64 a_high, const u8 *a_bits, u64 a_bit, u64 b_family,
                                   u64 b_width, const void *b_values, u64 b_low, u64 b_high, const u8 *b_bits, u64 b_bit) {
    u64 end = (rows + WARP - 1) / WARP * WARP;
    for (u64 row = first_row(); row < end; row += all_threads()) {
        bool valid = row < rows && is_valid(a_bits, a_bit, row) && is_valid(b_bits, b_bit, row);
        i128 result = 0;
        if (valid) {
            i128 a, b;
            bool fits = multiply(integer_at(a_family, a_width, a_values, row), number(a_low, a_high), &a);
            fits = multiply(integer_at(b_family, b_width, b_values, row), number(b_low, b_high), &b) && fits;
            switch (operation) {
            case 0: fits = add(a, b, &result) && fits; break;
            case 1: fits = subtract(a, b, &result) && fits; break;
            case 2: fits = multiply(a, b, &result) && fits; break;
            default:
                fits = fits && b != 0;
                result = fits ? a / b : 0;
                fits = fits && magnitude(result) <= u128(number(most_low, most_high));
            }
            if (!fits) {
                *overflow = 1;
            }
        }
        if (row < rows) {
            put_decimal(out, row, result);
        }
        u32 ballot = __ballot_sync(0xffffffff, valid);
        if (out_bits != nullptr && row % WARP == 0) {
            out_bits[row / WARP] = ballot;
        }
    }
}

// leaders[row] = one of the rows with the same number `before` and the same bytes, or with the same number and also null: the same one for
// all of them, for which passing is 1. `table` has zeros in a number of places that is a power of two and larger than that of the rows.
extern "C" __global__ void group(const u64 *before, u64 *table, u64 places, u64 *leaders, u8 *passing, u64 layout, u64 width, const void *values,
                                 const void *data, const u8 *bits, u64 bit, u64 rows) {
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        bool valid = is_valid(bits, bit, row);
        Bytes own = {nullptr, 0};
        if (valid) {
            own = bytes_of(layout, width, values, data, row);
        }
        u64 hash = (before[row] + 1) * 0x9e3779b97f4a7c15;
        for (u64 i = 0; i < own.length; ++i) {
            hash = (hash ^ own.at[i]) * 0x100000001b3;
        }
        hash ^= hash >> 32;
        for (u64 place = hash & (places - 1);; place = (place + 1) & (places - 1)) {
            u64 taken = *static_cast<volatile u64 *>(table + place);
            if (taken == 0) {
                taken = atomicCAS(table + place, u64(0), row + 1);
            }
            u64 leader = taken == 0 ? row : taken - 1;
            bool same = before[leader] == before[row] && is_valid(bits, bit, leader) == valid;
            if (same && valid && leader != row) {
                Bytes other = bytes_of(layout, width, values, data, leader);
                same = other.length == own.length;
                for (u64 i = 0; same && i < own.length; ++i) {
                    same = other.at[i] == own.at[i];
                }
            }
            if (same) {
                leaders[row] = leader;
                passing[row] = leader == row;
                break;
            }
        }
    }
}

// Changes the cells of the rows' leaders, of two words each, lower one first. Step 0 adds the value. Steps 1 and 2 keep the largest of the
// values whose bits are inverted where those of the mask are set, as unsigned numbers: first the higher words, then the lower words of values
// with the same ones. Nulls change nothing; other rows set a bit of `seen`. Without values, they are 1.
extern "C" __global__ void accumulate(u64 step, u64 mask_low, u64 mask_high, const u64 *leaders, u64 *cells, u32 *seen, u64 family, u64 width,
                                      const void *values, const u8 *bits, u64 bit, u64 rows) {
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        if (!is_valid(bits, bit, row)) {
            continue;
        }
        i128 value = integer_at(family, width, values, row);
        u64 low = u64(value) ^ mask_low, high = u64(u128(value) >> 64) ^ mask_high;
        u64 *cell = cells + 2 * leaders[row];
        if (step == 0) {
            u64 before = atomicAdd(cell, low);
            atomicAdd(cell + 1, high + (before + low < before ? 1 : 0));
        } else if (step == 1) {
            atomicMax(cell + 1, high);
        } else if (cell[1] == high) {
            atomicMax(cell, low);
        }
        atomicOr(seen + leaders[row] / 32, 1u << (leaders[row] % 32));
    }
}

// out[row] = the lower `width` bytes of a cell whose bits are inverted where those of the mask are set.
extern "C" __global__ void finish(const u64 *cells, u64 rows, u64 mask_low, u64 mask_high, u64 width, void *out) {
    for (u64 row = first_row(); row < rows; row += all_threads()) {
        u64 low = cells[2 * row] ^ mask_low;
        switch (width) {
        case 1: static_cast<u8 *>(out)[row] = u8(low); break;
        case 2: static_cast<unsigned short *>(out)[row] = (unsigned short)(low); break;
        case 4: static_cast<u32 *>(out)[row] = u32(low); break;
        case 8: static_cast<u64 *>(out)[row] = low; break;
        default: put_decimal(static_cast<u64 *>(out), row, number(low, cells[2 * row + 1] ^ mask_high));
        }
    }
}
