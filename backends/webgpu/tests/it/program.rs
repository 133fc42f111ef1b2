//! What a program does with a device's wgpu, and what it is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_array::Int32Array;
use arrow_device::Device;
use arrow_device_wgpu::wgpu::{self, BufferUsages};
use arrow_device_wgpu::{Binding, WgpuDevice};

use crate::shader::{pipeline, run};

pub(crate) fn numbers(range: std::ops::Range<i32>) -> Int32Array {
    Int32Array::from_iter_values(range)
}

pub(crate) fn gpu(device: &Device) -> &WgpuDevice {
    WgpuDevice::of(device).unwrap()
}

/// A buffer of the program's with these numbers, which `write_buffer` has been given and no submission has written yet.
pub(crate) fn own_buffer(device: &Device, usage: BufferUsages, numbers: &[i32]) -> wgpu::Buffer {
    let buffer = gpu(device).device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4 * numbers.len() as u64,
        usage: usage | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    write(device, &buffer, 0, numbers);
    buffer
}

pub(crate) fn write(device: &Device, buffer: &wgpu::Buffer, offset: u64, numbers: &[i32]) {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
    gpu(device).queue().write_buffer(buffer, offset, &bytes);
}

/// Reads a buffer as a program does that knows wgpu only.
pub(crate) fn read(device: &Device, buffer: &wgpu::Buffer) -> Vec<i32> {
    let (device, queue) = (gpu(device).device(), gpu(device).queue());
    let copy = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: buffer.size(),
        usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = device.create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(buffer, 0, &copy, 0, buffer.size());
    queue.submit([encoder.finish()]);
    copy.map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let view = copy.get_mapped_range(..).unwrap();
    let words = view
        .chunks(4)
        .map(|word| i32::from_ne_bytes(word.try_into().unwrap()));
    words.collect()
}

/// Counts its drops.
pub(crate) struct Keep(Arc<AtomicUsize>);

impl Drop for Keep {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

pub(crate) fn keep() -> (Keep, impl Fn() -> usize) {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = count.clone();
    (Keep(count), move || seen.load(Ordering::SeqCst))
}

/// Adds a number to each of 32-bit integers, in place.
pub(crate) const ADD: &str = "
    struct Numbers { rows: u32, first: u32, add: u32 }
    @group(0) @binding(0) var<uniform> n: Numbers;
    @group(0) @binding(1) var<storage, read_write> values: array<u32>;
    @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
        if id.x < n.rows { values[n.first + id.x] += n.add; }
    }";

pub(crate) fn add(device: &Device, memory: &Binding, rows: usize, add: u32) {
    let gpu = gpu(device);
    let shader = pipeline(gpu.device(), &[ADD]);
    run(
        gpu,
        &shader,
        &[rows as u32, memory.first::<u32>(), add],
        &[memory],
        rows.div_ceil(64),
    );
}
