// The kernels of the examples on the host, compared with plain loops: `python3 .ci/ptx` builds and runs this. Buffers have no byte
// to spare, and AddressSanitizer reports what is read or written beside them.

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

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
    return value < literal ? 1 : literal < value ? 4 : 2;
}

template <>
u32 ordering(double value, double literal) {
    auto rank = [](double v) { return std::isnan(v) ? std::signbit(v) ? -1 : 1 : 0; };
    if (rank(value) != 0 || rank(literal) != 0) {
        return ordering(rank(value), rank(literal)); // all NaNs here have the same bits but for the sign
    }
    return value < literal ? 1 : value > literal ? 4 : 2;
}

template <>
u32 ordering(float value, float literal) {
    return ordering(double(value), double(literal));
}

// A float of 16 bits.
struct Half {
    unsigned short bits;
    double value() const {
        u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
        double size = exponent == 31 ? fraction != 0 ? NAN : INFINITY
                                     : exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, int(exponent) - 25);
        return std::copysign(size, (bits & 0x8000) != 0 ? -1.0 : 1.0);
    }
};

template <>
u32 ordering(Half value, Half literal) {
    return ordering(value.value(), literal.value());
}

// A signed number of N words, least significant first.
template <int N>
struct Wide {
    u64 word[N];
    bool operator<(const Wide &other) const {
        if (word[N - 1] != other.word[N - 1]) {
            return i64(word[N - 1]) < i64(other.word[N - 1]);
        }
        for (int i = N - 2; i >= 0; --i) {
            if (word[i] != other.word[i]) {
                return word[i] < other.word[i];
            }
        }
        return false;
    }
};

struct DayTime {
    int days, milliseconds;
    bool operator<(const DayTime &other) const {
        return days != other.days ? days < other.days : milliseconds < other.milliseconds;
    }
};

struct MonthDayNano {
    int months, days;
    i64 nanoseconds;
    bool operator<(const MonthDayNano &other) const {
        return months != other.months ? months < other.months : days != other.days ? days < other.days : nanoseconds < other.nanoseconds;
    }
};

