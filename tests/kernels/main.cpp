// The kernels of the examples on the host, compared with plain loops: `python3 .ci/ptx` builds and runs this. Buffers have no byte
// to spare, and AddressSanitizer reports what is read or written beside them.

#include <cmath>
#include <cstring>
#include <limits>

#include "threads.h"

#define select select_rows // the C library has another
#include "../../datafusion/examples/sql/device_filter/filter.cu"
#include "../../examples/cuda_kernel/kernel.cu"
#include "../cuda_suite/fill.cu"

using threads::below;
using threads::launch;

static u64 cases;

static void check(bool holds, const char *what, u64 rows) {
    ++cases;
    if (!holds) {
        std::fprintf(stderr, "%s is wrong, case %llu, %llu rows\n", what, cases, rows);
        std::exit(1);
    }
}

template <class T>
static bool same(const std::vector<T> &found, const std::vector<T> &expected) {
    return found.size() == expected.size() && (found.empty() || std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0);
}

// Memory of exactly this length for a kernel, at first with any content.
template <class T>
struct Buffer {
    std::unique_ptr<T[]> memory;
    u64 length;

    explicit Buffer(u64 n) : memory(new T[n]), length(n) {
        for (u64 byte = 0; byte < n * sizeof(T); ++byte) {
            reinterpret_cast<u8 *>(memory.get())[byte] = u8(below(256));
        }
    }
    explicit Buffer(const std::vector<T> &values) : memory(new T[values.size()]), length(values.size()) {
        std::copy(values.begin(), values.end(), memory.get());
    }
    T *get() const { return memory.get(); }
    std::vector<T> values() const { return std::vector<T>(memory.get(), memory.get() + length); }
};

// A validity bitmap that begins anywhere in its first byte, or none.
struct Validity {
    std::vector<bool> valid;
    u64 bit = 0;
    std::unique_ptr<Buffer<u8>> bytes;

    explicit Validity(u64 rows) : valid(rows, true) {
        u64 kind = below(5);
        if (kind == 0) {
            return;
        }
        bit = below(100);
        for (u64 row = 0; row < rows; ++row) {
            valid[row] = kind == 1 ? false : kind == 2 ? true : below(kind) == 0;
        }
        bytes = std::make_unique<Buffer<u8>>((bit + rows + 7) / 8 - bit / 8);
        for (u64 row = 0; row < rows; ++row) {
            u64 at = bit % 8 + row;
            u8 &byte = bytes->get()[at / 8];
            byte = u8((byte & ~(1 << at % 8)) | valid[row] << at % 8);
        }
    }
    // The address of bit 0. The memory begins with the byte of the first row.
    const u8 *get() const { return bytes ? reinterpret_cast<const u8 *>(reinterpret_cast<std::uintptr_t>(bytes->get()) - bit / 8) : nullptr; }
};

static std::vector<u8> bitmap(const std::vector<bool> &bits) {
    std::vector<u8> bytes((bits.size() + 7) / 8);
    for (u64 i = 0; i < bits.size(); ++i) {
        bytes[i / 8] = u8(bytes[i / 8] | bits[i] << i % 8);
    }
    return bytes;
}

static double special() {
    const double values[] = {0.0, -0.0, NAN, -NAN, INFINITY, -INFINITY, std::numeric_limits<double>::denorm_min(), 1.5};
    return values[below(8)];
}

static double number() { return below(3) == 0 ? special() : double(i64(below(2001)) - 1000) / 8; }

static std::vector<double> numbers(u64 rows) {
    std::vector<double> values(rows);
    std::generate(values.begin(), values.end(), number);
    return values;
}

// How a filter is launched: as the programs do it, or in any other way that the kernels allow.
struct Shape {
    u64 tiles;
    unsigned grid, block, scan_block;

    explicit Shape(u64 rows) {
        const unsigned blocks[] = {32, 64, 96, 256};
        tiles = std::max<u64>((rows + 2047) / 2048, 1);
        grid = unsigned(tiles);
        block = 256;
        scan_block = 1024;
        if (below(8) != 0) {
            tiles = 1 + below(below(3) == 0 ? 70 : 9);
            grid = unsigned(1 + below(tiles + 2));
            block = blocks[below(4)];
            scan_block = blocks[below(4)];
        }
    }
};

