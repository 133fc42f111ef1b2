//! What becomes of work under way when Vulkan does not answer a question about it, once or any more.

use std::sync::Arc;
use std::time::Duration;

use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{DeviceBufferMut, Queue};
use ash::vk;

use crate::faults::every_call::batch;
use crate::faults::foreign::Foreign;
use crate::interposer::account::{clear, fail, fail_from, live, misuses};
use crate::interposer::interposed;
use crate::program::Program;
use crate::rigs::Timeline;
use crate::suite::soon;

/// Keeps what a queue is given on the device until the host signals the semaphore. Nothing else calls Vulkan then.
fn hold(queue: &Queue) -> Arc<Timeline> {
    let timeline = Timeline::new(queue.device());
    timeline.block(queue);
    timeline
}

/// Copies all of a buffer into ordinary memory.
fn read_into(queue: &Queue, memory: &DeviceBufferMut, host: &mut [u8]) {
    let op = CopyOp {
        src: memory.address(),
        dst: DevicePtr::new(host.as_mut_ptr().cast()),
        bytes: host.len(),
        kind: CopyKind::DeviceToHost,
    };
    // SAFETY: the tests wait for the copy, and use neither memory before.
    unsafe { queue.raw().copy(&[op]) }.unwrap();
}

/// The host's part of a copy waits for the timeline, which a thread asks for. It asks again after an error that says nothing about
/// the work.
#[test]
fn a_copy_outlives_a_failed_question() {
    if !interposed("faults::polls::a_copy_outlives_a_failed_question") {
        return;
    }
    let device = Program::new().adopt();
    let queue = device.new_queue().unwrap();
    let mut memory = DeviceBufferMut::allocate(&queue, 4096).unwrap();
    memory.fill(7).unwrap();
    queue.synchronize().unwrap();
    let timeline = hold(&queue);
    let mut host = vec![0; 4096];
    read_into(&queue, &memory, &mut host);
    let event = queue.record().unwrap().unwrap();
    fail(
        "vkGetSemaphoreCounterValue",
        1,
        vk::Result::ERROR_OUT_OF_HOST_MEMORY,
    );
    // Nobody but the thread asks meanwhile.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(clear(), ["vkGetSemaphoreCounterValue"]);
    timeline.signal(1);
    let is_complete = soon(|| event.is_complete().unwrap());
    device.synchronize().unwrap();
    assert!(is_complete, "nobody asks again");
    assert!(host.iter().all(|byte| *byte == 7));
}

/// As above, of the event of a program.
#[test]
fn a_wait_outlives_a_failed_question() {
    if !interposed("faults::polls::a_wait_outlives_a_failed_question") {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let event = Foreign::new(&program);
    let queue = device.new_queue().unwrap();
    // SAFETY: the event lives until the queue has ended.
    unsafe { queue.raw().wait(event.pointer()) }.unwrap();
    let up = device.upload_on(&batch(), &queue).unwrap();
    fail(
        "vkGetEventStatus",
        1,
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY,
    );
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(clear(), ["vkGetEventStatus"]);
    event.set();
    assert_eq!(up.to_host().unwrap(), batch());
    queue.synchronize().unwrap();
}

/// Drivers end all work of a device that they reset, so that its timelines reach their values, and say that it is lost only to calls
/// that wait or submit. None of that work counts as complete.
#[test]
fn work_of_a_device_that_was_reset_is_not_complete() {
    if !interposed("faults::polls::work_of_a_device_that_was_reset_is_not_complete") {
        return;
    }
    let program = Program::new();
    let device = program.adopt();
    let queue = device.new_queue().unwrap();
    let timeline = hold(&queue);
    let up = device.upload_on(&batch(), &queue).unwrap();
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

/// What stands for the end of memory's use could not be submitted when it was freed. The queue makes up for it when it is dropped.
#[test]
fn memory_whose_free_failed_goes_with_its_queue() {
    if !interposed("faults::polls::memory_whose_free_failed_goes_with_its_queue") {
        return;
    }
    let device = Program::new().adopt();
    let queue = device.new_queue().unwrap();
    device.trim();
    let before = live();
    let memory = DeviceBufferMut::allocate(&queue, 5_000_000).unwrap();
    fail("vkQueueSubmit", 1, vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    drop(memory);
    assert_eq!(clear(), ["vkQueueSubmit"]);
    drop(queue);
    let buffers = || live().get("buffer").copied();
    let is_freed = soon(|| {
        device.trim();
        buffers() == before.get("buffer").copied()
    });
    assert!(is_freed, "{:?} buffers, {before:?}", buffers());
}
