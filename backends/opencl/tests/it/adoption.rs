//! What a program has already: contexts, command queues, buffers and kernels.
// The newer function is not in OpenCL 1.2.
#![allow(deprecated)]

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Int8Array, Int64Array, RecordBatch};
use arrow_device::device::DevicePtr;
use arrow_device::{
    Device, DeviceArray, DeviceBufferMut, DeviceRecordBatch, Devices, ImportOptions, Queue,
    SyncPolicy,
};
use arrow_device_conformance::{assert_error, soon};
use arrow_device_opencl::{
    OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue, devices, register,
};
use arrow_schema::DataType;
use cl3::command_queue::*;
use cl3::context::*;
use cl3::device::{CL_DEVICE_TYPE_ALL, get_device_ids};
use cl3::event::release_event;
use cl3::kernel::{create_kernel, release_kernel, set_kernel_arg};
use cl3::memory::*;
use cl3::platform::get_platform_ids;
use cl3::program::{build_program, create_program_with_source, release_program};

use crate::rigs::{assert_clean, has, hold, memories, open};

/// A context and a command queue, which a test owns.
struct Program {
    context: cl_context,
    device: cl_device_id,
    queue: cl_command_queue,
}

const IN_ORDER: u64 = 0;
const OUT_OF_ORDER: u64 = 1;

impl Program {
    fn new(properties: u64) -> Self {
        let platform = get_platform_ids().unwrap()[0];
        let device = get_device_ids(platform, CL_DEVICE_TYPE_ALL).unwrap()[0];
        let context = create_context(&[device], null(), None, null_mut()).unwrap();
        // SAFETY: context and device are live and belong together.
        let queue = unsafe { create_command_queue(context, device, properties) }.unwrap();
        Self {
            context,
            device,
            queue,
        }
    }

    fn adopt(&self, memory: OpenClMemory) -> arrow_device::Result<Device> {
        let config = OpenClConfig::new(0).with_memory(memory);
        // SAFETY: all are live and belong together.
        unsafe { config.adopt(self.context, self.device, self.queue) }
    }

    /// How many references there are of context and queue.
    fn references(&self) -> (u32, u32) {
        let context = get_context_info(self.context, CL_CONTEXT_REFERENCE_COUNT);
        let queue = get_command_queue_info(self.queue, CL_QUEUE_REFERENCE_COUNT);
        (context.unwrap().into(), queue.unwrap().into())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: these are the references of `new`.
        unsafe {
            release_command_queue(self.queue).unwrap();
            release_context(self.context).unwrap();
        }
    }
}

fn batch() -> RecordBatch {
    // The second column lies behind the first one in one allocation.
    let bytes = Arc::new(Int8Array::from_iter_values((0..900).map(|_| 1))) as _;
    let values = Arc::new(Int64Array::from_iter(
        (0..900).map(|i| (i % 5 > 0).then_some(i)),
    )) as _;
    RecordBatch::try_from_iter_with_nullable([("a", bytes, false), ("b", values, true)]).unwrap()
}

#[test]
fn a_programs_context_and_queue() {
    for memory in memories() {
        let program = Program::new(IN_ORDER);
        let before = program.references();
        let device = program.adopt(memory).unwrap();
        assert_eq!(device.id().to_string(), "opencl:0");
        let opencl = OpenClDevice::of(&device).unwrap();
        let handle = OpenClQueue::of(&device.default_queue()).unwrap().handle();
        assert_eq!((opencl.context(), handle), (program.context, program.queue));
        assert_eq!(opencl.device_id(), program.device);
        assert_eq!(device.upload(&batch()).unwrap().to_host().unwrap(), batch());

        // Another command queue of the program.
        // SAFETY: context and device are live and belong together.
        let other = unsafe { create_command_queue(program.context, program.device, 0) }.unwrap();
        // SAFETY: the queue is live.
        let queue = unsafe { Queue::adopt(&device, other.expose_provenance()) }.unwrap();
        let up = device.upload_on(&batch(), &queue).unwrap();
        assert_eq!(up.to_host().unwrap(), batch());
        drop((up, queue));
        // SAFETY: this is the reference of `create_command_queue`.
        unsafe { release_command_queue(other) }.unwrap();
        device.synchronize().unwrap();
        assert_clean(&device);

        // A device that is dropped while it works gives back its memory and queues when that is done.
        let queue = device.new_queue().unwrap();
        let held = hold(&queue);
        drop((device.upload_on(&batch(), &queue).unwrap(), queue, device));
        drop(held);
        let is_left = || program.references() != before;
        assert!(soon(|| !is_left()), "{:?}", program.references());
    }
}