static void scan(const Buffer<u64> &starts, unsigned block, u64 *total) {
    launch(1, block, [&] { scan_u64(starts.get(), starts.length, total); });
}

static void check_scan(u64 n, unsigned block) {
    std::vector<u64> counts(n), expected;
    u64 sum = 0;
    for (u64 &count : counts) {
        count = below(below(2) == 0 ? 3 : u64(1) << 40);
        expected.push_back(sum);
        sum += count;
    }
    Buffer<u64> starts(counts), total(1);
    scan(starts, block, total.get());
    check(same(starts.values(), expected) && *total.get() == sum, "scan_u64", n);
}

static void check_above(u64 rows) {
    std::vector<double> values = numbers(rows), expected;
    Validity validity(rows);
    double limit = below(8) == 0 ? number() : below(3) == 0 ? -2000 : double(below(100)) - 50;
    for (u64 row = 0; row < rows; ++row) {
        if (validity.valid[row] && values[row] > limit) {
            expected.push_back(values[row]);
        }
    }
    Shape shape(rows);
    Buffer<double> input(values), kept(expected.size());
    Buffer<u64> starts(shape.tiles), total(1);
    launch(shape.grid, shape.block,
           [&] { count_above_f64(input.get(), validity.get(), validity.bit, limit, rows, shape.tiles, starts.get()); });
    scan(starts, shape.scan_block, total.get());
    check(*total.get() == expected.size(), "count_above_f64", rows);
    launch(shape.grid, shape.block,
           [&] { above_f64(input.get(), validity.get(), validity.bit, limit, rows, shape.tiles, starts.get(), kept.get()); });
    check(same(kept.values(), expected), "above_f64", rows);
}

static void check_product(u64 rows) {
    std::vector<double> a = numbers(rows), b = numbers(rows), expected(rows);
    Validity a_valid(rows), b_valid(rows);
    std::vector<bool> valid(rows);
    for (u64 row = 0; row < rows; ++row) {
        valid[row] = a_valid.valid[row] && b_valid.valid[row];
        expected[row] = valid[row] ? a[row] * b[row] : 0.0;
    }
    Buffer<double> x(a), y(b), out(rows);
    Buffer<u8> bits((rows + 7) / 8);
    launch(unsigned(1 + below(4)), 64, [&] {
        product_f64(x.get(), a_valid.get(), a_valid.bit, y.get(), b_valid.get(), b_valid.bit, out.get(), bits.get(), rows);
    });
    check(same(out.values(), expected) && same(bits.values(), bitmap(valid)), "product_f64", rows);
}

static void check_double_and_fill(u64 rows) {
    std::vector<double> values = numbers(rows), expected(rows);
    std::transform(values.begin(), values.end(), expected.begin(), [](double value) { return value + value; });
    Buffer<double> input(values), output(rows);
    Buffer<long long> filled(rows);
    unsigned blocks = unsigned(rows / 64 + 1);
    launch(blocks, 64, [&] { double_f64(input.get(), output.get(), rows); });
    check(same(output.values(), expected), "double_f64", rows);
    launch(blocks, 64, [&] { fill_i64(filled.get(), -7, rows); });
    check(same(filled.values(), std::vector<long long>(rows, -7)), "fill_i64", rows);
}

// How a value compares with a literal in DataFusion, where both zeros are equal and NaNs are beyond the infinities: 1 for less, 2 for
// equal, 4 for greater.
template <class T>
static u32 ordering(T value, T literal) {
    return value < literal ? 1 : value > literal ? 4 : 2;
}

static u32 ordering(double value, double literal) {
    auto rank = [](double v) { return std::isnan(v) ? std::signbit(v) ? -1 : 1 : 0; };
    if (rank(value) != 0 || rank(literal) != 0) {
        return ordering(rank(value), rank(literal)); // all NaNs here have the same bits but for the sign
    }
    return value < literal ? 1 : value > literal ? 4 : 2;
}

static i64 literal_of(double value) {
    i64 key;
    std::memcpy(&key, &value, sizeof key);
    key = value == 0.0 ? 0 : key;
    return key < 0 ? key ^ std::numeric_limits<i64>::max() : key;
}

template <class T>
static i64 literal_of(T value) {
    return value;
}

