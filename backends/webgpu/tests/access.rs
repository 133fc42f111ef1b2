//! Bindings, the buffers behind addresses, and buffers in and out without a copy.
#![cfg(not(miri))]

#[path = "../examples/column_math/shader.rs"]
mod shader;
#[path = "support/webgpu.rs"]
mod webgpu;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_array::cast::AsArray;
use arrow_array::types::Int32Type;
use arrow_array::{Array, Int8Array, Int32Array, Int64Array};
use arrow_device::device::DevicePtr;
use arrow_device::{Device, DeviceArray, DeviceBuffer, DeviceBufferMut, Devices, Error, Queue};
use arrow_device_wgpu::wgpu::{self, BufferUsages};
use arrow_device_wgpu::{Binding, Place, WgpuDevice, adopt};
use arrow_schema::DataType;

use shader::{pipeline, run};
use webgpu::{
    assert_clean, assert_error, config, hold, now, open_with, own_device, soon, try_open,
};

fn gpu(device: &Device) -> &WgpuDevice {
    WgpuDevice::of(device).unwrap()
}

fn numbers(range: std::ops::Range<i32>) -> Int32Array {
    Int32Array::from_iter_values(range)
}

/// A buffer of the program's with these numbers, which `write_buffer` has been given and no submission has written yet.
fn own_buffer(device: &Device, usage: BufferUsages, numbers: &[i32]) -> wgpu::Buffer {
    let buffer = gpu(device).device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4 * numbers.len() as u64,
        usage: usage | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    write(device, &buffer, 0, numbers);
    buffer
}

fn write(device: &Device, buffer: &wgpu::Buffer, offset: u64, numbers: &[i32]) {
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
    gpu(device).queue().write_buffer(buffer, offset, &bytes);
}

