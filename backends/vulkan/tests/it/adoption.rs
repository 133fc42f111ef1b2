//! What a program has already: instance, device, queue, buffers and events.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::ffi::FFI_ArrowArray;
use arrow_array::{Array, Int64Array};
use arrow_buffer::{Buffer, ScalarBuffer};
use arrow_device::FFI_ArrowDeviceArray;
use arrow_device::device::AddressClass;
use arrow_device::{DeviceArray, DeviceBuffer, DeviceBufferMut, Devices, ImportOptions};
use arrow_device_conformance::{assert_error, numbers, soon};
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanConfig, VulkanDevice, VulkanQueue};
use arrow_schema::DataType;
use arrow_schema::ffi::FFI_ArrowSchema;

use crate::program::Program;
use crate::rigs::{Timeline, assert_clean, hold, is_there};

fn values(rows: i64) -> Vec<i64> {
    (0..rows).collect()
}

fn as_values(buffer: &DeviceBuffer) -> Vec<i64> {
    let bytes = buffer.to_host().unwrap();
    ScalarBuffer::<i64>::from(bytes).to_vec()
}

#[test]
fn a_program_gets_columns_on_its_own_device_and_queue() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let vulkan = VulkanDevice::of(&device).unwrap();
    assert_eq!(vulkan.device().handle(), program.device.handle());
    assert_eq!(vulkan.instance().handle(), program.instance.handle());
    assert_eq!(vulkan.physical_device(), program.physical);
    assert_eq!(vulkan.queue_family(), crate::program::FAMILY);
    let sent = numbers(10_000);
    let up = device.upload(&sent).unwrap();
    assert_eq!(up.to_host().unwrap(), sent);
    // The program keeps its device as long as it wants, and this crate as long as it must.
    let weak = Arc::downgrade(&program);
    drop(program);
    assert_eq!(up.to_host().unwrap(), sent);
    drop(up);
    assert_clean(&device);
    drop(device);
    assert!(
        soon(|| weak.strong_count() == 0),
        "the program's device is kept"
    );
}

/// The program's commands on columns: given to the queue, and submitted by itself. Neither waits.
#[test]
fn commands_of_the_program_run_in_the_order_of_the_queue() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let vulkan = VulkanDevice::of(&device).unwrap();
    let queue = device.new_queue().unwrap();
    let raw = VulkanQueue::of(&queue).unwrap();
    let rows = 5000;
    let sent = numbers(rows);
    for by_itself in [false, true] {
        // Nothing of the queue runs before this is open, the commands included.
        let mut held = hold(&queue);
        let up = device.upload_on(&sent, &queue).unwrap();
        let result = DeviceBufferMut::allocate(&queue, 8 * rows as usize).unwrap();
        let column = up.column(0).unwrap();
        let loan = column.values_on::<i64>(&queue).unwrap();
        let bytes = 8 * rows as usize;
        let (from, src) = vulkan.resolve(loan.address(), bytes).unwrap();
        let (to, dst) = vulkan.resolve(result.address(), bytes).unwrap();
        let commands = program.record(|commands| {
            let region = [vk::BufferCopy {
                src_offset: src,
                dst_offset: dst,
                size: bytes as u64,
            }];
            // SAFETY: both ranges lie in their buffers.
            unsafe { program.device.cmd_copy_buffer(commands, from, to, &region) };
        });
        if by_itself {
            let (semaphore, value) = raw.submitted().unwrap();
            let (waits, values) = ([semaphore], [value]);
            let stages = [vk::PipelineStageFlags::ALL_COMMANDS];
            let mut timeline =
                vk::TimelineSemaphoreSubmitInfo::default().wait_semaphore_values(&values);
            let commands = [commands];
            let submit = [vk::SubmitInfo::default()
                .wait_semaphores(&waits)
                .wait_dst_stage_mask(&stages)
                .command_buffers(&commands)
                .push_next(&mut timeline)];
            let queue = program.queue.lock().unwrap();
            // SAFETY: this thread has the queue; the commands are recorded, and live as long as the program.
            let done = unsafe {
                program
                    .device
                    .queue_submit(*queue, &submit, vk::Fence::null())
            };
            done.unwrap();
        } else {
            // SAFETY: the commands are recorded, read the loan's memory and write to `result` only, and live as long as the program.
            unsafe { raw.submit(&[commands]) }.unwrap();
        }
        held.open();
        drop(loan);
        let result = result.freeze().unwrap();
        assert_eq!(as_values(&result), values(rows));
        queue.synchronize().unwrap();
    }
    drop(queue);
    assert_clean(&device);
}

