//! A program's buffers as columns, and a column's buffer as the program's, without a copy.

use arrow_array::Array;
use arrow_array::cast::AsArray;
use arrow_array::types::Int32Type;
use arrow_device::{Device, DeviceArray, DeviceBuffer, DeviceBufferMut, Devices, Error, Queue};
use arrow_device_conformance::{assert_error, soon};
use arrow_device_wgpu::WgpuDevice;
use arrow_device_wgpu::wgpu::{self, BufferUsages};
use arrow_schema::DataType;

use crate::program::{add, gpu, keep, numbers, own_buffer, read, write};
use crate::rigs::{assert_clean, config, in_use, is_there, now, try_open};

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
        "no device of the runtime WgpuDevice",
    );
    assert_clean(&device);

    // Without STORAGE it is a column, for all but shaders.
    // SAFETY: the buffer is of the device, and not written to.
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
    if !is_there() {
        return;
    }
    let instance =
        wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = now(instance.request_adapter(&Default::default())).unwrap();
    let [one, other] = [(); 2].map(|()| now(adapter.request_device(&Default::default())).unwrap());
    let device = config().adopt(&one.0, &one.1).unwrap();
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
    assert_eq!(in_use(&device).0, 0, "the device knows it no more");
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
    refused(
        part(fresh(&device.default_queue())),
        "not all of an allocation",
    );
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
        "shared with other buffers",
    );
    // It is there as before, and can be taken once it is alone.
    assert_eq!(buffer.to_host().unwrap().as_slice(), [1; 400]);
    gpu.take(buffer).map_err(|(_, e)| e).unwrap();
    assert_clean(&device);
    assert_clean(&other);
}