/// Reads a buffer as a program does that knows wgpu only.
fn read(device: &Device, buffer: &wgpu::Buffer) -> Vec<i32> {
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
struct Keep(Arc<AtomicUsize>);

impl Drop for Keep {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn keep() -> (Keep, impl Fn() -> usize) {
    let count = Arc::new(AtomicUsize::new(0));
    let seen = count.clone();
    (Keep(count), move || seen.load(Ordering::SeqCst))
}

/// Adds a number to each of 32-bit integers, in place.
const ADD: &str = "
    struct Numbers { rows: u32, first: u32, add: u32 }
    @group(0) @binding(0) var<uniform> n: Numbers;
    @group(0) @binding(1) var<storage, read_write> values: array<u32>;
    @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
        if id.x < n.rows { values[n.first + id.x] += n.add; }
    }";

fn add(device: &Device, memory: &Binding, rows: usize, add: u32) {
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

#[test]
fn bindings_begin_and_end_where_wgpu_allows() {
    let Some(device) = try_open() else { return };
    let (gpu, queue) = (gpu(&device), device.default_queue());
    let align = gpu.device().limits().min_storage_buffer_offset_alignment;
    let values = Int8Array::from_iter((0..1000).map(|i| (i % 3 > 0).then_some(i as i8)));
    let column = device.upload_array(&values).unwrap();
    let whole = column.buffer(1).unwrap();
    for offset in 0..300 {
        let slice = column.slice(offset, 500).unwrap();
        let values = slice.values_on::<i8>(&queue).unwrap();
        // SAFETY: nothing is submitted.
        let (place, bound) = unsafe {
            (
                gpu.resolve(values.address(), 500).unwrap(),
                gpu.bind(&values).unwrap(),
            )
        };
        let binding = bound.binding();
        assert_eq!(
            (bound.place().offset, bound.place().bytes),
            (place.offset, 500)
        );
        assert_eq!(binding.offset + u64::from(bound.skip()), place.offset);
        assert_eq!(binding.offset % u64::from(align), 0);
        assert!(bound.skip() < align && bound.first::<i8>() == bound.skip());
        let size = binding.size.unwrap().get();
        assert!(size % 4 == 0 && size - u64::from(bound.skip()) - 500 < 4);

        let bits = slice.validity_on(&queue).unwrap().unwrap();
        // SAFETY: nothing is submitted.
        let bound = unsafe { gpu.bind(&bits) }.unwrap();
        assert_eq!(bound.first_bit() % 8, bits.bit_offset() as u32 % 8);
        let bytes = (bits.bit_offset() % 8 + 500).div_ceil(8);
        assert_eq!(bound.place().bytes, bytes as u64);
    }
    // A buffer's loan, and the last bytes of it.
    let loan = whole.on(&queue).unwrap();
    // SAFETY: nothing is submitted.
    let bound = unsafe { gpu.bind(&loan) }.unwrap();
    assert_eq!(bound.place().bytes, whole.len() as u64);
    let last = whole.slice(whole.len() - 1, 1).unwrap();
    // SAFETY: as above.
    let bound = unsafe { gpu.bind(&last.on(&queue).unwrap()) }.unwrap();
    assert_eq!(bound.place().bytes, 1);
}

#[test]
fn nothing_is_bound_as_zeros() {
    let Some(device) = try_open() else { return };
    let (gpu, queue) = (gpu(&device), device.default_queue());
    let column = device
        .upload_array(&numbers(0..10))
        .unwrap()
        .slice(4, 0)
        .unwrap();
    let values = column.values_on::<i32>(&queue).unwrap();
    let fresh = DeviceBufferMut::allocate(&queue, 0).unwrap();
    // SAFETY: what is written is not the memory of a loan.
    let bound = unsafe { [gpu.bind(&values).unwrap(), gpu.bind(&fresh).unwrap()] };
    for bound in &bound {
        assert_eq!(
            (
                bound.skip(),
                bound.first_bit(),
                bound.binding().size.unwrap().get()
            ),
            (0, 0, 256)
        );
        assert_eq!(read(&device, &bound.place().buffer), [0; 64]);
        add(&device, bound, 64, 7);
    }
    // What one shader writes there, no other sees.
    // SAFETY: as above.
    let bound = unsafe { gpu.bind(&values) }.unwrap();
    assert_eq!(read(&device, &bound.place().buffer), [0; 64]);
    assert!(fresh.freeze().unwrap().is_empty());
}

#[test]
fn what_is_not_memory_is_refused() {
    let (Some(device), Some(other)) = (try_open(), try_open()) else {
        return;
    };
    let (gpu, queue) = (gpu(&device), device.default_queue());
    let memory = DeviceBufferMut::allocate(&queue, 100).unwrap();
    let address = memory.address();
    // SAFETY: no buffer is used.
    let resolve = |address: DevicePtr, bytes| unsafe { gpu.resolve(address, bytes) };
    assert_eq!(resolve(address, memory.capacity()).unwrap().bytes, 128);
    assert_eq!(resolve(address.offset(100), 28).unwrap().offset, 100);
    for (address, bytes) in [
        (address, 0),
        (address, 129),
        (address.offset(100), 29),
        (address.offset(128), 1),
        (address, usize::MAX),
        (DevicePtr::NULL, 4),
        (DevicePtr::new((&raw const queue).cast_mut().cast()), 4),
    ] {
        assert_error(resolve(address, bytes), "are not memory of webgpu:");
        // SAFETY: as above.
        let parts = unsafe { gpu.resolve_parts(address, bytes, 1 << 20) };
        match bytes {
            0 => assert!(parts.unwrap().is_empty()),
            _ => assert_error(parts, "are not memory of webgpu:"),
        }
    }
    // SAFETY: as above.
    assert_error(
        unsafe { gpu.resolve_parts(address, 4, 0) },
        "parts of 0 bytes",
    );
    let foreign = DeviceBufferMut::allocate(&other.default_queue(), 100).unwrap();
    // SAFETY: as above.
    assert_error(unsafe { gpu.bind(&foreign) }, "are not memory of webgpu:");
    drop(memory);
    assert_error(resolve(address, 4), "are not memory of webgpu:");
}

/// Binds each part and adds a number to it.
fn add_to_parts(device: &Device, parts: &[Place]) {
    for part in parts {
        let bound = gpu(device).binding(part.clone()).unwrap();
        add(device, &bound, part.bytes as usize / 4, 5);
    }
}

#[test]
fn memory_in_several_buffers_is_bound_in_parts() {
    let Some(device) = open_with(|limits| {
        limits.max_buffer_size = 1 << 20;
        limits.max_storage_buffer_binding_size = 1 << 19;
    }) else {
        return;
    };
    let (gpu, queue) = (gpu(&device), device.default_queue());
    let rows = 900_001;
    let mut memory = DeviceBufferMut::for_values::<i32>(&queue, rows).unwrap();
    memory.fill(0).unwrap();
    let (address, bytes) = (memory.address(), memory.len());
    // SAFETY: the shaders write memory that nothing else uses, and are submitted before it is frozen.
    unsafe {
        assert_error(gpu.bind(&memory), "use resolve_parts");
        assert_error(gpu.resolve(address, bytes), "several wgpu::Buffers");
        assert_error(
            gpu.resolve(address.offset((1 << 20) - 2), 4),
            "several wgpu::Buffers",
        );
        let one = gpu.resolve(address.offset((1 << 20) - 4), 4).unwrap();
        let next = gpu.resolve(address.offset(1 << 20), 4).unwrap();
        assert_eq!((one.offset, next.offset), ((1 << 20) - 4, 0));
        assert!(one.buffer != next.buffer);

        // As long as a binding may be, and from the middle of one.
        let most = (1 << 19) - 256;
        for from in [0, 4, 1000, (1 << 20) - 4] {
            let parts = gpu
                .resolve_parts(address.offset(from), bytes - from, most)
                .unwrap();
            assert!(parts.iter().all(|part| part.bytes <= most));
            assert_eq!(
                parts.iter().map(|part| part.bytes).sum::<u64>() as usize,
                bytes - from
            );
            add_to_parts(&device, &parts);
        }
        // One buffer, too long for a binding.
        let whole = gpu.resolve(address, 1 << 20).unwrap();
        assert_error(gpu.binding(whole), "max_storage_buffer_binding_size");
    }
    let buffer = memory.freeze().unwrap();
    let (_, error) = gpu.take(buffer.clone()).unwrap_err();
    assert!(error.to_string().contains("in 4 wgpu::Buffers"), "{error}");
    let got = buffer.to_host().unwrap();
    let expected = (0..rows).map(|row| {
        5 * (1 + (row > 0) as i32 + (row >= 250) as i32 + (row >= (1 << 18) - 1) as i32)
    });
    assert!(got.typed_data::<i32>().iter().copied().eq(expected));
}

#[test]
fn a_programs_buffer_becomes_a_column() {
    let Some(device) = try_open() else { return };
    let queue = device.default_queue();
    let values: Vec<i32> = (0..1000).collect();
    // Written by no submission yet: it comes before ours all the same.
    let buffer = own_buffer(
        &device,
        BufferUsages::COPY_SRC | BufferUsages::STORAGE,
        &values,
    );
    let (kept, drops) = keep();
    // SAFETY: the buffer is of the device, and not written to any more.
    let wrapped = unsafe { WgpuDevice::wrap(&device, buffer.clone(), kept) }.unwrap();
    assert_eq!((wrapped.len(), wrapped.device()), (4000, &device));
    let column = DeviceArray::from_values(DataType::Int32, 1000, wrapped, None).unwrap();
    let before = device.stats();
    let slice = column.slice(10, 500).unwrap();
    assert_eq!(
        slice.to_host().unwrap().as_ref(),
        &numbers(10..510) as &dyn Array
    );
    assert_eq!(device.stats().since(&before).bytes_to_host, 2000);

    // The buffer itself is what kernels get.
    let loan = slice.values_on::<i32>(&queue).unwrap();
    // SAFETY: nothing is submitted.
    let place = unsafe { gpu(&device).resolve(loan.address(), 2000) }.unwrap();
    assert!(place.buffer == buffer && place.offset == 40);
    drop(loan);
    // Columns of it go into batches, and are copied on the device.
    let joined = DeviceArray::concat(&[&slice, &column]).unwrap();
    assert_eq!(
        joined
            .slice(499, 2)
            .unwrap()
            .to_host()
            .unwrap()
            .as_primitive::<Int32Type>()
            .values(),
        &[509, 0]
    );
    // It is not the crate's to hand out.
    let (_, error) = gpu(&device).take(column.buffer(1).unwrap()).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)), "{error}");

    drop((joined, column));
    assert_eq!(drops(), 0);
    drop(slice);
    assert!(soon(|| drops() == 1));
    assert_clean(&device);
    assert_eq!(drops(), 1);
    // The program's buffer is as before.
    assert_eq!(read(&device, &buffer), values);
}