#[test]
fn queues_that_do_not_fit_are_refused() {
    if !has(OpenClMemory::Svm) {
        return;
    }
    let unordered = Program::new(OUT_OF_ORDER);
    let before = unordered.references();
    assert_error(
        unordered.adopt(OpenClMemory::Svm),
        "create one without CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE",
    );
    assert_eq!(unordered.references(), before);
    let program = Program::new(IN_ORDER);
    let device = program.adopt(OpenClMemory::Svm).unwrap();
    // SAFETY: the queue is live.
    let refused = unsafe { Queue::adopt(&device, unordered.queue.expose_provenance()) };
    assert_error(refused, "is of another context or device");
    // A device of another context.
    let config = OpenClConfig::new(0);
    // SAFETY: all are live.
    let refused = unsafe { config.adopt(program.context, null_mut(), program.queue) };
    assert!(refused.is_err());
}

const SOURCE: &str = "
kernel void twice(global const char* input, global char* output, ulong input_at, ulong output_at) {
    size_t row = get_global_id(0);
    ((global long*)(output + output_at))[row] = 2 * ((global const long*)(input + input_at))[row];
}
kernel void is_null(global const char* bitmap, global char* output, ulong bitmap_at, ulong output_at) {
    ((global long*)(output + output_at))[0] = bitmap == 0;
}";

/// Runs a kernel of two buffers.
fn run(queue: &Queue, name: &std::ffi::CStr, rows: usize, from: DevicePtr, to: DevicePtr) {
    let device = OpenClDevice::of(queue.device()).unwrap();
    let queue = OpenClQueue::of(queue).unwrap();
    let program = create_program_with_source(device.context(), &[SOURCE]).unwrap();
    build_program(program, &[device.device_id()], c"", None, null_mut()).unwrap();
    let kernel: cl_kernel = create_kernel(program, name).unwrap();
    // SAFETY: these are the kernel's parameters, and the tests pass memory of so many rows.
    unsafe {
        let from_at = queue.set_kernel_arg(kernel, 0, from).unwrap() as cl_ulong;
        let to_at = queue.set_kernel_arg(kernel, 1, to).unwrap() as cl_ulong;
        for (index, offset) in [(2, from_at), (3, to_at)] {
            set_kernel_arg(kernel, index, 8, (&raw const offset).cast::<c_void>()).unwrap();
        }
        let (handle, rows) = (queue.handle(), &raw const rows);
        let event = enqueue_nd_range_kernel(handle, kernel, 1, null(), rows, null(), 0, null());
        release_event(event.unwrap()).unwrap();
        release_kernel(kernel).unwrap();
        release_program(program).unwrap();
    }
}

/// What a kernel has written.
fn values_of(output: DeviceBufferMut, rows: usize) -> Vec<i64> {
    let output = output.freeze().unwrap();
    let column = DeviceArray::from_values(DataType::Int64, rows, output, None).unwrap();
    let host = column.to_host().unwrap();
    host.as_primitive::<Int64Type>().values().to_vec()
}

