//! Bindings, the buffers behind addresses, and the order of work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow_array::Int8Array;
use arrow_device::device::DevicePtr;
use arrow_device::{Device, DeviceBufferMut};
use arrow_device_conformance::assert_error;
use arrow_device_wgpu::Place;

use crate::program::{add, gpu, numbers, read, write};
use crate::rigs::{open_with, try_open};

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
    // SAFETY: nothing is submitted that uses the binding.
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
    // SAFETY: what is submitted only reads the memory, while the loan lives.
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
        // SAFETY: nothing is submitted that uses the binding.
        let parts = unsafe { gpu.resolve_parts(address, bytes, 1 << 20) };
        match bytes {
            0 => assert!(parts.unwrap().is_empty()),
            _ => assert_error(parts, "are not memory of webgpu:"),
        }
    }
    // SAFETY: nothing is submitted that uses the binding.
    assert_error(
        unsafe { gpu.resolve_parts(address, 4, 0) },
        "parts of 0 bytes",
    );
    let foreign = DeviceBufferMut::allocate(&other.default_queue(), 100).unwrap();
    // SAFETY: nothing is submitted that uses the binding.
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
    // An event includes what the program has submitted before, though this crate did not submit it.
    add(&device, &bound, 64, 1);
    let done = Arc::new(AtomicBool::new(false));
    let sets = done.clone();
    let own = gpu.queue();
    own.on_submitted_work_done(move || sets.store(true, Ordering::SeqCst));
    queue.record().unwrap().unwrap().wait().unwrap();
    assert!(done.load(Ordering::SeqCst), "the program's work");
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