// Any bytes: mostly those of few numbers, of which many are equal, and of the extremes.
template <class T>
static T any() {
    u8 bytes[sizeof(T)] = {};
    switch (below(5)) {
    case 0: std::memset(bytes, 0xff, sizeof bytes); break;
    case 1: bytes[sizeof bytes - 1] = 0x80; break;
    case 2: std::memset(bytes, 0xff, sizeof bytes - 1), bytes[sizeof bytes - 1] = 0x7f; break;
    default: bytes[below(sizeof bytes)] = u8(below(3)); break;
    }
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

template <>
double any() {
    return number();
}

template <>
float any() {
    return float(number());
}

template <>
Half any() {
    const unsigned short values[] = {0, 0x8000, 0x7e00, 0xfe00, 0x7c00, 0xfc00, 1, 0x8001, 0x3c00, 0xbc00};
    return {values[below(10)]};
}

// A condition, after others that some rows have failed.
template <class T>
static void check_compare(u64 family, u64 rows) {
    std::vector<T> values(rows);
    std::generate(values.begin(), values.end(), any<T>);
    T literal = any<T>();
    u32 orderings = u32(below(8));
    std::vector<u8> earlier(rows), expected(rows);
    std::generate(earlier.begin(), earlier.end(), [] { return u8(below(4) != 0); });
    for (u64 row = 0; row < rows; ++row) {
        expected[row] = earlier[row] & u8((ordering(values[row], literal) & orderings) != 0);
    }
    Buffer<T> input(values);
    Buffer<u8> passing(earlier);
    Key key = key_of(family, sizeof(T), &literal, 0);
    launch(unsigned(1 + below(3)), 96, [&] {
        compare(family, sizeof(T), input.get(), rows, orderings, key.word[0], key.word[1], key.word[2], key.word[3], passing.get());
    });
    check(same(passing.values(), expected), "compare", rows);
}

// The keys are those of key.rs.
static void check_keys() {
    signed char byte = -1;
    double numbers[] = {-0.0, 1.0, -1.0};
    check(key_of(SIGNED, 1, &byte, 0).word[0] == 0x7fffffffffffffff, "the key of -1", 1);
    check(key_of(UNSIGNED, 1, &byte, 0).word[0] == 0xff, "the key of 255", 1);
    check(key_of(FLOAT, 8, numbers, 0).word[0] == SIGN, "the key of 0.0", 1);
    check(key_of(FLOAT, 8, numbers, 1).word[0] == 0xbff0000000000000, "the key of 1.0", 1);
    check(key_of(FLOAT, 8, numbers, 2).word[0] == 0x400fffffffffffff, "the key of -1.0", 1);
}

static void check_keep(u64 rows) {
    Validity bits(rows);
    bool wanted = below(2) == 0;
    std::vector<u8> earlier(rows), expected(rows);
    std::generate(earlier.begin(), earlier.end(), [] { return u8(below(4) != 0); });
    for (u64 row = 0; row < rows; ++row) {
        expected[row] = earlier[row] & u8(bits.valid[row] == wanted);
    }
    Buffer<u8> passing(earlier);
    launch(unsigned(1 + below(3)), 64, [&] { keep(bits.get(), bits.bit, rows, wanted, passing.get()); });
    check(same(passing.values(), expected), "keep", rows);
}

// Text in one of the layouts.
struct Texts {
    u64 layout, width;
    std::vector<std::string> texts;
    std::unique_ptr<Buffer<u8>> bytes[2];
    std::unique_ptr<Buffer<u32>> words;
    std::unique_ptr<Buffer<u64>> longs;
    std::unique_ptr<Buffer<const u8 *>> addresses;

    explicit Texts(u64 rows) : layout(below(4)), width(1 + below(7)) {
        const char *some[] = {"", "a", "b", "twelve bytes", "thirteen byte", "thirteen bytf", "a text that is longer than any view"};
        std::string data[2] = {layout == FIXED ? "" : "before", "b"};
        std::vector<u32> out;
        std::vector<u64> offsets = {data[0].size()};
        for (u64 row = 0; row < rows; ++row) {
            std::string text = layout == FIXED ? std::string(width, "a\xff"[below(2)]) : some[below(7)];
            u32 buffer = u32(below(2));
            if (layout == VIEWS) {
                u32 view[4] = {u32(text.size()), 0, 0, 0};
                std::memcpy(view + 1, text.data(), text.size() <= INLINE ? text.size() : 4);
                if (text.size() > INLINE) {
                    view[2] = buffer;
                    view[3] = u32(data[buffer].size());
                    data[buffer] += text;
                }
                out.insert(out.end(), view, view + 4);
            } else {
                data[0] += text;
            }
            offsets.push_back(data[0].size());
            texts.push_back(text);
        }
        for (int i : {0, 1}) {
            bytes[i] = std::make_unique<Buffer<u8>>(std::vector<u8>(data[i].begin(), data[i].end()));
        }
        if (layout == OFFSETS_32) {
            out.assign(offsets.begin(), offsets.end());
        }
        words = std::make_unique<Buffer<u32>>(out);
        longs = std::make_unique<Buffer<u64>>(offsets);
        addresses = std::make_unique<Buffer<const u8 *>>(std::vector<const u8 *>{bytes[0]->get(), bytes[1]->get()});
    }
    const void *values() const {
        return layout == FIXED ? static_cast<void *>(bytes[0]->get()) : layout == OFFSETS_64 ? static_cast<void *>(longs->get()) : words->get();
    }
    const void *data() const { return layout == VIEWS ? static_cast<void *>(addresses->get()) : bytes[0]->get(); }
};

static void check_compare_bytes(u64 rows) {
    Texts texts(rows);
    std::string literal = rows == 0 || below(5) == 0 ? "thirteen byte" : texts.texts[below(rows)];
    u32 orderings = u32(below(8));
    std::vector<u8> earlier(rows), expected(rows);
    std::generate(earlier.begin(), earlier.end(), [] { return u8(below(4) != 0); });
    for (u64 row = 0; row < rows; ++row) {
        expected[row] = earlier[row] & u8((ordering(texts.texts[row], literal) & orderings) != 0);
    }
    Buffer<u8> passing(earlier), bytes(std::vector<u8>(literal.begin(), literal.end()));
    launch(unsigned(1 + below(3)), 64, [&] {
        compare_bytes(texts.layout, texts.width, texts.values(), texts.data(), rows, bytes.get(), bytes.length, orderings, passing.get());
    });
    check(same(passing.values(), expected), "compare_bytes", rows);
}

// The rows that pass, and their numbers.
struct Picked {
    std::vector<u8> passing;
    std::vector<u64> numbers;

    explicit Picked(u64 rows) {
        u64 one_of = 1 + below(4);
        for (u64 row = 0; row < rows; ++row) {
            passing.push_back(below(one_of) == 0);
            if (passing.back() != 0) {
                numbers.push_back(row);
            }
        }
    }
};

static void check_select(u64 rows) {
    Picked picked(rows);
    Validity validity(rows);
    Shape shape(rows);
    Buffer<u8> passing(picked.passing);
    Buffer<u64> starts(shape.tiles), counts(1), numbers(picked.numbers.size());
    launch(shape.grid, shape.block, [&] { count_passing(passing.get(), rows, shape.tiles, starts.get()); });
    scan(starts, shape.scan_block, counts.get());
    launch(shape.grid, shape.block, [&] { select(passing.get(), rows, shape.tiles, starts.get(), numbers.get()); });
    check(*counts.get() == picked.numbers.size() && same(numbers.values(), picked.numbers), "select", rows);

    u64 null = 3;
    for (u64 row : picked.numbers) {
        null += !validity.valid[row];
    }
    Buffer<u64> nulls(std::vector<u64>{3});
    launch(unsigned(1 + below(3)), 32, [&] { count_nulls(passing.get(), validity.get(), validity.bit, rows, nulls.get()); });
    check(*nulls.get() == null, "count_nulls", rows);
}

// Values of a width in units that their memory is aligned to.
template <class T>
static void check_gather(u64 units, u64 rows) {
    Picked picked(rows);
    std::vector<T> values(rows * units), expected;
    std::generate(values.begin(), values.end(), [] { return T(threads::chance()); });
    for (u64 row : picked.numbers) {
        expected.insert(expected.end(), values.begin() + i64(row * units), values.begin() + i64((row + 1) * units));
    }
    Buffer<T> input(values), out(expected.size());
    Buffer<u64> numbers(picked.numbers);
    launch(unsigned(1 + below(3)), 32, [&] {
        gather(sizeof(T), sizeof(T) * units, input.get(), numbers.get(), numbers.length, out.get());
    });
    check(same(out.values(), expected), "gather", rows);
}

// The bits of two batches, one after the other.
static void check_gather_bits(u64 rows) {
    std::vector<bool> expected;
    std::vector<Picked> picked = {Picked(rows), Picked(rows / 2 + below(40))};
    u64 all = picked[0].numbers.size() + picked[1].numbers.size();
    Buffer<u32> out(std::vector<u32>((all + 31) / 32));
    for (const Picked &batch : picked) {
        Validity bits(batch.passing.size());
        Buffer<u64> numbers(batch.numbers);
        u64 to = expected.size();
        if (numbers.length > 0) {
            launch(unsigned(1 + below(3)), 32, [&] {
                gather_bits(bits.get(), bits.bit, numbers.get(), numbers.length, out.get(), to);
            });
        }
        for (u64 row : batch.numbers) {
            expected.push_back(bits.valid[row]);
        }
    }
    std::vector<u8> bytes = bitmap(expected);
    bytes.resize(out.length * 4);
    check(std::memcmp(out.get(), bytes.data(), bytes.size()) == 0, "gather_bits", rows);
}

// Text after some that other batches have.
static void check_gather_bytes(u64 rows) {
    Texts texts(rows);
    Picked picked(rows);
    Validity validity(rows);
    if (texts.layout == FIXED || picked.numbers.empty()) {
        return; // fixed width is not gathered as text, and nothing not at all
    }
    const u64 base = 5;
    std::string data(base, '-');
    std::vector<u64> offsets, starts_of(rows);
    std::vector<u32> views;
    u64 next = 0;
    for (u64 row = 0; row < rows; ++row) {
        starts_of[row] = data.size() - base;
        if (next < picked.numbers.size() && picked.numbers[next] == row) {
            ++next;
            std::string text = validity.valid[row] ? texts.texts[row] : "";
            bool is_inline = texts.layout == VIEWS && text.size() <= INLINE;
            u32 view[4] = {u32(text.size()), 0, 0, is_inline ? 0 : u32(data.size())};
            std::memcpy(view + 1, text.data(), is_inline ? text.size() : std::min<u64>(text.size(), 4));
            views.insert(views.end(), view, view + 4);
            offsets.push_back(data.size());
            data += is_inline ? "" : text;
        }
    }
    offsets.push_back(data.size());

    Buffer<u8> passing(picked.passing);
    Buffer<u64> starts(rows), total(1), numbers(picked.numbers);
    launch(unsigned(1 + below(3)), 64, [&] {
        measure(texts.layout, texts.values(), texts.data(), validity.get(), validity.bit, rows, passing.get(), starts.get());
    });
    scan(starts, 1024, total.get());
    check(same(starts.values(), starts_of) && *total.get() + base == data.size(), "measure", rows);

    Buffer<u8> out_data(std::vector<u8>(data.begin(), data.end()));
    std::memset(out_data.get() + base, 0, data.size() - base);
    Buffer<u32> words(texts.layout == VIEWS ? views.size() : offsets.size());
    Buffer<u64> longs(offsets.size());
    void *out = texts.layout == OFFSETS_64 ? static_cast<void *>(longs.get()) : words.get();
    launch(unsigned(1 + below(3)), 32, [&] {
        gather_bytes(texts.layout, texts.values(), texts.data(), validity.get(), validity.bit, numbers.get(), starts.get(),
                     numbers.length, base, out, out_data.get());
    });
    check(same(out_data.values(), std::vector<u8>(data.begin(), data.end())), "the bytes of gather_bytes", rows);
    bool right = texts.layout == OFFSETS_64 ? same(longs.values(), offsets)
                                            : same(words.values(), texts.layout == VIEWS ? views : std::vector<u32>(offsets.begin(), offsets.end()));
    check(right, "gather_bytes", rows);
}

static void check_filters(u64 rows) {
    check_keep(rows);
    switch (below(14)) {
    case 0: check_compare<signed char>(SIGNED, rows); break;
    case 1: check_compare<short>(SIGNED, rows); break;
    case 2: check_compare<int>(SIGNED, rows); break;
    case 3: check_compare<i64>(SIGNED, rows); break;
    case 4: check_compare<u8>(UNSIGNED, rows); break;
    case 5: check_compare<unsigned short>(UNSIGNED, rows); break;
    case 6: check_compare<u32>(UNSIGNED, rows); break;
    case 7: check_compare<u64>(UNSIGNED, rows); break;
    case 8: check_compare<Half>(FLOAT, rows); break;
    case 9: check_compare<float>(FLOAT, rows); break;
    case 10: check_compare<double>(FLOAT, rows); break;
    case 11: check_compare<Wide<2>>(SIGNED, rows); break;
    case 12: check_compare<Wide<4>>(SIGNED, rows); break;
    default: below(2) == 0 ? check_compare<DayTime>(DAY_TIME, rows) : check_compare<MonthDayNano>(MONTH_DAY_NANO, rows); break;
    }
    check_compare_bytes(rows);
    check_select(rows);
    switch (below(4)) {
    case 0: check_gather<u8>(1 + below(5), rows); break;
    case 1: check_gather<unsigned short>(1, rows); break;
    case 2: check_gather<u32>(1 + below(2), rows); break;
    default: check_gather<u64>(u64(1) << below(3), rows); break;
    }
    check_gather_bits(rows);
    check_gather_bytes(rows);
}

int main(int arguments, char **argument) {
    u64 rounds = arguments > 1 ? std::strtoull(argument[1], nullptr, 10) : 1;
    if (arguments > 2) {
        threads::chance.seed(std::strtoull(argument[2], nullptr, 10));
    }
    check_keys();
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
