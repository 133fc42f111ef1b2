//! The current device, primary contexts, work across devices.

use std::ptr::{null_mut, without_provenance_mut};
use std::thread::spawn;

use crate::fake::{LAZY, NO_CONCURRENT_MANAGED, NO_POOLS};
use crate::hip::*;
use crate::raw;

#[test]
fn the_current_device_is_the_threads() {
    let rig = Rig::new(2, 0);
    let second = rig.first + 1;
    let elsewhere = spawn(move || {
        assert_eq!(current_device(), 0);
        assert_eq!(hipSetDevice(second), 0);
        assert_eq!(current_device(), second);
    });
    elsewhere.join().unwrap();
    assert_eq!(current_device(), rig.first);

    let mut count = 0;
    assert_eq!(hipGetDeviceCount(&mut count), 0);
    assert_eq!(count, 900);
    for wrong in [-1, count, i32::MAX] {
        assert_eq!(hipSetDevice(wrong), 101);
    }
    let memory = device(8);
    assert_eq!(hipFree(memory), 0);
    assert_eq!(hipMalloc(null_mut(), 8), 1);
    assert_eq!(current_device(), rig.first);
    assert_eq!(hipGetDevice(null_mut()), 1);
    rig.end();
}

#[test]
fn allocations_are_the_current_devices() {
    let rig = Rig::new(2, 0);
    for ordinal in [rig.first + 1, rig.first] {
        assert_eq!(hipSetDevice(ordinal), 0);
        let memory = device(8);
        assert!(
            rig.group
                .report()
                .contains(&format!("8 bytes, ordinal {ordinal}"))
        );
        assert_eq!(hipFree(memory), 0);
    }
    rig.end();
}

#[test]
fn contexts_are_retained_at_their_first_use_and_kept() {
    let rig = Rig::new(2, 0);
    let retained = || {
        (
            rig.group.calls("cuDevicePrimaryCtxRetain"),
            rig.group.live("contexts"),
        )
    };
    assert_eq!(hipInit(0), 0);
    assert_eq!(hipInit(1), 1);
    assert_eq!(hipDeviceGetAttribute(&mut 0, 85, rig.first), 0);
    assert_eq!(hipThreadExchangeStreamCaptureMode(&mut 0), 0);
    assert_eq!(hipStreamGetDevice(null_mut(), &mut 0), 0);
    assert_eq!(retained(), (0, 0), "none of these uses a device");
    assert_eq!(hip_on_cuda_release(rig.first), -1);

    let memory = device(8);
    assert_eq!(hipFree(memory), 0);
    let first = rig.first;
    let elsewhere = spawn(move || {
        assert_eq!(hipSetDevice(first), 0);
        assert_eq!(hipFree(null_mut()), 0);
    });
    elsewhere.join().unwrap();
    assert_eq!(retained(), (1, 1));
    assert_eq!(hipSetDevice(rig.first + 1), 0);
    assert_eq!(hipDeviceSynchronize(), 0);
    assert_eq!(retained(), (2, 2));

    for ordinal in [rig.first, rig.first + 1] {
        assert_eq!(hip_on_cuda_release(ordinal), 0);
        assert_eq!(hip_on_cuda_release(ordinal), -1);
    }
    rig.group.assert_clean();
    assert_eq!(hipDeviceSynchronize(), 0);
    assert_eq!(retained(), (3, 1));
    rig.end();
}

#[test]
fn a_context_that_cannot_be_retained_is_tried_again() {
    let rig = Rig::new(1, 0);
    rig.group.fail("cuDevicePrimaryCtxRetain", 1, 2);
    assert_eq!(hipDeviceSynchronize(), 2);
    assert_eq!(hipDeviceSynchronize(), 0);
    rig.end();
}