/// Queues of two devices on one VkDevice wait for each other on the device: no thread does. What one is dropped with lives until the
/// other has waited.
#[test]
fn devices_of_one_vkdevice_wait_for_each_other_on_the_device() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let (one, two) = (program.adopt(), program.adopt());
    let sent = numbers(100_000);
    let mut held = hold(&one.default_queue());
    let up = one.upload(&sent).unwrap();
    let event = one.default_queue().record().unwrap().unwrap();
    let (before, queue) = (two.stats(), two.new_queue().unwrap());
    queue.wait(&event).unwrap();
    let there = two.upload_on(&sent, &queue).unwrap();
    let last = queue.record().unwrap().unwrap();
    let cost = two.stats().since(&before);
    assert_eq!((cost.queue_waits, cost.host_waits), (1, 0));
    assert!(!last.is_complete().unwrap(), "the queue did not wait");
    drop((event, up, one));
    held.open();
    assert_eq!(there.to_host().unwrap(), sent);
    last.wait().unwrap();
    drop((held, there, last, queue));
    assert_clean(&two);
}

/// A thread that waits for the lock of the VkQueue to submit holds up nobody who asks, waits or allocates.
#[test]
fn a_submission_that_waits_for_the_lock_holds_up_no_question() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let queue = device.default_queue();
    let event = queue.record().unwrap().unwrap();
    let memory = DeviceBufferMut::allocate(&queue, 4096).unwrap();
    let up = device.upload(&numbers(9)).unwrap();
    queue.synchronize().unwrap();
    let locked = program.queue.lock().unwrap();
    std::thread::scope(|scope| {
        let submits = scope.spawn(|| queue.record().map(drop));
        std::thread::sleep(Duration::from_millis(30));
        let asks = scope.spawn(|| {
            // SAFETY: the event is live.
            unsafe { device.backend().wait_event(event.as_ptr()) }.unwrap();
            let class = device.backend().classify(memory.address(), 4096).class;
            assert_eq!(class, AddressClass::Device);
            assert!(up.is_ready().unwrap());
            // Its drop, a free, would wait for the lock.
            DeviceBufferMut::allocate(&device.new_queue().unwrap(), 5000).unwrap()
        });
        assert!(soon(|| asks.is_finished()), "held up");
        assert!(!submits.is_finished(), "submitted without the lock");
        drop(locked);
        drop(asks.join().unwrap());
        submits.join().unwrap().unwrap();
    });
}

#[test]
fn a_buffer_of_the_program_is_wrapped_without_a_copy() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let buffer = program.buffer(8 * 1000);
    buffer.write(&values(1000));
    let weak = Arc::downgrade(&buffer);
    let before = device.stats();
    let (raw, bytes) = (buffer.raw, buffer.bytes);
    // SAFETY: the buffer is live until it is dropped, has the length and the usages, and nobody writes to it.
    let wrap = |raw, bytes| unsafe { VulkanDevice::wrap(&device, raw, bytes, buffer.clone()) };
    assert_error(
        wrap(vk::Buffer::null(), bytes).map(drop),
        "wants a VkBuffer",
    );
    assert_error(wrap(raw, 0).map(drop), "wants a VkBuffer");
    let wrapped = wrap(raw, bytes).unwrap();
    assert_error(wrap(raw, bytes).map(drop), "knows already");
    drop(buffer);
    assert_eq!(device.stats().since(&before).copies, 0);
    let vulkan = VulkanDevice::of(&device).unwrap();
    let at = wrapped.address().offset(80);
    assert_eq!(vulkan.resolve(at, bytes - 80).unwrap(), (raw, 80));
    assert_error(vulkan.resolve(at, bytes - 79), "in no VkBuffer that");
    let part = wrapped.slice(80, 800).unwrap();
    drop(wrapped);
    assert_eq!(as_values(&part), values(1000)[10..110]);
    assert!(weak.strong_count() > 0, "released while it is in use");
    drop(part);
    assert!(soon(|| weak.strong_count() == 0), "not released");
    assert_clean(&device);
}