#[test]
fn kernels_read_columns_and_write_new_ones() {
    for memory in memories() {
        let device = open(memory);
        let up = device.upload(&batch()).unwrap();
        let queue = device.new_queue().unwrap();
        let column = up.column_by_name("b").unwrap().slice(3, 890).unwrap();
        let output = DeviceBufferMut::for_values::<i64>(&queue, 890).unwrap();
        let input = column.values_on::<i64>(&queue).unwrap();
        run(&queue, c"twice", 890, input.address(), output.address());
        drop(input);
        let doubled = column
            .with_values(DataType::Int64, output.freeze().unwrap())
            .unwrap();
        let expected = Int64Array::from_iter((3..893).map(|i| (i % 5 > 0).then_some(2 * i)));
        assert_eq!(*doubled.to_host().unwrap(), expected, "{memory:?}");

        // A missing bitmap.
        let output = DeviceBufferMut::for_values::<i64>(&queue, 1).unwrap();
        run(&queue, c"is_null", 1, DevicePtr::NULL, output.address());
        assert_eq!(values_of(output, 1), [1]);

        // An address of nothing.
        let raw = OpenClQueue::of(&queue).unwrap();
        if memory == OpenClMemory::Handles {
            let nowhere = DevicePtr::new(std::ptr::without_provenance_mut(4096));
            // SAFETY: the address is looked up before the kernel is used.
            let refused = unsafe { raw.set_kernel_arg(null_mut(), 0, nowhere) };
            assert_error(refused, "looking up the cl_mem of an address");
        }
    }
}

#[test]
fn a_programs_buffer_is_not_copied() {
    if !has(OpenClMemory::Handles) {
        return;
    }
    let program = Program::new(IN_ORDER);
    let device = program.adopt(OpenClMemory::Handles).unwrap();
    let values: Vec<i64> = (0..500).collect();
    // SAFETY: the context is live, and the write is finished before `values` is dropped.
    let mem: cl_mem = unsafe {
        let mem = create_buffer(program.context, CL_MEM_READ_WRITE, 4000, null_mut()).unwrap();
        let (queue, from) = (program.queue, values.as_ptr().cast());
        let event = enqueue_write_buffer(queue, mem, 0, 0, 4000, from, 0, null());
        release_event(event.unwrap()).unwrap();
        mem
    };
    finish(program.queue).unwrap();
    let before = device.stats();
    // SAFETY: the buffer is live and finished, and nobody writes to it any more.
    let buffer = unsafe { OpenClDevice::wrap(&device, mem) }.unwrap();
    assert_eq!(buffer.len(), 4000);
    let opencl = OpenClDevice::of(&device).unwrap();
    assert_eq!(
        opencl.resolve(buffer.address().offset(80), 3920).unwrap(),
        (mem, 80)
    );
    let column = DeviceArray::from_values(DataType::Int64, 500, buffer, None).unwrap();
    let cost = device.stats().since(&before);
    assert_eq!((cost.copies, cost.allocations, cost.host_waits), (0, 0, 0));

    let queue = device.new_queue().unwrap();
    let output = DeviceBufferMut::for_values::<i64>(&queue, 500).unwrap();
    let input = column.values_on::<i64>(&queue).unwrap();
    run(&queue, c"twice", 500, input.address(), output.address());
    drop(input);
    assert!(
        values_of(output, 500)
            .into_iter()
            .eq((0..500).map(|i| 2 * i))
    );
    assert!(*column.to_host().unwrap() == Int64Array::from(values));
    assert_error(
        column.export(SyncPolicy::Event),
        "hand over the cl_mem of OpenClDevice::resolve",
    );

    // Other devices, other memory, other contexts.
    // SAFETY: the buffer is live.
    let wrap = |device: &Device| unsafe { OpenClDevice::wrap(device, mem) };
    assert_error(
        wrap(&open(OpenClMemory::Handles)),
        "the cl_mem is of another context; adopt that context",
    );
    if has(OpenClMemory::Svm) {
        let svm = open(OpenClMemory::Svm);
        assert_error(wrap(&svm), "open the device with OpenClMemory::Handles");
        let up = svm.upload(&batch()).unwrap();
        let address = up.column(1).unwrap().buffer(1).unwrap().address();
        assert_error(
            OpenClDevice::of(&svm).unwrap().resolve(address, 8),
            "pass the address to the kernel",
        );
    }
    drop(column);
    assert_clean(&device);
    // SAFETY: this is the reference of `create_buffer`.
    unsafe { release_mem_object(mem) }.unwrap();
}