// A filter from its condition to its rows.
template <class T>
static void check_filter(Kind kind, u64 rows, const std::vector<T> &values, T literal) {
    Validity validity(rows);
    u32 orderings = u32(below(8));
    Buffer<T> input(values);
    std::vector<u8> earlier(rows), expected(rows);
    std::generate(earlier.begin(), earlier.end(), [] { return u8(below(4) != 0); });
    Buffer<u8> passing(earlier);
    std::vector<u64> numbers;
    for (u64 row = 0; row < rows; ++row) {
        bool passes = validity.valid[row] && (ordering(values[row], literal) & orderings) != 0;
        expected[row] = earlier[row] & u8(passes);
        if (expected[row] != 0) {
            numbers.push_back(row);
        }
    }
    launch(unsigned(1 + below(3)), 96, [&] {
        compare(kind, input.get(), validity.get(), validity.bit, rows, orderings, literal_of(literal), passing.get());
    });
    check(same(passing.values(), expected), "compare", rows);

    Shape shape(rows);
    Buffer<u64> starts(shape.tiles), counts(1), picked(numbers.size());
    launch(shape.grid, shape.block, [&] { count_passing(passing.get(), rows, shape.tiles, starts.get()); });
    scan(starts, shape.scan_block, counts.get());
    launch(shape.grid, shape.block, [&] { select(passing.get(), rows, shape.tiles, starts.get(), picked.get()); });
    check(*counts.get() == numbers.size() && same(picked.values(), numbers), "select", rows);

    Validity other(rows); // of the column that is gathered
    std::vector<T> gathered;
    std::vector<bool> valid;
    u64 null = 3;
    for (u64 row : numbers) {
        gathered.push_back(values[row]);
        valid.push_back(other.valid[row]);
        null += !other.valid[row];
    }
    Buffer<T> out(numbers.size());
    Buffer<u8> out_bits((numbers.size() + 7) / 8);
    Buffer<u64> nulls(std::vector<u64>{3});
    launch(unsigned(1 + below(3)), 32, [&] {
        gather(kind, input.get(), other.get(), other.bit, picked.get(), counts.get(), nulls.get(), out.get(), out_bits.get());
    });
    check(same(out.values(), gathered) && same(out_bits.values(), bitmap(valid)) && *nulls.get() == null, "gather", rows);
}

static void check_filters(u64 rows) {
    std::vector<i64> longs(rows);
    std::vector<i32> ints(rows);
    auto integer = [](i64 least, i64 most) { return below(9) == 0 ? below(2) == 0 ? least : most : i64(below(9)) - 4; };
    std::generate(longs.begin(), longs.end(), [&] { return integer(std::numeric_limits<i64>::min(), std::numeric_limits<i64>::max()); });
    std::generate(ints.begin(), ints.end(), [&] { return i32(integer(std::numeric_limits<i32>::min(), std::numeric_limits<i32>::max())); });
    switch (below(3)) {
    case 0: return check_filter<i32>(I32, rows, ints, i32(below(9)) - 4);
    case 1: return check_filter<i64>(I64, rows, longs, integer(std::numeric_limits<i64>::min(), std::numeric_limits<i64>::max()));
    default: return check_filter<double>(F64, rows, numbers(rows), below(4) == 0 ? number() : special());
    }
}

int main(int arguments, char **argument) {
    u64 rounds = arguments > 1 ? std::strtoull(argument[1], nullptr, 10) : 1;
    if (arguments > 2) {
        threads::chance.seed(std::strtoull(argument[2], nullptr, 10));
    }
    for (u64 round = 0; round < rounds; ++round) {
        for (u64 border : {0, 32, 64, 256, 1024, 2048, 4096}) {
            for (i64 beside = border == 0 ? 0 : -1; beside <= 1; ++beside) {
                u64 rows = border + u64(beside);
                for (int time = 0; time < 3; ++time) {
                    check_above(rows);
                    check_filters(rows);
                }
                check_product(rows);
                check_double_and_fill(rows);
            }
        }
        for (int time = 0; time < 60; ++time) {
            u64 rows = below(700);
            check_above(rows);
            check_filters(rows);
            check_product(rows);
            check_double_and_fill(rows);
        }
        for (u64 n : {0, 1, 31, 32, 33, 1023, 1024, 1025, 3000}) {
            for (unsigned block : {32, 96, 1024}) {
                if (block == 1024 || n <= 1024) {
                    check_scan(n, block);
                }
            }
        }
    }
    std::printf("%llu checks of the kernels on the host\n", cases);
}