/// What the program keeps for a buffer lives until the work with it has ended.
#[test]
fn what_is_kept_outlives_the_work() {
    let Some(device) = try_open() else { return };
    let buffer = own_buffer(&device, BufferUsages::COPY_SRC, &[1, 2, 3]);
    let (kept, drops) = keep();
    // SAFETY: the buffer is of the device, and not written to any more.
    let wrapped = unsafe { WgpuDevice::wrap(&device, buffer, kept) }.unwrap();
    let column = DeviceArray::from_values(DataType::Int32, 3, wrapped, None).unwrap();
    let held = hold(&device.default_queue());
    let download = column.start_to_host().unwrap();
    drop(column);
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(drops(), 0, "the copy has not run");
    drop(held);
    assert_eq!(
        download
            .wait()
            .unwrap()
            .as_primitive::<Int32Type>()
            .values(),
        &[1, 2, 3]
    );
    assert!(soon(|| drops() == 1));
    assert_clean(&device);
    assert_eq!(drops(), 1);
}

#[test]
fn buffers_that_are_refused() {
    let Some(device) = try_open() else { return };
    let gpu = gpu(&device);
    let create = |size, usage| {
        gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage,
            mapped_at_creation: false,
        })
    };
    let refused = |device: &Device, buffer: wgpu::Buffer, text: &str| {
        let (kept, drops) = keep();
        // SAFETY: the buffer is of the device, or wgpu tells that it is not; nobody writes to it.
        assert_error(unsafe { WgpuDevice::wrap(device, buffer, kept) }, text);
        assert_eq!(drops(), 1);
    };
    refused(
        &device,
        create(8, BufferUsages::STORAGE),
        "without the usage COPY_SRC",
    );
    refused(
        &device,
        create(0, BufferUsages::COPY_SRC),
        "at least 4 bytes",
    );
    refused(
        &device,
        create(6, BufferUsages::COPY_SRC),
        "a multiple of 4",
    );
    refused(
        &Devices::cpu(),
        create(8, BufferUsages::COPY_SRC),
        "is not a WebGPU device",
    );
    assert_clean(&device);

    // Without STORAGE it is a column, for all but shaders.
    // SAFETY: as above.
    let plain =
        unsafe { WgpuDevice::wrap(&device, create(8, BufferUsages::COPY_SRC), ()) }.unwrap();
    let queue = device.default_queue();
    // SAFETY: nothing is submitted.
    assert_error(
        unsafe { gpu.bind(&plain.on(&queue).unwrap()) },
        "without the usage STORAGE",
    );
    assert_eq!(plain.to_host().unwrap().as_slice(), [0; 8]);
}

