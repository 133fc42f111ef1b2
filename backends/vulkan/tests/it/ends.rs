//! Devices that are dropped while work is pending, and requests that cannot be met.

use std::sync::{Arc, Weak};
use std::time::Duration;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::device::{CopyKind, CopyOp, DevicePtr, EventPtr};
use arrow_device::{ArrowDeviceType, DeviceBufferMut, DeviceId, Devices, SyncPolicy};
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanDevice, devices, register};

use crate::program::Program;
use crate::rigs::{Timeline, is_there, open};
use crate::suite::{assert_clean, assert_error, soon};

fn batch() -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..100_000)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

/// Nothing of the program's device is destroyed while work is pending, and everything afterwards, which the validation layer checks.
/// The test holds so many shares of it.
fn assert_ends(program: &Weak<Program>, shares: usize, open: impl FnOnce()) {
    std::thread::sleep(Duration::from_millis(30));
    let is_left = || program.strong_count() > shares;
    assert!(is_left(), "destroyed while work is pending");
    open();
    assert!(soon(|| !is_left()), "not destroyed");
}

#[test]
fn a_device_is_dropped_while_its_work_runs() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let queue = device.new_queue().unwrap();
    let other = program.adopt();
    let timeline = Timeline::new(&other);
    timeline.block(&queue);
    let up = device.upload_on(&batch(), &queue).unwrap();
    let exported = up.export(SyncPolicy::Event).unwrap();
    drop((up, queue, device, exported));
    assert_ends(&Arc::downgrade(&program), 2, || timeline.signal(1));
    other.synchronize().unwrap();
}

#[test]
fn a_device_is_dropped_while_its_work_is_held_back() {
    if !is_there() {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    // SAFETY: the device is live.
    let mut event = unsafe {
        program
            .device
            .create_event(&vk::EventCreateInfo::default(), None)
    }
    .unwrap();
    let queue = device.new_queue().unwrap();
    let pointer = EventPtr::new((&raw mut event).cast()).unwrap();
    // SAFETY: the event lives until the queue's work has ended.
    unsafe { queue.raw().wait(pointer) }.unwrap();
    let up = device.upload_on(&batch(), &queue).unwrap();
    drop((up, queue, device));
    assert_ends(&Arc::downgrade(&program), 1, || {
        let commands = [program.record(|commands| {
            let all = vk::PipelineStageFlags::ALL_COMMANDS;
            // SAFETY: the event is live.
            unsafe { program.device.cmd_set_event(commands, event, all) };
        })];
        let submit = [vk::SubmitInfo::default().command_buffers(&commands)];
        let queue = program.queue.lock().unwrap();
        // SAFETY: this thread has the queue; the commands live as long as the program.
        let done = unsafe {
            program
                .device
                .queue_submit(*queue, &submit, vk::Fence::null())
        };
        done.unwrap();
    });
    // SAFETY: the wait is for the commands that set the event, which nobody polls any more.
    unsafe {
        program.device.device_wait_idle().unwrap();
        program.device.destroy_event(event, None);
    }
}

#[test]
fn an_allocation_that_is_too_large_is_an_error() {
    if !is_there() {
        return;
    }
    let device = open();
    let most = VulkanDevice::of(&device).unwrap().info().max_allocation;
    let queue = device.default_queue();
    for bytes in [
        most + 1,
        most.next_multiple_of(64) + 64,
        isize::MAX as usize / 2,
    ] {
        let refused = DeviceBufferMut::allocate(&queue, bytes).map(drop);
        assert_error(refused, "use smaller batches");
    }
    // The device goes on.
    assert_eq!(device.upload(&batch()).unwrap().to_host().unwrap(), batch());
    assert_clean(&device);
}

#[test]
fn devices_are_found_by_number() {
    if !is_there() {
        return;
    }
    let all = devices().unwrap();
    assert!(!all[0].name.is_empty() && all[0].to_string().contains("Vulkan 1."));
    let set = Devices::new();
    register(&set);
    let id = |number| DeviceId::new(ArrowDeviceType::VULKAN, number);
    let device = set.get(id(0)).unwrap();
    assert_eq!(device.id().to_string(), "vulkan:0");
    assert_eq!(set.get(id(0)).unwrap(), device);
    assert_error(set.get(id(-1)).map(drop), "numbered from 0");
    assert_error(set.get(id(999)).map(drop), "there is no device 999");
}

/// A copy to ordinary memory ends with work of the host, for which the device's waits wait, also if its queue was dropped.
#[test]
fn copies_to_ordinary_memory_are_waited_for() {
    if !is_there() {
        return;
    }
    let device = open();
    let bytes = 1 << 20;
    for round in 0..20u8 {
        let (home, queue) = (device.default_queue(), device.new_queue().unwrap());
        let mut memory = DeviceBufferMut::allocate(&home, bytes).unwrap();
        memory.fill(round + 1).unwrap();
        queue.wait(&home.record().unwrap().unwrap()).unwrap();
        let mut ordinary = vec![0u8; bytes];
        let op = CopyOp {
            src: memory.address(),
            dst: DevicePtr::new(ordinary.as_mut_ptr().cast()),
            bytes,
            kind: CopyKind::DeviceToHost,
        };
        // SAFETY: both have as many bytes and live until the device was waited for.
        unsafe { queue.raw().copy(&[op]) }.unwrap();
        drop(queue);
        match round % 2 {
            0 => device.synchronize().unwrap(),
            _ => device.backend().settle().unwrap(),
        }
        assert!(ordinary.iter().all(|byte| *byte == round + 1), "{round}");
        drop(memory);
    }
    assert_clean(&device);
}
