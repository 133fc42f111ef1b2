//! Shaders over columns of many types, cut at any row, with nulls; their results frozen and read back.

use arrow_array::builder::{Int32Builder, ListBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::*;
use arrow_buffer::{ArrowNativeType, BooleanBuffer};
use arrow_device::{Device, DeviceArray, DeviceBufferMut, Loan, Queue, Validity};
use arrow_device_wgpu::{ARROW_NO_BITMAP, ARROW_WGSL, Bindable, Binding, WgpuDevice, wgpu};
use arrow_schema::DataType;

use crate::random::Random;
use crate::shader::{pipeline, run};

/// Returns a memory's binding.
fn bind(device: &Device, memory: &impl Bindable) -> Binding {
    // SAFETY: the tests' shaders read loans and write fresh memory, and are submitted while both are there.
    unsafe { WgpuDevice::of(device).unwrap().bind(memory) }.unwrap()
}

/// A shader with this body in a function of `row`, below `n.rows`, over `numbers` after the rows and these bindings.
fn compile(device: &Device, numbers: &str, bindings: &[&str], body: &str) -> wgpu::ComputePipeline {
    let bindings = bindings.iter().zip(1..).map(|(binding, i)| {
        let access = if binding.starts_with("out") {
            "read_write"
        } else {
            "read"
        };
        format!("@group(0) @binding({i}) var<storage, {access}> {binding};\n")
    });
    let text = format!(
        "struct Numbers {{ rows: u32, {numbers} }}
        @group(0) @binding(0) var<uniform> n: Numbers;
        {}
        @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
            let row = id.x;
            if row >= n.rows {{ return; }}
            {body}
        }}",
        bindings.collect::<String>()
    );
    pipeline(
        WgpuDevice::of(device).unwrap().device(),
        &[ARROW_WGSL, &text],
    )
}

fn launch(queue: &Queue, shader: &wgpu::ComputePipeline, numbers: &[u32], memory: &[&Binding]) {
    let gpu = WgpuDevice::of(queue.device()).unwrap();
    run(
        gpu,
        shader,
        numbers,
        memory,
        (numbers[0] as usize).div_ceil(64),
    );
}

/// Cuts at which addresses and bits begin anywhere: (offset, rows).
fn cuts(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut random = Random(rows as u64);
    let small = (0..70).map(|offset| (offset, 100));
    let others = (0..30).map(move |_| {
        let offset = random.below(rows);
        (offset, random.below(rows - offset + 1))
    });
    small.chain(others).chain([(0, rows), (rows, 0)])
}

const ROWS: usize = 3000;

/// Values of a type, some of them null, as words of 32 bits with their sign.
fn widens<T: ArrowPrimitiveType>(element: &str)
where
    T::Native: ArrowNativeType + TryFrom<i64> + Into<i64>,
{
    let Some(device) = crate::rigs::try_open() else {
        return;
    };
    let queue = device.default_queue();
    let random = &mut Random(1);
    let width = 8 * size_of::<T::Native>() as u32;
    let value = |_| {
        // The bits of a value of the type, signed or not.
        let bits = random.next() as i64;
        let signed = bits << (64 - width) >> (64 - width);
        let unsigned = signed & ((1 << width) - 1);
        let value = T::Native::try_from(signed)
            .or(T::Native::try_from(unsigned))
            .ok();
        value.filter(|_| random.below(4) > 0)
    };
    let array: PrimitiveArray<T> = (0..ROWS).map(value).collect();
    let on_device = device.upload_array(&array).unwrap();
    let body = format!("out[row] = {element};");
    let bindings = ["words: array<u32>", "out: array<i32>"];
    let shader = compile(&device, "skip: u32", &bindings, &body);
    for (offset, rows) in cuts(ROWS) {
        let column = on_device.slice(offset, rows).unwrap();
        let out = DeviceBufferMut::for_values::<i32>(&queue, rows).unwrap();
        let values = column.values_on::<T::Native>(&queue).unwrap();
        let (from, to) = (bind(&device, &values), bind(&device, &out));
        launch(&queue, &shader, &[rows as u32, from.skip()], &[&from, &to]);
        drop(values);
        let wide = column
            .with_values(DataType::Int32, out.freeze().unwrap())
            .unwrap();
        let cut = array.slice(offset, rows);
        let expected = cut
            .iter()
            .map(|value| value.map(|value| value.into() as i32));
        let expected: Int32Array = expected.collect();
        assert_eq!(
            wide.to_host().unwrap().as_ref(),
            &expected as &dyn Array,
            "{rows} rows at {offset}"
        );
    }
}

#[test]
fn bytes_signed() {
    widens::<Int8Type>("arrow_i8(words[(n.skip + row) / 4u], n.skip + row)");
}