/// A buffer of another `wgpu::Device` of the same adapter.
#[test]
fn another_devices_buffer_is_refused() {
    let instance = wgpu::Instance::default();
    let Ok(adapter) = now(instance.request_adapter(&Default::default())) else {
        return;
    };
    let [one, other] = [(); 2].map(|()| now(adapter.request_device(&Default::default())).unwrap());
    let device = adopt(&one.0, &one.1, &config()).unwrap();
    let buffer = other.0.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 8,
        usage: BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    // SAFETY: wgpu tells that the buffer is not of the device.
    assert_error(
        unsafe { WgpuDevice::wrap(&device, buffer, ()) },
        "of no use to this device",
    );
}

#[test]
fn a_columns_buffer_becomes_the_programs() {
    let Some(device) = try_open() else { return };
    let (gpu, queue) = (gpu(&device), device.default_queue());
    let memory = DeviceBufferMut::for_values::<i32>(&queue, 1000).unwrap();
    // SAFETY: the shader writes memory that nothing else uses, and is submitted before it is frozen.
    let bound = unsafe { gpu.bind(&memory) }.unwrap();
    write(
        &device,
        &bound.place().buffer,
        bound.place().offset,
        &[3; 1000],
    );
    add(&device, &bound, 1000, 4);
    let (taken, bytes) = gpu
        .take(memory.freeze().unwrap())
        .map_err(|(_, e)| e)
        .unwrap();
    assert!(bytes == 4000 && taken.size() >= 4000);
    assert!(
        taken
            .usage()
            .contains(BufferUsages::STORAGE | BufferUsages::COPY_SRC)
    );
    assert_eq!(gpu.in_use().0, 0, "the device knows it no more");
    // Nor does it reuse the buffer.
    for _ in 0..4 {
        let mut other = DeviceBufferMut::for_values::<i32>(&queue, 1000).unwrap();
        other.fill(9).unwrap();
        drop(other);
    }
    assert_eq!(read(&device, &taken)[..1000], [7; 1000]);
    // And in again.
    // SAFETY: the buffer is of the device, and not written to any more.
    let again = unsafe { WgpuDevice::wrap(&device, taken, ()) }
        .unwrap()
        .slice(0, 4000)
        .unwrap();
    assert_eq!(again.to_host().unwrap().typed_data::<i32>(), [7; 1000]);
    drop(again);
    assert_clean(&device);
}