#[test]
fn devices_by_name() {
    if !has(OpenClMemory::Svm) {
        return;
    }
    let set = Devices::new();
    let opencl = register(&set);
    let first = set.get("opencl:0".parse().unwrap()).unwrap();
    let found = devices().unwrap();
    let info = OpenClDevice::of(&first).unwrap().info();
    assert_eq!(
        (&info.name, &info.platform),
        (&found[0].name, &found[0].platform)
    );
    assert_eq!(OpenClDevice::of(&first).unwrap().memory(), info.memory[0]);
    assert!(!info.version.is_empty() && info.max_allocation > 1 << 20);
    let next = found.len();
    let text = format!("OpenCL lists {next} devices, which are numbered from 0");
    assert_error(set.get(format!("opencl:{next}").parse().unwrap()), &text);
    assert_error(opencl.add(Devices::cpu()), "no device of the runtime");

    // A program's device is found by its memory and its events.
    let program = Program::new(IN_ORDER);
    let adopted = program.adopt(OpenClMemory::Svm).unwrap();
    opencl.add(adopted.clone()).unwrap();
    opencl.add(adopted.clone()).unwrap();
    for policy in [SyncPolicy::Event, SyncPolicy::Wait] {
        for device in [&first, &adopted] {
            let (array, schema) = device.upload(&batch()).unwrap().export(policy).unwrap();
            let options = ImportOptions {
                devices: Some(set.clone()),
                ..Default::default()
            };
            // SAFETY: both structs come from one export of this crate.
            let again = unsafe { DeviceRecordBatch::import(array, &schema, &options) }.unwrap();
            assert_eq!(again.device(), device);
            assert_eq!(again.to_host().unwrap(), batch());
        }
    }
}

#[test]
fn an_image_is_not_wrapped() {
    if !has(OpenClMemory::Handles) {
        return;
    }
    let program = Program::new(IN_ORDER);
    let device = program.adopt(OpenClMemory::Handles).unwrap();
    let format = cl_image_format {
        image_channel_order: CL_RGBA,
        image_channel_data_type: CL_UNSIGNED_INT8,
    };
    // SAFETY: zeros are numbers and null.
    let mut shape: cl_image_desc = unsafe { std::mem::zeroed() };
    shape.image_type = CL_MEM_OBJECT_IMAGE2D;
    (shape.image_width, shape.image_height) = (64, 64);
    let (access, format, shape) = (CL_MEM_READ_WRITE, &raw const format, &raw const shape);
    // SAFETY: the context is live, and both descriptions are valid.
    let made = unsafe { create_image(program.context, access, format, shape, null_mut()) };
    let image = made.unwrap();
    // SAFETY: the image is live.
    let refused = unsafe { OpenClDevice::wrap(&device, image) };
    assert_error(
        refused,
        "the cl_mem is an image or a pipe, and not a buffer",
    );
    assert_clean(&device);
    // SAFETY: this is the reference of `create_image`.
    unsafe { release_mem_object(image) }.unwrap();
}

#[test]
fn memory_that_the_device_lacks() {
    if !has(OpenClMemory::Svm) {
        return;
    }
    let memory = &devices().unwrap()[0].memory;
    if !memory.contains(&OpenClMemory::Usm) {
        let refused = OpenClConfig::new(0).with_memory(OpenClMemory::Usm).open();
        let expected = format!("has no memory of the kind Usm, but {memory:?}");
        assert_error(refused, &expected);
    }
}
