//! Devices that are dropped while work is pending, and used again; and the end of a process whose threads wait for work that
//! does not end.

use std::collections::HashSet;
use std::mem::forget;
use std::sync::Arc;
use std::time::Duration;

use arrow_device::SyncPolicy;
use arrow_device::device::EventPtr;
use arrow_device_conformance::{assert_works, numbers, soon};
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanDevice, devices};

use crate::program::Program;
use crate::rigs::{Timeline, hold, is_there, open};

/// Nothing of the program's device is destroyed while work is pending, and everything afterwards, which the validation layer checks.
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
    let up = device.upload_on(&numbers(100_000), &queue).unwrap();
    let exported = up.export(SyncPolicy::Event).unwrap();
    drop((up, queue, device, exported));
    std::thread::sleep(Duration::from_millis(30));
    // This test has one share, and the other device one.
    let is_left = || Arc::strong_count(&program) > 2;
    assert!(is_left(), "destroyed while work is pending");
    timeline.signal(1);
    assert!(soon(|| !is_left()), "not destroyed");
    other.synchronize().unwrap();
}

/// To make a VkDevice takes drivers long, and some do not survive that many are destroyed.
#[test]
fn a_vkdevice_is_used_again() {
    if !is_there() {
        return;
    }
    let handles: HashSet<_> = (0..30)
        .map(|_| {
            let device = open();
            assert_works(&device);
            VulkanDevice::of(&device).unwrap().device().handle()
        })
        .collect();
    // What still runs keeps one, and so do other tests.
    assert!(handles.len() < 20, "{handles:?}");
}

#[test]
fn devices_are_listed() {
    if is_there() {
        let all = devices().unwrap();
        assert!(!all[0].name.is_empty() && all[0].to_string().contains("Vulkan 1."));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_process_ends_while_threads_wait() {
    arrow_device_conformance::ends_well("ends::a_process_ends_while_threads_wait", || {
        if !is_there() {
            return;
        }
        // For an event of another library, which this thread polls.
        let device = open();
        let (shared, vulkan) = (device.clone(), VulkanDevice::of(&device).unwrap());
        // SAFETY: the device is live.
        let event = unsafe { vulkan.device().create_event(&Default::default(), None) };
        let event: &mut vk::Event = Box::leak(Box::new(event.unwrap()));
        let pointer = EventPtr::new(std::ptr::from_mut(event).cast()).unwrap();
        // SAFETY: the event lives until the process ends.
        std::thread::spawn(move || unsafe { shared.backend().wait_event(pointer) }.unwrap());
        // For work on the device. NVIDIA's driver does not let a process end that has such work.
        if !Program::new().is_nvidia() {
            let queue = device.new_queue().unwrap();
            forget(hold(&queue));
            let event = queue.record().unwrap().unwrap();
            std::thread::spawn(move || event.wait().unwrap());
        }
        forget(device);
        std::thread::sleep(Duration::from_millis(5));
    });
}
