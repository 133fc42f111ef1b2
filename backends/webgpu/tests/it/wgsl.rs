//! Every function of `ARROW_WGSL`, on the adapter, over chosen and random values, against arrow-rs and plain Rust.

use std::collections::HashSet;

use arrow_array::UInt32Array;
use arrow_array::types::{ArrowPrimitiveType, Float16Type};
use arrow_buffer::bit_util::get_bit;
use arrow_device::{DeviceArray, DeviceBufferMut, Queue};
use arrow_device_wgpu::{ARROW_WGSL, WgpuDevice};

use crate::random::Random;
use crate::shader::{pipeline, run as run_shader};

type F16 = <Float16Type as ArrowPrimitiveType>::Native;

/// Words that a shader reads, and writes, for one input.
const INPUT: usize = 8;
const OUTPUT: usize = 4;
const INPUTS: usize = 20_000;

/// A random word: often one at which carries, signs and lengths change.
fn word(random: &mut Random) -> u32 {
    #[rustfmt::skip]
    const EDGES: [u32; 10] = [0, 1, 2, 0x7fff, 0xffff, 0x1_0000, 0x7fff_ffff, 0x8000_0000, u32::MAX - 1, u32::MAX];
    match random.below(4) {
        0 => EDGES[random.below(10)],
        1 => (random.next() as u32) >> random.below(32),
        _ => random.next() as u32,
    }
}

type Words = [u32; INPUT];

/// A function's name, the shader's lines that call it on `a` (8 words) and set `r` (4 words), and whether `r` is what it must be.
type Case = (
    &'static str,
    &'static str,
    fn(&Words, [u32; OUTPUT]) -> bool,
);

fn u64_of(words: &[u32]) -> u64 {
    u64::from(words[0]) | u64::from(words[1]) << 32
}