#[test]
fn the_callers_context_stack_stays() {
    let other = raw::Bound::new(0);
    let rig = Rig::new(1, 0);
    let current = || {
        let mut ctx = null_mut();
        assert_eq!(raw::cuCtxGetCurrent(&mut ctx), 0);
        ctx
    };
    let memory = device(8);
    assert!(rig.group.report().contains("device memory"));
    assert_eq!(current(), other.ctx);
    assert_eq!(hipFree(memory), 0);
    assert_eq!(
        hipStreamQuery(without_provenance_mut(0x30)),
        400,
        "fails inside"
    );
    assert_eq!(current(), other.ctx);
    let mut popped = null_mut();
    assert_eq!(raw::cuCtxPopCurrent_v2(&mut popped), 0);
    assert_eq!((popped, current()), (other.ctx, null_mut()));
    assert_eq!(hipDeviceSynchronize(), 0);
    assert_eq!(current(), null_mut());
    assert_eq!(raw::cuCtxPushCurrent_v2(popped), 0);
    rig.release();
    rig.group.assert_report(&["stream 0x30: unknown"]);
    other.end();
}

extern "C" fn nothing(_: Ptr) {}

#[test]
fn work_on_another_devices_stream_is_refused() {
    let rig = Rig::new(2, LAZY);
    let (first, second) = (rig.first, rig.first + 1);
    let (own, memory, mark) = (stream(), device(8), event());
    let pool = made(|pool| hipMemPoolCreate(pool, &PoolProperties::on(first)));
    let work = || {
        [
            hipMemsetD8Async(memory, 1, 8, own),
            hipEventRecord(mark, own),
            hipLaunchHostFunc(own, nothing, null_mut()),
            hipMemcpyAsync(memory, memory.wrapping_add(4), 4, DEFAULT, own),
            hipMallocFromPoolAsync(&mut null_mut(), 4, pool, own),
        ]
    };
    assert_eq!(hipSetDevice(second), 0);
    assert_eq!(work(), [201; 5]);
    assert_eq!(rig.group.live("pending"), 0);

    // What waits or asks may be anyone's.
    assert_eq!(hipSetDevice(first), 0);
    assert_eq!(hipMemsetD8Async(memory, 1, 8, own), 0);
    assert_eq!(hipEventRecord(mark, own), 0);
    assert_eq!(hipSetDevice(second), 0);
    let other = stream();
    assert_eq!(hipEventQuery(mark), 600);
    assert_eq!(hipStreamQuery(own), 600);
    assert_eq!(hipStreamWaitEvent(other, mark, 0), 0);
    for (stream, device) in [
        (own, first),
        (other, second),
        (null_mut(), second),
        (without_provenance_mut(1), second),
        (without_provenance_mut(2), second),
    ] {
        let mut found = -1;
        assert_eq!(hipStreamGetDevice(stream, &mut found), 0);
        assert_eq!(found, device);
    }
    assert_eq!(hipStreamGetDevice(own, null_mut()), 1);
    assert_eq!(hipStreamSynchronize(other), 0);
    assert_eq!((hipEventQuery(mark), hipStreamQuery(own)), (0, 0));
    assert_eq!(current_device(), second);

    assert_eq!(hipEventDestroy(mark), 0);
    assert_eq!((hipStreamDestroy(own), hipStreamDestroy(other)), (0, 0));
    assert_eq!((hipMemPoolDestroy(pool), hipFree(memory)), (0, 0));
    rig.end();
}

#[test]
fn attributes_are_cudas_under_other_numbers() {
    let plain = Rig::new(1, 0);
    let poor = Rig::new(1, NO_POOLS | NO_CONCURRENT_MANAGED);
    let attribute = |rig: Rig, number| {
        let mut value = -1;
        assert_eq!(hipDeviceGetAttribute(&mut value, number, rig.first), 0);
        value
    };
    // Concurrent managed access, managed memory, unified addressing, memory pools.
    let numbers = [9, 24, 85, 88];
    assert_eq!(numbers.map(|n| attribute(plain, n)), [1, 1, 1, 1]);
    assert_eq!(numbers.map(|n| attribute(poor, n)), [0, 1, 1, 0]);
    for unknown in [0, 41, 115, -1] {
        assert_eq!(hipDeviceGetAttribute(&mut 0, unknown, plain.first), 1);
    }
    assert_eq!(hipDeviceGetAttribute(&mut 0, 85, 1000), 101);
    assert_eq!(current_device(), poor.first, "it asks about any device");
    plain.end();
    poor.end();
}