#[test]
fn bytes_unsigned() {
    widens::<UInt8Type>("i32(arrow_u8(words[(n.skip + row) / 4u], n.skip + row))");
}

#[test]
fn halves_signed() {
    widens::<Int16Type>("arrow_i16(words[(n.skip / 2u + row) / 2u], n.skip / 2u + row)");
}

#[test]
fn halves_unsigned() {
    widens::<UInt16Type>("i32(arrow_u16(words[(n.skip / 2u + row) / 2u], n.skip / 2u + row))");
}

/// A kernel that writes bits: a word for each invocation.
#[test]
fn bitmaps() {
    let Some(device) = crate::rigs::try_open() else {
        return;
    };
    let queue = device.default_queue();
    let random = &mut Random(2);
    let bit = |_| (random.below(3) > 0).then(|| random.below(2) == 0);
    let nulls: BooleanArray = (0..ROWS).map(bit).collect();
    let none = BooleanArray::new(nulls.values().clone(), None);
    // Bit r is set if row r is true, and not null.
    let shader = compile(
        &device,
        "bits: u32, first: u32, first_valid: u32",
        &["values: array<u32>", "valid: array<u32>", "out: array<u32>"],
        "var word = 0u;
        for (var r = 32u * row; r < min(32u * row + 32u, n.bits); r++) {
            let bit = n.first_valid + r;
            let is_valid = n.first_valid == ARROW_NO_BITMAP || arrow_bit(valid[bit / 32u], bit);
            let at = n.first + r;
            word |= u32(is_valid && arrow_bit(values[at / 32u], at)) << (r & 31u);
        }
        out[row] = word;",
    );
    for array in [nulls, none] {
        let on_device = device.upload_array(&array).unwrap();
        for (offset, rows) in cuts(ROWS) {
            let column = on_device.slice(offset, rows).unwrap();
            let out = DeviceBufferMut::for_bitmap(&queue, rows).unwrap();
            let (values, valid) = (
                column.booleans_on(&queue).unwrap(),
                column.validity_on(&queue).unwrap(),
            );
            let (values_at, to) = (bind(&device, &values), bind(&device, &out));
            let valid_at = valid
                .as_ref()
                .map(|valid: &Loan<'_, bool>| bind(&device, valid));
            let first_valid = valid_at
                .as_ref()
                .map_or(ARROW_NO_BITMAP, Binding::first_bit);
            assert!(
                values_at.first_bit() < 8 * 4096,
                "the offset of a slice is not in the binding"
            );
            let numbers = [
                rows.div_ceil(32) as u32,
                rows as u32,
                values_at.first_bit(),
                first_valid,
            ];
            let valid_at = valid_at.as_ref().unwrap_or(&values_at);
            launch(&queue, &shader, &numbers, &[&values_at, valid_at, &to]);
            drop((values, valid));
            let bits = Validity::new(out.freeze().unwrap(), 0, rows).unwrap();
            // As the validity of a column, so that the bits are read by their number.
            let zeros = DeviceBufferMut::for_values::<i8>(&queue, rows).unwrap();
            let column =
                DeviceArray::from_values(DataType::Int8, rows, zeros.freeze().unwrap(), Some(bits));
            let got = column.unwrap().to_host().unwrap();
            let cut = array.slice(offset, rows);
            let expected: BooleanBuffer = cut.iter().map(|bit| bit == Some(true)).collect();
            let got: BooleanBuffer = (0..rows).map(|row| got.is_valid(row)).collect();
            assert_eq!(got, expected, "{rows} rows at {offset}");
        }
    }
}

/// What the shaders compute of a string: a hash of its words.
fn hash(text: &[u8]) -> u32 {
    let mut hash = text.len() as u32;
    for word in text.chunks(4) {
        let mut bytes = [0; 4];
        bytes[..word.len()].copy_from_slice(word);
        hash = hash
            .wrapping_mul(31)
            .wrapping_add(u32::from_le_bytes(bytes));
    }
    hash
}

fn strings<O: OffsetSizeTrait>(range: &str) {
    let Some(device) = crate::rigs::try_open() else {
        return;
    };
    let queue = device.default_queue();
    let random = &mut Random(3);
    let text = |_| {
        let length = [0, 1, 3, 4, 5, 17, 64][random.below(7)];
        (random.below(5) > 0).then(|| {
            "a\u{e4}bcdefg\u{20ac}hij"
                .chars()
                .cycle()
                .skip(random.below(12))
                .take(length)
                .collect::<String>()
        })
    };
    let array: GenericStringArray<O> = (0..ROWS).map(text).collect();
    let on_device = device.upload_array(&array).unwrap();
    let shader = compile(
        &device,
        "first: u32, skip: u32",
        &["offsets: array<u32>", "bytes: array<u32>", "out: array<u32>"],
        &format!(
            "{range}
            var hash = end - start;
            for (var i = start; i < end; i += 4u) {{
                let at = n.skip + i;
                // The word after the last one may be beyond the binding: nothing of it is used then.
                let next = min(at / 4u + 1u, arrayLength(&bytes) - 1u);
                let word = arrow_unaligned(bytes[at / 4u], bytes[next], at);
                hash = hash * 31u + arrow_first_bytes(word, end - i);
            }}
            out[row] = hash;"
        ),
    );
    for (offset, rows) in cuts(ROWS) {
        let column = on_device.slice(offset, rows).unwrap();
        let out = DeviceBufferMut::for_values::<u32>(&queue, rows).unwrap();
        let (offsets, bytes) = (
            column.offsets_on::<O>(&queue).unwrap(),
            column.bytes_on(&queue).unwrap(),
        );
        let memory = [
            bind(&device, &offsets),
            bind(&device, &bytes),
            bind(&device, &out),
        ];
        let numbers = [rows as u32, memory[0].first::<O>(), memory[1].skip()];
        launch(&queue, &shader, &numbers, &memory.each_ref());
        drop((offsets, bytes));
        let hashes = column
            .with_values(DataType::UInt32, out.freeze().unwrap())
            .unwrap();
        let cut = array.slice(offset, rows);
        let expected: UInt32Array = cut
            .iter()
            .map(|text| text.map(|text| hash(text.as_bytes())))
            .collect();
        assert_eq!(
            hashes.to_host().unwrap().as_ref(),
            &expected as &dyn Array,
            "{rows} rows at {offset}"
        );
    }
}

#[test]
fn strings_with_offsets_of_32_bits() {
    strings::<i32>("let start = offsets[n.first + row]; let end = offsets[n.first + row + 1u];");
}

#[test]
fn strings_with_offsets_of_64_bits() {
    strings::<i64>(
        "let at = 2u * (n.first + row);
        let start = arrow_offset(vec2(offsets[at], offsets[at + 1u]), vec2(0u, 0u));
        let end = arrow_offset(vec2(offsets[at + 2u], offsets[at + 3u]), vec2(0u, 0u));",
    );
}

/// Sums of lists, in 64 bits, whose elements may be null.
#[test]
fn lists() {
    let Some(device) = crate::rigs::try_open() else {
        return;
    };
    let queue = device.default_queue();
    let random = &mut Random(4);
    let mut lists = ListBuilder::new(Int32Builder::new());
    for _ in 0..ROWS {
        for _ in 0..random.below(6) {
            let value = random.next() as i32;
            lists
                .values()
                .append_option((value % 4 != 0).then_some(value));
        }
        lists.append(random.below(5) > 0);
    }
    let array = lists.finish();
    let on_device = device.upload_array(&array).unwrap();
    let shader = compile(
        &device,
        "first: u32, child: u32, first_valid: u32",
        &["offsets: array<u32>", "child: array<i32>", "valid: array<u32>", "out: array<vec2<u32>>"],
        "var sum = vec2<u32>();
        for (var i = offsets[n.first + row]; i < offsets[n.first + row + 1u]; i++) {
            let bit = n.first_valid + i;
            if arrow_bit(valid[bit / 32u], bit) { sum = arrow_add64(sum, arrow_i64(child[n.child + i])); }
        }
        out[row] = sum;",
    );
    for (offset, rows) in cuts(ROWS) {
        let column = on_device.slice(offset, rows).unwrap();
        let elements = column.child(0).unwrap();
        let out = DeviceBufferMut::for_values::<i64>(&queue, rows).unwrap();
        let offsets = column.offsets_on::<i32>(&queue).unwrap();
        let values = elements.values_on::<i32>(&queue).unwrap();
        let valid = elements.validity_on(&queue).unwrap().unwrap();
        let memory = [
            bind(&device, &offsets),
            bind(&device, &values),
            bind(&device, &valid),
            bind(&device, &out),
        ];
        let numbers = [
            rows as u32,
            memory[0].first::<i32>(),
            memory[1].first::<i32>(),
            memory[2].first_bit(),
        ];
        launch(&queue, &shader, &numbers, &memory.each_ref());
        drop((offsets, values, valid));
        let sums = column
            .with_values(DataType::Int64, out.freeze().unwrap())
            .unwrap();
        let sum = |list: ArrayRef| {
            list.as_primitive::<Int32Type>()
                .iter()
                .flatten()
                .map(i64::from)
                .sum::<i64>()
        };
        let expected: Int64Array = array
            .slice(offset, rows)
            .iter()
            .map(|list| list.map(sum))
            .collect();
        assert_eq!(
            sums.to_host().unwrap().as_ref(),
            &expected as &dyn Array,
            "{rows} rows at {offset}"
        );
    }
}