#[test]
fn what_is_not_a_whole_allocation_is_not_taken() {
    let (Some(device), Some(other)) = (try_open(), try_open()) else {
        return;
    };
    let gpu = gpu(&device);
    let fresh = |queue: &Queue| {
        let mut memory = DeviceBufferMut::for_values::<i32>(queue, 100).unwrap();
        memory.fill(1).unwrap();
        memory.freeze().unwrap()
    };
    let buffer = fresh(&device.default_queue());
    let refused = |buffer: DeviceBuffer, text: &str| {
        let (address, len) = (buffer.address(), buffer.len());
        let (back, error) = gpu.take(buffer).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!((back.address(), back.len()), (address, len));
    };
    refused(buffer.clone(), "shared with other buffers");
    refused(buffer.slice(0, 200).unwrap(), "shared with other buffers");
    let part = |whole: DeviceBuffer| whole.slice(64, 200).unwrap();
    refused(part(fresh(&device.default_queue())), "not all of an allocation");
    refused(fresh(&other.default_queue()), "is not memory of webgpu:");
    refused(
        DeviceBuffer::from(arrow_buffer::Buffer::from_vec(vec![1i32])),
        "is not memory of webgpu:",
    );
    refused(
        device
            .upload_array(&numbers(0..9))
            .unwrap()
            .buffer(1)
            .unwrap(),
        "",
    );
    // It is there as before, and can be taken once it is alone.
    assert_eq!(buffer.to_host().unwrap().as_slice(), [1; 400]);
    gpu.take(buffer).map_err(|(_, e)| e).unwrap();
    assert_clean(&device);
    assert_clean(&other);
}

