//! What is submitted, and when it counts as complete. The interposer keeps account of each submission: one without a command buffer,
//! and one that waits for a semaphore value whose signal is submitted later, is a misuse.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::{DeviceBufferMut, Queue};
use arrow_device_vulkan::VulkanQueue;
use ash::vk;

use crate::interposer::account::{calls, clear, fail_from, live, misuses};
use crate::interposer::interposed;
use crate::program::Program;
use crate::rigs::{Timeline, hold};
use crate::suite::soon;

fn batch(rows: i64) -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..rows)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

/// Threads make the queues of three devices, each with an order of its own, wait for each other.
#[test]
fn no_submission_waits_for_a_later_one() {
    if !interposed("faults::order::no_submission_waits_for_a_later_one") {
        return;
    }
    let program = Program::new();
    let devices = [(); 3].map(|()| program.adopt());
    let waits = calls("semaphore that is waited for");
    std::thread::scope(|scope| {
        for at in 0..3 {
            let devices = &devices;
            scope.spawn(move || {
                let queues = devices.each_ref().map(|device| device.new_queue().unwrap());
                for round in 0..100 {
                    let (one, two) = ((at + round) % 3, (at + round + 1) % 3);
                    let up = devices[one].upload_on(&batch(900), &queues[one]).unwrap();
                    let event = queues[one].record().unwrap().unwrap();
                    queues[two].wait(&event).unwrap();
                    let there = devices[two].upload_on(&batch(900), &queues[two]).unwrap();
                    drop((up, event));
                    assert_eq!(there.to_host().unwrap(), batch(900));
                }
            });
        }
    });
    assert!(calls("semaphore that is waited for") > waits + 100);
    assert!(misuses().is_empty(), "{:?}", misuses());
}

/// What a program's commands have written is available to whoever sees the event, or submits after `submitted`. Drivers for processors
/// order all commands anyway, so that no result shows a barrier that is missing.
#[test]
fn events_and_submissions_of_a_program_come_after_a_barrier() {
    if !interposed("faults::order::events_and_submissions_of_a_program_come_after_a_barrier") {
        return;
    }
    let device = Program::new().adopt();
    let queue = device.new_queue().unwrap();
    let record = |queue: &Queue| drop(queue.record().unwrap());
    let submitted = |queue: &Queue| {
        let _ = VulkanQueue::of(queue).unwrap().submitted().unwrap();
    };
    for work in [record as fn(&Queue), submitted] {
        let before = calls("vkCmdPipelineBarrier");
        work(&queue);
        assert_eq!(calls("vkCmdPipelineBarrier"), before + 1);
    }
    queue.synchronize().unwrap();
}

/// A free submits nothing, and its memory goes to the next allocation of the VkQueue. It is given back to the driver only after what a
/// program has submitted meanwhile.
#[test]
fn a_free_submits_nothing() {
    if !interposed("faults::order::a_free_submits_nothing") {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let (queue, other) = (device.new_queue().unwrap(), device.new_queue().unwrap());
    let allocate = |queue| DeviceBufferMut::allocate(queue, 5_000_000).unwrap();
    let memory = allocate(&queue);
    let (submits, address) = (calls("vkQueueSubmit"), memory.address());
    drop(memory);
    let memory = allocate(&other);
    assert_eq!(memory.address(), address);
    assert_eq!(calls("vkQueueSubmit"), submits);
    let buffers = || live().get("buffer").copied();
    let before = buffers();
    let mut held = hold(&queue);
    drop(memory);
    device.trim();
    assert_eq!(buffers(), before, "freed while the program's work runs");
    held.open();
    let is_freed = soon(|| {
        device.trim();
        buffers() < before
    });
    assert!(is_freed, "{:?} buffers", buffers());
}

/// Drivers end all work of a device that they reset, so that its timelines reach their values, and say that it is lost only to calls
/// that wait or submit. None of that work counts as complete.
#[test]
fn work_of_a_device_that_was_reset_is_not_complete() {
    if !interposed("faults::order::work_of_a_device_that_was_reset_is_not_complete") {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let queue = device.new_queue().unwrap();
    let timeline = Timeline::new(&device);
    timeline.block(&queue);
    let up = device.upload_on(&batch(900), &queue).unwrap();
    let event = queue.record().unwrap().unwrap();
    assert!(!event.is_complete().unwrap());
    let lost = vk::Result::ERROR_DEVICE_LOST;
    fail_from("vkWaitSemaphores", 1, lost);
    fail_from("vkQueueSubmit", 1, lost);
    fail_from("vkQueueWaitIdle", 1, lost);
    // Another thread may ask as soon as the work has ended.
    timeline.signal(1);
    let mut answer = Ok(false);
    assert!(soon(|| {
        answer = event.is_complete();
        !matches!(answer, Ok(false))
    }));
    assert!(answer.is_err(), "{answer:?}");
    assert!(up.to_host().is_err());
    drop((up, event, queue));
    // What the semaphore holds up has run all the same.
    let _ = device.backend().settle();
    drop((timeline, device));
    clear();
    assert!(misuses().is_empty(), "{:?}", misuses());
}