fn u128_of(words: &[u32]) -> u128 {
    u128::from(u64_of(words)) | u128::from(u64_of(&words[2..])) << 64
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn halves_of(words: &[u32]) -> Vec<u16> {
    let bytes = bytes_of(words);
    bytes
        .chunks(2)
        .map(|half| u16::from_le_bytes([half[0], half[1]]))
        .collect()
}

/// Whether `got` is the value, or 0 for a subnormal one, which devices may flush.
fn is_or_flushed(got: u32, value: f32) -> bool {
    got == value.to_bits() || (value.is_subnormal() && got & 0x7fff_ffff == 0)
}

fn near(got: u32, value: f64) -> bool {
    (f64::from(f32::from_bits(got)) - value).abs() <= value.abs() / f64::from(1 << 22)
}

#[rustfmt::skip] // a table
const CASES: &[Case] = &[
    // Any bit of the first seven words.
    ("arrow_bit", "let bit = a[7] % 224u; r[0] = u32(arrow_bit(a[bit / 32u], bit));",
        |a, r| (r[0] == 1) == get_bit(&bytes_of(a), (a[7] % 224) as usize) && r[0] < 2),
    ("arrow_u8", "let byte = a[7] % 28u; r[0] = arrow_u8(a[byte / 4u], byte);",
        |a, r| r[0] == u32::from(bytes_of(a)[(a[7] % 28) as usize])),
    ("arrow_i8", "let byte = a[7] % 28u; r[0] = bitcast<u32>(arrow_i8(a[byte / 4u], byte));",
        |a, r| r[0] as i32 == i32::from(bytes_of(a)[(a[7] % 28) as usize] as i8)),
    ("arrow_u16", "let e = a[7] % 14u; r[0] = arrow_u16(a[e / 2u], e);",
        |a, r| r[0] == u32::from(halves_of(a)[(a[7] % 14) as usize])),
    ("arrow_i16", "let e = a[7] % 14u; r[0] = bitcast<u32>(arrow_i16(a[e / 2u], e));",
        |a, r| r[0] as i32 == i32::from(halves_of(a)[(a[7] % 14) as usize] as i16)),
    ("arrow_f16", "let e = a[7] % 14u; r[0] = bitcast<u32>(arrow_f16(a[e / 2u], e));",
        |a, r| {
        let half = F16::from_bits(halves_of(a)[(a[7] % 14) as usize]);
        let flushed = half.classify() == std::num::FpCategory::Subnormal && r[0] << 1 == 0;
        !half.is_finite() || r[0] == half.to_f32().to_bits() || flushed
    }),
    // Every other base is near the offset, below it or above it.
    ("arrow_offset", "let offset = vec2(a[0], a[1]); var base = vec2(a[2], a[3]); if (a[4] & 1u) == 0u { base = arrow_sub64(offset, vec2(a[5], 0u)); } r[0] = arrow_offset(offset, base);",
        |a, r| {
        let offset = u64_of(a);
        let base = match a[4] & 1 {
            0 => offset.wrapping_sub(u64::from(a[5])),
            _ => u64_of(&a[2..]),
        };
        r[0] == u32::try_from(offset.wrapping_sub(base)).unwrap_or(u32::MAX)
    }),
    ("arrow_unaligned", "let byte = a[7] % 24u; r[0] = arrow_unaligned(a[byte / 4u], a[byte / 4u + 1u], byte);",
        |a, r| bytes_of(a)[(a[7] % 24) as usize..][..4] == r[0].to_le_bytes()),
    ("arrow_first_bytes", "r[0] = arrow_first_bytes(a[0], a[7] % 6u);",
        |a, r| {
        let (kept, mut expected) = ((a[7] % 6).min(4) as usize, [0; 4]);
        expected[..kept].copy_from_slice(&a[0].to_le_bytes()[..kept]);
        r[0].to_le_bytes() == expected
    }),
    ("arrow_i64", "let v = arrow_i64(bitcast<i32>(a[0])); r[0] = v.x; r[1] = v.y;",
        |a, r| u64_of(&r) as i64 == i64::from(a[0] as i32)),
    ("arrow_add64", "let v = arrow_add64(vec2(a[0], a[1]), vec2(a[2], a[3])); r[0] = v.x; r[1] = v.y;",
        |a, r| u64_of(&r) == u64_of(a).wrapping_add(u64_of(&a[2..]))),
    ("arrow_sub64", "let v = arrow_sub64(vec2(a[0], a[1]), vec2(a[2], a[3])); r[0] = v.x; r[1] = v.y;",
        |a, r| u64_of(&r) == u64_of(a).wrapping_sub(u64_of(&a[2..]))),
    ("arrow_mul_words", "let v = arrow_mul_words(a[0], a[1]); r[0] = v.x; r[1] = v.y;",
        |a, r| u64_of(&r) == u64::from(a[0]) * u64::from(a[1])),
    ("arrow_mul64", "let v = arrow_mul64(vec2(a[0], a[1]), vec2(a[2], a[3])); r[0] = v.x; r[1] = v.y;",
        |a, r| u64_of(&r) == u64_of(a).wrapping_mul(u64_of(&a[2..]))),
    ("arrow_less_u64", "r[0] = u32(arrow_less_u64(vec2(a[0], a[1]), vec2(a[2], a[3])));",
        |a, r| r[0] == u32::from(u64_of(a) < u64_of(&a[2..]))),
    ("arrow_less_i64", "r[0] = u32(arrow_less_i64(vec2(a[0], a[1]), vec2(a[2], a[3])));",
        |a, r| r[0] == u32::from((u64_of(a) as i64) < (u64_of(&a[2..]) as i64))),
    ("arrow_u64_to_f32", "r[0] = bitcast<u32>(arrow_u64_to_f32(vec2(a[0], a[1])));",
        |a, r| near(r[0], u64_of(a) as f64)),
    ("arrow_i64_to_f32", "r[0] = bitcast<u32>(arrow_i64_to_f32(vec2(a[0], a[1])));",
        |a, r| near(r[0], u64_of(a) as i64 as f64)),
    ("arrow_i128", "let v = arrow_i128(vec2(a[0], a[1])); r = array(v.x, v.y, v.z, v.w);",
        |a, r| u128_of(&r) as i128 == i128::from(u64_of(a) as i64)),
    ("arrow_add128", "let v = arrow_add128(vec4(a[0], a[1], a[2], a[3]), vec4(a[4], a[5], a[6], a[7])); r = array(v.x, v.y, v.z, v.w);",
        |a, r| u128_of(&r) == u128_of(a).wrapping_add(u128_of(&a[4..]))),
    ("arrow_sub128", "let v = arrow_sub128(vec4(a[0], a[1], a[2], a[3]), vec4(a[4], a[5], a[6], a[7])); r = array(v.x, v.y, v.z, v.w);",
        |a, r| u128_of(&r) == u128_of(a).wrapping_sub(u128_of(&a[4..]))),
    ("arrow_mul128", "let v = arrow_mul128(vec4(a[0], a[1], a[2], a[3]), vec4(a[4], a[5], a[6], a[7])); r = array(v.x, v.y, v.z, v.w);",
        |a, r| u128_of(&r) == u128_of(a).wrapping_mul(u128_of(&a[4..]))),
    ("arrow_less_i128", "r[0] = u32(arrow_less_i128(vec4(a[0], a[1], a[2], a[3]), vec4(a[4], a[5], a[6], a[7])));",
        |a, r| r[0] == u32::from((u128_of(a) as i128) < (u128_of(&a[4..]) as i128))),
    ("arrow_f64_to_f32", "r[0] = bitcast<u32>(arrow_f64_to_f32(vec2(a[0], a[1])));",
        |a, r| {
        let value = f64::from_bits(u64_of(a)) as f32;
        match value.is_nan() {
            true => f32::from_bits(r[0]).is_nan(),
            // The smallest normal number is what some values below it are rounded to.
            false => is_or_flushed(r[0], value) || (value == f32::MIN_POSITIVE && r[0] == 0),
        }
    }),
    ("arrow_f64", "let v = arrow_f64(bitcast<f32>(a[0])); r[0] = v.x; r[1] = v.y;",
        |a, r| {
        let (value, got) = (f32::from_bits(a[0]), u64_of(&r));
        match value.is_nan() || value.is_subnormal() {
            true => f64::from_bits(got).is_nan() == value.is_nan(),
            false => got == f64::from(value).to_bits(),
        }
    }),
];

fn inputs(random: &mut Random) -> Vec<Words> {
    let words = |_| {
        let mut words: Words = std::array::from_fn(|_| word(random));
        match random.below(8) {
            // Equal parts, which comparisons depend on.
            0 => words.copy_within(..2, 2),
            1 => words[3] = words[1],
            2 => words.copy_within(..4, 4),
            3 => words.copy_within(2..4, 6),
            // A 64-bit float near a 32-bit one, or near the middle between two.
            4 | 5 => {
                const NEAR: [i64; 6] = [-1, 0, 1, 1 << 28, (1 << 28) - 1, (1 << 28) + 1];
                let near = f64::from(f32::from_bits(words[0])).to_bits();
                let near = near.wrapping_add_signed(NEAR[(words[2] % 6) as usize]);
                words[..2].copy_from_slice(&[near as u32, (near >> 32) as u32]);
            }
            _ => {}
        }
        words
    };
    (0..INPUTS).map(words).collect()
}

/// Runs a case's lines on all inputs.
fn run(input: &DeviceArray, queue: &Queue, lines: &str) -> Vec<[u32; OUTPUT]> {
    let text = format!(
        "struct Inputs {{ count: u32 }}
        @group(0) @binding(0) var<uniform> inputs: Inputs;
        @group(0) @binding(1) var<storage, read> input: array<array<u32, {INPUT}>>;
        @group(0) @binding(2) var<storage, read_write> output: array<array<u32, {OUTPUT}>>;
        @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
            if id.x >= inputs.count {{ return; }}
            var a = input[id.x];
            var r = array<u32, {OUTPUT}>();
            {lines}
            output[id.x] = r;
        }}"
    );
    let gpu = WgpuDevice::of(queue.device()).unwrap();
    let output = DeviceBufferMut::for_values::<u32>(queue, OUTPUT * INPUTS).unwrap();
    let input = input.values_on::<u32>(queue).unwrap();
    // SAFETY: the shader reads the input and writes the output, and is submitted below.
    let memory = unsafe { [gpu.bind(&input).unwrap(), gpu.bind(&output).unwrap()] };
    assert!(memory.iter().all(|memory| memory.skip() == 0));
    let [input, output_at] = &memory;
    let shader = pipeline(gpu.device(), &[ARROW_WGSL, &text]);
    run_shader(
        gpu,
        &shader,
        &[INPUTS as u32],
        &[input, output_at],
        INPUTS.div_ceil(64),
    );
    let output = output.freeze().unwrap().to_host().unwrap();
    let words = output.typed_data::<u32>().chunks(OUTPUT);
    words.map(|r| r.try_into().unwrap()).collect()
}

#[test]
fn every_function_computes_what_rust_computes() {
    let Some(device) = crate::rigs::try_open() else {
        return;
    };
    let inputs = inputs(&mut Random(20));
    let words = UInt32Array::from_iter_values(inputs.iter().copied().flatten());
    let input = device.upload_array(&words).unwrap();
    for (name, lines, holds) in CASES {
        let results = run(&input, &device.default_queue(), lines);
        for (input, result) in inputs.iter().zip(results) {
            assert!(holds(input, result), "{name}: {input:x?} gives {result:x?}");
        }
    }
}

/// A function that is added has a case, too, and each case calls its function.
#[test]
fn every_function_has_a_case() {
    let named = ARROW_WGSL
        .lines()
        .filter_map(|line| line.strip_prefix("fn "));
    let named: HashSet<&str> = named.filter_map(|rest| rest.split('(').next()).collect();
    let cases: HashSet<&str> = CASES.iter().map(|(name, ..)| *name).collect();
    assert_eq!(named, cases);
    let calls = |(name, lines, _): &Case| lines.contains(&format!("{name}("));
    assert!(CASES.iter().all(calls));
}
