// Arrow's memory in WGSL: what a compute shader needs to read columns and to write them.
//
// This is the text of `arrow_device_wgpu::ARROW_WGSL`. Put it in front of a shader of your own. It declares functions and constants
// only, whose names all begin with `arrow_` or `ARROW_`: no binding, no override, no entry point, and nothing beyond WGSL itself, so
// it compiles wherever WebGPU runs.
//
// Portable WGSL has no 8-, 16- or 64-bit values in memory, and no function takes a storage buffer as a parameter. So bind each buffer
// of a column as `array<u32>`, index it yourself, and hand the words to these functions. Numbers that count bits, bytes or elements
// from the beginning of a binding begin with the binding's `skip`, which the host passes in:
//
//     validity bit b        arrow_bit(bitmap[b / 32u], b)               b = first_bit + row
//     u8 or i8, byte b      arrow_u8(bytes[b / 4u], b)                  b = skip + row
//     u16, i16 or f16 e     arrow_u16(halves[e / 2u], e)                e = skip / 2u + row
//     u32, i32 or f32 e     words[e], bitcast<i32>(words[e]), ...       e = skip / 4u + row
//     64 bits, element e    vec2(words[2u * e], words[2u * e + 1u])     e = skip / 8u + row
//     128 bits, element e   quads[e], from an array<vec4<u32>>          e = skip / 16u + row
//
// 64-bit integers are a vec2<u32> and 128-bit ones, which decimals are, a vec4<u32>: the low word first, as in memory. Signed and
// unsigned ones are added, subtracted and multiplied by the same functions, since they wrap around. Two are equal if `all(a == b)`.
//
// A kernel writes whole words: one invocation computes the 32 rows of a bitmap's word, the 4 rows of a word of bytes. Two invocations
// that write to parts of one word would need atomics.

// ---- Validity and booleans

// What a host passes as the first bit of a column without a bitmap, all of whose rows are valid. WebGPU has no empty bindings: bind
// the values once more in the bitmap's place.
const ARROW_NO_BITMAP: u32 = 0xffffffffu;

// Returns bit `bit` of a bitmap, whose word `bit / 32u` is `word`.
fn arrow_bit(word: u32, bit: u32) -> bool {
    return ((word >> (bit & 31u)) & 1u) == 1u;
}

// ---- 8 and 16 bits

// Returns byte `byte` of memory, whose word `byte / 4u` is `word`.
fn arrow_u8(word: u32, byte: u32) -> u32 {
    return (word >> (8u * (byte & 3u))) & 0xffu;
}

fn arrow_i8(word: u32, byte: u32) -> i32 {
    return bitcast<i32>(arrow_u8(word, byte) << 24u) >> 24u;
}

// Returns 16-bit element `element` of memory, whose word `element / 2u` is `word`.
fn arrow_u16(word: u32, element: u32) -> u32 {
    return (word >> (16u * (element & 1u))) & 0xffffu;
}

fn arrow_i16(word: u32, element: u32) -> i32 {
    return bitcast<i32>(arrow_u16(word, element) << 16u) >> 16u;
}

// As arrow_u16, for a half-precision float. A device may take a subnormal one for 0, and need not keep infinities and NaNs.
fn arrow_f16(word: u32, element: u32) -> f32 {
    return unpack2x16float(arrow_u16(word, element)).x;
}

// ---- Strings, binary values and lists
//
// Row r has the bytes (or the elements) from offset r up to offset r + 1, counted from the beginning of the data (or of the child).
// 32-bit offsets are words. 64-bit ones need arrow_offset. A binding reaches no further than 32 bits: data of more bytes is bound
// in parts, each with the offset at which it begins.

// Returns a 64-bit offset as a number from `base` on, for data whose binding begins at offset `base`; 0xffffffff if it lies before
// that or does not fit.
fn arrow_offset(offset: vec2<u32>, base: vec2<u32>) -> u32 {
    let at = arrow_sub64(offset, base);
    return select(0xffffffffu, at.x, at.y == 0u);
}

// Returns the 4 bytes from byte `byte` on, which need not be a multiple of 4: `first` and `second` are the words `byte / 4u` and
// `byte / 4u + 1u`. Strings are compared and hashed faster by words than by bytes.
fn arrow_unaligned(first: u32, second: u32, byte: u32) -> u32 {
    let shift = 8u * (byte & 3u);
    // A shift by 32 would be one by 0.
    return select((first >> shift) | (second << (32u - shift)), first, shift == 0u);
}

// Returns `word` with only its first `bytes` bytes, and 0 for the others: for the last word of a string.
fn arrow_first_bytes(word: u32, bytes: u32) -> u32 {
    return select(word & ((1u << (8u * (bytes & 3u))) - 1u), word, bytes >= 4u);
}

// ---- 64-bit integers

fn arrow_i64(value: i32) -> vec2<u32> {
    return vec2<u32>(bitcast<u32>(value), bitcast<u32>(value >> 31u));
}

fn arrow_add64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + u32(low < a.x));
}

