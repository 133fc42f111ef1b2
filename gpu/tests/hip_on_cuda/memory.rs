//! Addresses, flags, pools, memory of all kinds.

use std::ptr::{from_mut, null_mut};

use crate::fake::LAZY;
use crate::hip::*;

/// HIP 5.2, 6.0 and 7.1.
const VERSIONS: [i32; 3] = [50221153, 60032830, 70151831];

#[test]
fn the_version_is_what_was_set() {
    let _version = Version::new(0);
    let answers = || {
        let (mut runtime, mut driver) = (0, 0);
        assert_eq!(hipRuntimeGetVersion(&mut runtime), 0);
        assert_eq!(hipDriverGetVersion(&mut driver), 0);
        (runtime, driver)
    };
    assert_eq!(answers(), (70151831, 70151831));
    assert_eq!(hip_on_cuda_version(50221153), 70151831);
    assert_eq!(answers(), (50221153, 50221153));
    assert_eq!(hip_on_cuda_version(0), 50221153);
    assert_eq!(answers(), (70151831, 70151831));
    assert_eq!(hipRuntimeGetVersion(null_mut()), 1);
}

fn attributes(ptr: Ptr) -> (i32, Attributes) {
    let mut attributes = Attributes {
        kind: -7,
        device: -7,
        device_pointer: null_mut(),
        host_pointer: null_mut(),
        is_managed: -7,
        allocation_flags: 7,
    };
    let code = hipPointerGetAttributes(&mut attributes, ptr);
    (code, attributes)
}

#[test]
fn memory_types_have_the_numbers_of_the_version() {
    let rig = Rig::new(2, 0);
    assert_eq!(hipSetDevice(rig.first + 1), 0);
    let managed = made(|ptr| hipMallocManaged(ptr, 16, 1));
    let (on_device, locked) = (device(16), pinned(16));
    let mut registered = [0u8; 16];
    let registered: Ptr = from_mut(&mut registered).cast();
    assert_eq!(hipHostRegister(registered, 16, 0), 0);
    assert_eq!(hipSetDevice(rig.first), 0);

    for (version, numbers) in VERSIONS.into_iter().zip([[1, 0, 4], [2, 1, 3], [2, 1, 3]]) {
        let _version = Version::new(version);
        let [is_device, is_host, is_managed] = numbers;
        for (ptr, kind) in [
            (on_device, is_device),
            (locked, is_host),
            (registered, is_host),
            (managed, is_managed),
        ] {
            let inside = ptr.wrapping_add(8);
            let before = rig.group.calls("cuPointerGetAttributes");
            let (code, found) = attributes(inside);
            assert_eq!(rig.group.calls("cuPointerGetAttributes"), before + 1);
            let host_reads = ptr != on_device;
            let expected = Attributes {
                kind,
                device: rig.first + 1,
                device_pointer: inside,
                host_pointer: if host_reads { inside } else { null_mut() },
                is_managed: i32::from(ptr == managed),
                allocation_flags: 0,
            };
            assert_eq!((code, found), (0, expected));
        }
    }
    assert_eq!(hipPointerGetAttributes(null_mut(), locked), 1);
    assert_eq!((hipFree(managed), hipFree(on_device)), (0, 0));
    assert_eq!((hipHostFree(locked), hipHostUnregister(registered)), (0, 0));
    rig.end();
}

#[test]
fn unknown_addresses_are_an_error_in_hip_5_only() {
    let rig = Rig::new(1, 0);
    let mut unknown = 0u64;
    let unknown: Ptr = from_mut(&mut unknown).cast();
    for version in VERSIONS {
        let _version = Version::new(version);
        let (code, found) = attributes(unknown);
        if version < 60_000_000 {
            assert_eq!((code, found.kind, found.device), (1, -7, -7), "untouched");
            continue;
        }
        let unregistered = Attributes {
            kind: 0,
            device: -1,
            device_pointer: null_mut(),
            host_pointer: null_mut(),
            is_managed: 0,
            allocation_flags: 0,
        };
        assert_eq!((code, found), (0, unregistered));
    }
    rig.end();
}

#[test]
fn flags_of_page_locked_memory() {
    const COHERENT: u32 = 0x4000_0000;
    const NON_COHERENT: u32 = 0x8000_0000;
    let rig = Rig::new(1, 0);
    for flags in [0, 1, 2, 3, COHERENT, NON_COHERENT, COHERENT | 3] {
        let memory = made(|ptr| hipHostMalloc(ptr, 8, flags));
        assert_eq!(hipHostFree(memory), 0);
    }
    for flags in [8, 0x1000_0000, 0x2000_0000, COHERENT | NON_COHERENT] {
        assert_eq!(hipHostMalloc(&mut null_mut(), 8, flags), 1, "{flags:#x}");
    }
    assert_eq!(rig.group.calls("cuMemHostAlloc"), 7);
    rig.group.assert_report(&["live: context"]);
    // Passed on: the stand-in objects to it.
    let combined = made(|ptr| hipHostMalloc(ptr, 8, 4));
    assert_eq!(hipHostFree(combined), 0);
    rig.release();
    rig.group.assert_report(&["write-combined"]);
}

