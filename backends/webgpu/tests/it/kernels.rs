//! A shader over a column that is cut at any row, with nulls; its results frozen and read back.

use arrow_array::*;
use arrow_buffer::BooleanBuffer;
use arrow_device::{Device, DeviceArray, DeviceBufferMut, Loan, Validity};
use arrow_device_wgpu::{ARROW_NO_BITMAP, ARROW_WGSL, Bindable, Binding, WgpuDevice};
use arrow_schema::DataType;

use crate::random::Random;
use crate::shader::{pipeline, run};

/// Returns a memory's binding.
fn bind(device: &Device, memory: &impl Bindable) -> Binding {
    // SAFETY: the test's shader reads loans and writes fresh memory, and is submitted while both are there.
    unsafe { WgpuDevice::of(device).unwrap().bind(memory) }.unwrap()
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
    const SHADER: &str = "
        struct Numbers { rows: u32, first: u32, first_valid: u32 }
        @group(0) @binding(0) var<uniform> n: Numbers;
        @group(0) @binding(1) var<storage, read> values: array<u32>;
        @group(0) @binding(2) var<storage, read> valid: array<u32>;
        @group(0) @binding(3) var<storage, read_write> out: array<u32>;
        @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if 32u * id.x >= n.rows { return; }
            var word = 0u;
            for (var r = 32u * id.x; r < min(32u * id.x + 32u, n.rows); r++) {
                let bit = n.first_valid + r;
                let is_valid = n.first_valid == ARROW_NO_BITMAP || arrow_bit(valid[bit / 32u], bit);
                let at = n.first + r;
                word |= u32(is_valid && arrow_bit(values[at / 32u], at)) << (r & 31u);
            }
            out[id.x] = word;
        }";
    let gpu = WgpuDevice::of(&device).unwrap();
    let shader = pipeline(gpu.device(), &[ARROW_WGSL, SHADER]);
    for array in [nulls, none] {
        let on_device = device.upload_array(&array).unwrap();
        for (offset, rows) in cuts(ROWS) {
            let column = on_device.slice(offset, rows).unwrap();
            let out = DeviceBufferMut::allocate(&queue, rows.div_ceil(8)).unwrap();
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
            let numbers = [rows as u32, values_at.first_bit(), first_valid];
            let valid_at = valid_at.as_ref().unwrap_or(&values_at);
            let memory = [&values_at, valid_at, &to];
            run(gpu, &shader, &numbers, &memory, rows.div_ceil(32 * 64));
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