/// An array of another library in a VkBuffer that was wrapped, with an event that commands set, which are submitted only while this crate
/// waits.
#[test]
fn an_event_that_commands_set_is_waited_for() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let (device, functions) = (program.adopt(), &program.device);
    let [memory, source] = [(); 2].map(|()| program.buffer(8 * 1000));
    memory.write(&[-1; 1000]);
    source.write(&values(1000));
    // SAFETY: buffer and event live until the commands have run. Nobody reads the buffer before the event is set.
    let wrapped =
        unsafe { VulkanDevice::wrap(&device, memory.raw, memory.bytes, memory.clone()) }.unwrap();
    // SAFETY: the device is live.
    let mut event = unsafe { functions.create_event(&Default::default(), None) }.unwrap();
    let commands = [program.record(|own| {
        let all = vk::PipelineStageFlags::ALL_COMMANDS;
        let none = vk::DependencyFlags::empty();
        let region = [vk::BufferCopy::default().size(memory.bytes as u64)];
        let barrier = [vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::MEMORY_WRITE)
            .dst_access_mask(vk::AccessFlags::MEMORY_READ)];
        // SAFETY: the buffers have the region, and all is recorded as its structures say.
        unsafe {
            functions.cmd_copy_buffer(own, source.raw, memory.raw, &region);
            functions.cmd_pipeline_barrier(own, all, all, none, &barrier, &[], &[]);
            functions.cmd_set_event(own, event, all);
        }
    })];
    let address = NonNull::new(wrapped.address().as_ptr().cast()).unwrap();
    let schema = FFI_ArrowSchema::try_from(&DataType::Int64).unwrap();
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let options = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    // SAFETY: only the address is used, and `wrapped` keeps the memory. Its values are there once the event is set, which lives longer.
    let array = unsafe {
        let buffer = Buffer::from_custom_allocation(address, memory.bytes, Arc::new(()));
        let data = Int64Array::from(values(1000)).into_data().into_builder();
        let data = data.buffers(vec![buffer]).build_unchecked();
        let (id, event) = (device.id(), (&raw mut event).cast());
        let array =
            FFI_ArrowDeviceArray::new(FFI_ArrowArray::new(&data), id.device_type, id.id, event);
        DeviceArray::import(array, &schema, &options)
    };
    let array = array.unwrap();
    assert!(!array.is_ready().unwrap(), "the event is not set yet");
    let back = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            let submit = [vk::SubmitInfo::default().command_buffers(&commands)];
            let queue = program.queue.lock().unwrap();
            // SAFETY: this thread has the queue; the commands are recorded, and live as long as the program.
            unsafe { functions.queue_submit(*queue, &submit, vk::Fence::null()) }.unwrap();
        });
        array.to_host().unwrap()
    });
    assert_eq!(&*back, &Int64Array::from(values(1000)) as &dyn Array);
    assert!(array.is_ready().unwrap(), "read before it was written");
    drop((back, array, wrapped));
    device.synchronize().unwrap();
    assert_clean(&device);
    // SAFETY: the commands have run, and nothing uses the event any more.
    unsafe {
        functions.device_wait_idle().unwrap();
        functions.destroy_event(event, None);
    }
}

#[test]
fn what_cannot_be_adopted_is_refused() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let mut parts = program.parts();
    parts.queue_family = 77;
    // SAFETY: all else is live and belongs together; the family is refused before it is used.
    let refused = unsafe { VulkanConfig::new(0).adopt(parts) };
    assert_error(refused, "runs no compute commands");
    let old = Program::with_entry(program.entry.clone(), vk::API_VERSION_1_0);
    // NVIDIA's driver has the functions for every version, but then not the features.
    // SAFETY: instance and device are live; the name ends with a null byte.
    let has = unsafe {
        let name = c"vkGetBufferDeviceAddress";
        let handle = old.device.handle();
        old.instance.get_device_proc_addr(handle, name.as_ptr())
    };
    let reason = match has {
        Some(_) => "lacks buffers with addresses",
        None => "ApplicationInfo::api_version",
    };
    assert_error(old.try_adopt(), reason);
    assert_error(
        VulkanConfig::new(999).open(),
        "devices, which are numbered from 0",
    );
}

/// A program's work may need the lock of its VkQueue to end: who waits for it does not hold that.
#[test]
fn the_end_of_all_work_is_waited_for_without_the_lock() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let timeline = Timeline::new(&device);
    timeline.block(&device.default_queue());
    std::thread::scope(|scope| {
        let settled = scope.spawn(|| device.synchronize());
        std::thread::sleep(Duration::from_millis(100));
        assert!(!settled.is_finished(), "the program's work has not ended");
        let is_free = soon(|| program.queue.try_lock().is_ok());
        timeline.signal(1);
        settled.join().unwrap().unwrap();
        assert!(is_free, "the lock is held meanwhile");
    });
}