/// Our work and the program's, in the order in which they were submitted; `write_buffer` counts from the next submission on, whoever
/// makes it.
#[test]
fn one_order() {
    let Some(device) = try_open() else { return };
    let (gpu, queue) = (gpu(&device), device.default_queue());
    let mut memory = DeviceBufferMut::for_values::<i32>(&queue, 64).unwrap();
    // SAFETY: all work writes memory that nothing else uses, and is submitted before it is frozen.
    let bound = unsafe { gpu.bind(&memory) }.unwrap();
    let place = bound.place().clone();
    memory.fill(0).unwrap();
    for _ in 0..20 {
        add(&device, &bound, 64, 1); // 1
        write(&device, &place.buffer, place.offset, &[10; 64]); // with the next submission
        add(&device, &bound, 64, 1); // 11
        write(&device, &place.buffer, place.offset + 4, &[100; 63]);
        memory.fill(0).unwrap(); // submits what was written, and then fills
        add(&device, &bound, 32, 2);
    }
    write(&device, &place.buffer, place.offset + 4 * 63, &[7]); // with the copy to the host
    let values = memory.freeze().unwrap().to_host().unwrap();
    let mut expected = [[2; 32], [0; 32]].concat();
    expected[63] = 7;
    assert_eq!(values.typed_data::<i32>(), expected);
}

/// Nothing waits where work is only put in order.
#[test]
fn a_kernel_after_an_upload_waits_for_nothing() {
    let Some(device) = try_open() else { return };
    let (gpu, queue) = (gpu(&device), device.new_queue().unwrap());
    let held = hold(&queue);
    let column = device
        .upload_array(&Int64Array::from_iter_values(0..100))
        .unwrap();
    let memory = DeviceBufferMut::for_values::<i32>(&queue, 100).unwrap();
    let waits = device.stats().host_waits;
    let values = column.values_on::<i64>(&queue).unwrap();
    // SAFETY: the shader writes memory that nothing else uses, and is submitted before it is frozen.
    let (from, to) = unsafe { (gpu.bind(&values).unwrap(), gpu.bind(&memory).unwrap()) };
    let shader = pipeline(
        gpu.device(),
        &["
            struct Numbers { first: u32, low: u32 }
            @group(0) @binding(0) var<uniform> n: Numbers;
            @group(0) @binding(1) var<storage, read> values: array<vec2<u32>>;
            @group(0) @binding(2) var<storage, read_write> low: array<u32>;
            @compute @workgroup_size(100) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
                low[n.low + id.x] = values[n.first + id.x].x;
            }"],
    );
    run(
        gpu,
        &shader,
        &[from.first::<i64>(), to.first::<i32>()],
        &[&from, &to],
        1,
    );
    drop(values);
    drop(column);
    let result = memory.freeze().unwrap();
    assert_eq!(device.stats().host_waits, waits);
    drop(held);
    let expected: Vec<i32> = (0..100).collect();
    assert_eq!(result.to_host().unwrap().typed_data::<i32>(), expected);
}

#[test]
fn a_destroyed_device_refuses() {
    let Some((own, queue)) = own_device(|_| {}) else {
        return;
    };
    let device = adopt(&own, &queue, &config()).unwrap();
    let gpu = gpu(&device);
    let memory = DeviceBufferMut::for_values::<i32>(&device.default_queue(), 10).unwrap();
    let frozen = DeviceBufferMut::for_values::<i32>(&device.default_queue(), 10)
        .unwrap()
        .freeze()
        .unwrap();
    let buffer = || own_buffer(&device, BufferUsages::COPY_SRC, &[1, 2]);
    let (kept, drops) = keep();
    // SAFETY: the buffer is of the device, and not written to any more.
    let wrapped = unsafe { WgpuDevice::wrap(&device, buffer(), kept) }.unwrap();
    let late = buffer();
    own.destroy();
    assert_error(device.synchronize(), "lost or destroyed");
    // SAFETY: nothing is submitted.
    unsafe {
        assert_error(gpu.bind(&memory), "lost or destroyed");
        assert_error(gpu.resolve(memory.address(), 4), "lost or destroyed");
        assert_error(
            gpu.resolve_parts(memory.address(), 4, 4),
            "lost or destroyed",
        );
        assert_error(WgpuDevice::wrap(&device, late, ()), "lost or destroyed");
    }
    let (frozen, error) = gpu.take(frozen).unwrap_err();
    assert!(error.to_string().contains("lost or destroyed"), "{error}");
    drop((frozen, memory));
    assert_eq!(drops(), 0);
    drop(wrapped);
    assert!(soon(|| drops() == 1));
}
