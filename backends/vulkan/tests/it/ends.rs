//! Devices that are dropped while work is pending, used again, and not found; and the end of a process whose threads wait for work that
//! does not end.

use std::collections::HashSet;
use std::mem::forget;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::device::EventPtr;
use arrow_device::{ArrowDeviceType, DeviceId, Devices, SyncPolicy};
use arrow_device_conformance::{assert_error, soon};
use arrow_device_vulkan::ash::vk;
use arrow_device_vulkan::{VulkanDevice, devices, register};

use crate::program::Program;
use crate::rigs::{Timeline, hold, is_there, open};

fn batch() -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..100_000)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

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
    let up = device.upload_on(&batch(), &queue).unwrap();
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
            assert_eq!(device.upload(&batch()).unwrap().to_host().unwrap(), batch());
            VulkanDevice::of(&device).unwrap().device().handle()
        })
        .collect();
    // What still runs keeps one, and so do other tests.
    assert!(handles.len() < 20, "{handles:?}");
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