fn arrow_sub64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - u32(a.x < b.x));
}

// Returns all 64 bits of the product of two unsigned words.
fn arrow_mul_words(a: u32, b: u32) -> vec2<u32> {
    let a0 = a & 0xffffu;
    let a1 = a >> 16u;
    let b0 = b & 0xffffu;
    let b1 = b >> 16u;
    let low = a0 * b0;
    let middle = a1 * b0 + (low >> 16u);
    let other = a0 * b1 + (middle & 0xffffu);
    return vec2<u32>((other << 16u) | (low & 0xffffu), a1 * b1 + (middle >> 16u) + (other >> 16u));
}

// Returns the low 64 bits of the product.
fn arrow_mul64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = arrow_mul_words(a.x, b.x);
    return vec2<u32>(low.x, low.y + a.x * b.y + a.y * b.x);
}

fn arrow_less_u64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn arrow_less_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return bitcast<i32>(a.y) < bitcast<i32>(b.y) || (a.y == b.y && a.x < b.x);
}

// Returns about the value: within 2^-22 of it.
fn arrow_u64_to_f32(a: vec2<u32>) -> f32 {
    return f32(a.y) * 4294967296.0 + f32(a.x);
}

// As arrow_u64_to_f32, signed.
fn arrow_i64_to_f32(a: vec2<u32>) -> f32 {
    if (a.y >> 31u) == 1u {
        return -arrow_u64_to_f32(arrow_sub64(vec2<u32>(), a));
    }
    return arrow_u64_to_f32(a);
}

// ---- 128-bit integers: decimals

fn arrow_i128(value: vec2<u32>) -> vec4<u32> {
    let sign = bitcast<u32>(bitcast<i32>(value.y) >> 31u);
    return vec4<u32>(value, sign, sign);
}

fn arrow_add128(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    let low = arrow_add64(a.xy, b.xy);
    let carry = u32(arrow_less_u64(low, a.xy));
    return vec4<u32>(low, arrow_add64(arrow_add64(a.zw, b.zw), vec2<u32>(carry, 0u)));
}

fn arrow_sub128(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    let borrow = u32(arrow_less_u64(a.xy, b.xy));
    return vec4<u32>(arrow_sub64(a.xy, b.xy), arrow_sub64(arrow_sub64(a.zw, b.zw), vec2<u32>(borrow, 0u)));
}

// Returns the low 128 bits of the product. The product of decimals has the sum of their scales.
fn arrow_mul128(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    let one = arrow_mul_words(a.x, b.y);
    let other = arrow_mul_words(a.y, b.x);
    let outer = vec4<u32>(arrow_mul_words(a.x, b.x), arrow_mul_words(a.y, b.y));
    let inner = arrow_add128(vec4<u32>(0u, one, 0u), vec4<u32>(0u, other, 0u));
    let low = arrow_add128(outer, inner);
    let high = arrow_add64(arrow_mul64(a.xy, b.zw), arrow_mul64(a.zw, b.xy));
    return vec4<u32>(low.xy, arrow_add64(low.zw, high));
}

fn arrow_less_i128(a: vec4<u32>, b: vec4<u32>) -> bool {
    return arrow_less_i64(a.zw, b.zw) || (all(a.zw == b.zw) && arrow_less_u64(a.xy, b.xy));
}

// ---- 64-bit floats, which portable WGSL cannot compute with

// Returns the nearest 32-bit float. What is too small for a normal one becomes 0.
fn arrow_f64_to_f32(bits: vec2<u32>) -> f32 {
    let sign = bits.y & 0x80000000u;
    let exponent = (bits.y >> 20u) & 0x7ffu;
    let fraction = ((bits.y & 0xfffffu) << 3u) | (bits.x >> 29u);
    let rest = bits.x & 0x1fffffffu;
    var number = 0u;
    if exponent == 0x7ffu {
        // An infinity, or a NaN, whose fraction is not 0.
        number = 0x7f800000u | select(0x400000u, 0u, (fraction | rest) == 0u);
    } else if exponent > 1150u {
        number = 0x7f800000u;
    } else if exponent > 896u {
        // Half of the last place is rounded to the even number. A carry moves into the exponent, where it belongs.
        let up = rest > 0x10000000u || (rest == 0x10000000u && (fraction & 1u) == 1u);
        number = (((exponent - 896u) << 23u) | fraction) + u32(up);
    }
    return bitcast<f32>(sign | number);
}

// Returns the same value as a 64-bit float; 0 for a subnormal one.
fn arrow_f64(value: f32) -> vec2<u32> {
    let bits = bitcast<u32>(value);
    let sign = bits & 0x80000000u;
    let exponent = (bits >> 23u) & 0xffu;
    let fraction = bits & 0x7fffffu;
    if exponent == 0u {
        return vec2<u32>(0u, sign);
    }
    let biased = select(exponent + 896u, 0x7ffu, exponent == 0xffu);
    return vec2<u32>(fraction << 29u, sign | (biased << 20u) | (fraction >> 3u));
}
