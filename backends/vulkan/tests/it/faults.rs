//! What is submitted, when it counts as complete, and calls that fail. The suite lets each call of the provider fail.

use arrow_device::device::engine::Runtime;
use arrow_device::{DeviceBufferMut, Queue};
use arrow_device_conformance::{numbers, soon};
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanDevice, VulkanQueue};

use crate::rigs::{Timeline, hold};
use crate::watched::Watched;

/// Threads make the queues of three devices, each with an order of its own, wait for each other.
#[test]
fn no_submission_waits_for_a_later_one() {
    let Some(watched) = Watched::new() else {
        return;
    };
    let devices = [(); 3].map(|()| watched.adopt().unwrap());
    std::thread::scope(|scope| {
        for at in 0..3 {
            let devices = &devices;
            scope.spawn(move || {
                let queues = devices.each_ref().map(|device| device.new_queue().unwrap());
                for round in 0..100 {
                    let (one, two) = ((at + round) % 3, (at + round + 1) % 3);
                    let up = devices[one].upload_on(&numbers(900), &queues[one]).unwrap();
                    let event = queues[one].record().unwrap().unwrap();
                    queues[two].wait(&event).unwrap();
                    let there = devices[two].upload_on(&numbers(900), &queues[two]).unwrap();
                    drop((up, event));
                    assert_eq!(there.to_host().unwrap(), numbers(900));
                }
            });
        }
    });
    assert!(watched.calls("semaphore") > 100);
}

/// What a program's commands have written is available to whoever sees the event, or submits after `submitted`. Drivers for processors
/// order all commands anyway, so that no result shows a barrier that is missing.
#[test]
fn events_and_submissions_of_a_program_come_after_a_barrier() {
    let Some(watched) = Watched::new() else {
        return;
    };
    let device = watched.adopt().unwrap();
    let queue = device.new_queue().unwrap();
    let record = |queue: &Queue| drop(queue.record().unwrap());
    let submitted = |queue: &Queue| {
        let _ = VulkanQueue::of(queue).unwrap().submitted().unwrap();
    };
    for work in [record as fn(&Queue), submitted] {
        let before = watched.calls("vkCmdPipelineBarrier");
        work(&queue);
        assert_eq!(watched.calls("vkCmdPipelineBarrier"), before + 1);
    }
    queue.synchronize().unwrap();
}

/// A free submits nothing, and its memory goes to the next allocation of the VkQueue. It is given back to the driver only after what a
/// program has submitted meanwhile, without another submission by the program.
#[test]
fn a_free_submits_nothing() {
    let Some(watched) = Watched::new() else {
        return;
    };
    let device = watched.adopt().unwrap();
    let (queue, other) = (device.new_queue().unwrap(), device.new_queue().unwrap());
    let allocate = |queue| DeviceBufferMut::allocate(queue, 5_000_000).unwrap();
    let memory = allocate(&queue);
    let (submits, address) = (watched.calls("vkQueueSubmit"), memory.address());
    drop(memory);
    let memory = allocate(&other);
    assert_eq!(memory.address(), address);
    assert_eq!(watched.calls("vkQueueSubmit"), submits);
    let before = watched.calls("vkDestroyBuffer");
    let mut held = hold(&queue);
    drop(memory);
    // Stands for the free, and needs no later submission.
    let runtime = VulkanDevice::of(&device).unwrap();
    let mark = runtime.mark(VulkanQueue::of(&queue).unwrap()).unwrap();
    assert!(
        !runtime.is_done(&mark).unwrap(),
        "before the program's work"
    );
    std::thread::scope(|scope| {
        let trims = scope.spawn(|| device.trim());
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert_eq!(
            watched.calls("vkDestroyBuffer"),
            before,
            "freed while the program's work runs"
        );
        held.open();
        trims.join().unwrap();
    });
    let mark = runtime.mark(VulkanQueue::of(&queue).unwrap()).unwrap();
    assert!(
        soon(|| runtime.is_done(&mark).unwrap()),
        "it waits for a submission"
    );
    assert!(
        soon(|| watched.calls("vkDestroyBuffer") > before),
        "not freed"
    );
}

/// Drivers end all work of a device that they reset, so that its timelines reach their values, and say that it is lost only to calls
/// that wait or submit. None of that work counts as complete.
#[test]
fn work_of_a_device_that_was_reset_is_not_complete() {
    for call in ["vkWaitSemaphores", "vkQueueSubmit"] {
        let Some(watched) = Watched::new() else {
            return;
        };
        let device = watched.adopt().unwrap();
        let queue = device.new_queue().unwrap();
        let timeline = Timeline::new(&device);
        timeline.block(&queue);
        let up = device.upload_on(&numbers(900), &queue).unwrap();
        let event = queue.record().unwrap().unwrap();
        assert!(!event.is_complete().unwrap());
        watched.fail(call, vk::Result::ERROR_DEVICE_LOST, true);
        // What the semaphore holds up runs all the same. Another thread may ask as soon as it has ended.
        timeline.signal(1);
        if call == "vkQueueSubmit" {
            assert!(queue.record().is_err());
        }
        let mut answer = Ok(false);
        assert!(soon(|| {
            answer = event.is_complete();
            !matches!(answer, Ok(false))
        }));
        assert!(answer.is_err(), "{answer:?}");
        assert!(up.to_host().is_err());
        drop((up, event, queue));
        let submits = watched.calls("vkQueueSubmit");
        assert!(device.synchronize().is_err());
        assert_eq!(watched.calls("vkQueueSubmit"), submits);
        drop((timeline, device));
    }
}

/// A driver may wait for a shorter time than it was asked for. Nobody takes that for the end of the work.
#[test]
fn a_wait_that_ends_early_is_repeated() {
    let Some(watched) = Watched::new() else {
        return;
    };
    let device = watched.adopt().unwrap();
    let queue = device.new_queue().unwrap();
    let mut held = hold(&queue);
    let up = device.upload_on(&numbers(900), &queue).unwrap();
    let waits = watched.calls("vkWaitSemaphores");
    watched.fail("vkWaitSemaphores", vk::Result::TIMEOUT, false);
    std::thread::scope(|scope| {
        let back = scope.spawn(|| up.to_host().unwrap());
        let is_repeated = || watched.calls("vkWaitSemaphores") > waits + 1;
        assert!(soon(is_repeated), "not repeated");
        held.open();
        assert_eq!(back.join().unwrap(), numbers(900));
    });
}
