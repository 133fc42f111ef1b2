//! Devices that are dropped while work is pending, and requests that cannot be met.

use std::sync::Arc;
use std::time::Duration;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::{ArrowDeviceType, DeviceBufferMut, DeviceId, Devices, SyncPolicy};
use arrow_device_vulkan::{VulkanDevice, devices, register};

use crate::program::Program;
use crate::rigs::{Timeline, is_there, open};
use crate::suite::{assert_clean, assert_error, soon};

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