#[test]
fn flags_of_events() {
    let rig = Rig::new(1, 0);
    let (no_fence, to_device, to_system) = (0x2000_0000, 0x4000_0000, 0x8000_0000u32);
    for flags in [2, 3, 7, 2 | no_fence, 2 | to_device, 2 | to_system] {
        let event = made(|event| hipEventCreateWithFlags(event, flags));
        assert_eq!(hipEventDestroy(event), 0);
    }
    for flags in [
        8,
        0x1000_0000,
        to_device | to_system,
        2 | no_fence | to_device,
        no_fence | to_system,
    ] {
        assert_eq!(
            hipEventCreateWithFlags(&mut null_mut(), flags),
            1,
            "{flags:#x}"
        );
    }
    assert_eq!(rig.group.calls("cuEventCreate"), 6);
    rig.end();
}

#[test]
fn nothing_is_allocated_for_no_bytes_and_null_may_be_freed() {
    let rig = Rig::new(1, 0);
    let mut ptr = rig.first as usize as Ptr;
    assert_eq!(hipMalloc(&mut ptr, 0), 0);
    assert!(ptr.is_null());
    ptr = 8 as Ptr;
    assert_eq!(hipHostMalloc(&mut ptr, 0, 0), 0);
    assert!(ptr.is_null());
    assert_eq!((hipFree(ptr), hipHostFree(ptr)), (0, 0));
    assert_eq!(rig.group.calls("cuMemFree_v2"), 0);
    assert_eq!(rig.group.calls("cuMemFreeHost"), 0);
    rig.end();
}

#[test]
fn pools_give_memory_in_order() {
    let rig = Rig::new(2, LAZY);
    let mut wrong = null_mut();
    assert_eq!(hipMemPoolCreate(&mut wrong, &PoolProperties::on(999)), 101);
    let pool = made(|pool| hipMemPoolCreate(pool, &PoolProperties::on(rig.first + 1)));
    const RELEASE_THRESHOLD: i32 = 4;
    let mut threshold = u64::MAX;
    assert_eq!(
        hipMemPoolSetAttribute(pool, RELEASE_THRESHOLD, &mut threshold),
        0
    );
    let mut kept = 0;
    assert_eq!(
        crate::raw::cuMemPoolGetAttribute(pool, RELEASE_THRESHOLD, &mut kept),
        0
    );
    assert_eq!(kept, u64::MAX);
    assert_eq!(hipMemPoolTrimTo(pool, 0), 0);
    assert_eq!(rig.group.calls("cuMemPoolTrimTo"), 1);

    // The memory is where the pool is, whoever's stream orders it.
    let own = stream();
    let pooled = made(|ptr| hipMallocFromPoolAsync(ptr, 24, pool, own));
    let report = rig.group.report();
    let expected = format!("24 bytes, ordinal {}, from a pool", rig.first + 1);
    assert!(report.contains(&expected), "{report}");
    let of_default_pool = made(|ptr| hipMallocAsync(ptr, 8, own));
    assert_eq!(hipFreeAsync(pooled, own), 0);
    assert_eq!(hipFreeAsync(of_default_pool, own), 0);
    assert_eq!(rig.group.live("device"), 0);
    assert_eq!(hipStreamDestroy(own), 0);
    assert_eq!(hipMemPoolDestroy(pool), 0);
    assert_eq!(hipMemPoolDestroy(pool), 400);
    rig.release();
    rig.group.assert_report(&["memory pool"]); // the second destroy
}

#[test]
fn the_device_sees_host_memory_and_what_is_left() {
    let rig = Rig::new(1, 0);
    let (mut free, mut total) = (0, 0);
    let memory = device(4096);
    assert_eq!(hipMemGetInfo(&mut free, &mut total), 0);
    assert_eq!((total, total - free), (1 << 30, 4096));
    let locked = pinned(8);
    let seen = made(|device| hipHostGetDevicePointer(device, locked, 0));
    assert_eq!(seen, locked);
    assert_eq!(hipHostGetDevicePointer(&mut null_mut(), memory, 0), 1);
    let mut page = [0u8; 64];
    let page: Ptr = from_mut(&mut page).cast();
    assert_eq!(hipHostRegister(page, 64, 0), 0);
    assert_eq!(hipHostRegister(page, 64, 0), 712);
    assert_eq!(rig.group.live("registered"), 1);
    assert_eq!(hipHostUnregister(page), 0);
    assert_eq!((hipHostFree(locked), hipFree(memory)), (0, 0));
    rig.end();
}
