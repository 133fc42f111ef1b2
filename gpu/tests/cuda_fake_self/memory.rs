//! Allocations, frees, registered memory, pools, pointer attributes.

use std::ffi::{CStr, c_int};
use std::ptr::{null, null_mut};

use crate::fake::{Group, LAZY, NO_CONCURRENT_MANAGED, NO_POOLS};
use crate::raw::*;

#[test]
fn wrong_frees_are_refused_and_reported() {
    let bound = Bound::new(0);
    let stream = stream();
    let (on_device, in_pool) = (device(8), pooled(8, stream));
    let (locked, shared) = (pinned(8), managed(8));
    let mut registered = [0u8; 8];
    let registered: Ptr = registered.as_mut_ptr().cast();
    assert_eq!(cuMemHostRegister_v2(registered, 8, 0), 0);
    let locked_address = locked.addr() as u64;

    let wrong = [
        (cuMemFree_v2(locked_address), 1, "cuMemFree of pinned"),
        (
            cuMemFreeHost(on_device as Ptr),
            1,
            "cuMemFreeHost of device",
        ),
        (cuMemFreeHost(shared as Ptr), 1, "cuMemFreeHost of managed"),
        (cuMemFreeHost(registered), 1, "cuMemFreeHost of registered"),
        (
            cuMemFreeAsync(on_device, stream),
            1,
            "cuMemFreeAsync of device",
        ),
        (
            cuMemFreeAsync(locked_address, stream),
            1,
            "cuMemFreeAsync of pinned",
        ),
        (
            cuMemHostUnregister(locked.cast()),
            713,
            "cuMemHostUnregister of pinned",
        ),
        (cuMemFree_v2(on_device + 1), 1, "not a live allocation"),
        (cuMemFree_v2(0), 1, "not a live allocation"),
    ];
    let right = [
        cuMemFree_v2(on_device),
        cuMemFree_v2(shared),
        cuMemFreeAsync(in_pool, stream),
        cuMemFreeHost(locked.cast()),
        cuMemHostUnregister(registered),
    ];
    assert_eq!(right, [0; 5]);
    let twice = [
        (cuMemFree_v2(on_device), 1, "double free?"),
        (cuMemFreeAsync(in_pool, stream), 1, "double free?"),
        (cuMemFreeHost(locked.cast()), 1, "double free?"),
        (cuMemHostUnregister(registered), 713, "double free?"),
    ];
    assert_eq!(cuStreamSynchronize(stream), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
    let all: Vec<_> = wrong.into_iter().chain(twice).collect();
    for (code, expected, text) in &all {
        assert_eq!(code, expected, "{text}");
    }
    let texts: Vec<_> = all.iter().map(|(.., text)| *text).collect();
    bound.group.assert_report(&texts);
}

#[test]
fn freeing_host_memory_under_work_is_reported() {
    extern "C" fn nothing(_: Ptr) {}
    let bound = Bound::new(LAZY);
    let on_device = device(8);
    let (copied, filled, shared) = (pinned(8), pinned(8), managed(8));
    let mut registered = [0u8; 8];
    let registered: Ptr = registered.as_mut_ptr().cast();
    assert_eq!(cuMemHostRegister_v2(registered, 8, 0), 0);
    let no = null_mut();
    assert_eq!(cuMemcpyDtoHAsync_v2(copied, on_device, 8, no), 0);
    assert_eq!(cuMemsetD8Async(filled.addr() as u64, 1, 8, no), 0);
    assert_eq!(cuMemcpyAsync(shared, on_device, 8, no), 0);
    assert_eq!(cuMemcpyAsync(on_device, registered.addr() as u64, 8, no), 0);
    assert_eq!(cuLaunchHostFunc(no, nothing, no), 0);
    assert_eq!(cuMemFreeHost(copied.cast()), 0);
    assert_eq!(cuMemFreeHost(filled.cast()), 0);
    assert_eq!(cuMemFree_v2(shared), 0);
    assert_eq!(cuMemHostUnregister(registered), 0);
    assert_eq!(cuCtxSynchronize(), 0);
    assert_eq!(cuMemFree_v2(on_device), 0);
    let fine = pinned(8);
    assert_eq!(cuMemcpyDtoHAsync_v2(fine, device(8), 8, no), 0);
    bound.group.break_with(702); // drops it
    assert_eq!(cuMemFreeHost(fine.cast()), 0);
    assert_eq!(bound.group.live("pinned"), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
    bound.group.assert_report(&[
        "pinned memory",
        "pinned memory",
        "freed while queued work uses it",
        "unregistered while queued work uses it",
        "outlived its context",
    ]);
}

#[test]
fn sizes_are_checked() {
    let group = Group::with_capacity(1, 0, 1 << 20);
    let bound = Bound::with_group(group);
    let stream = stream();
    assert_eq!(cuMemAlloc_v2(&mut 0, 0), 1);
    assert_eq!(cuMemAllocAsync(&mut 0, 0, stream), 1);
    assert_eq!(cuMemAllocManaged(&mut 0, 0, 1), 1);
    assert_eq!(cuMemAllocManaged(&mut 0, 8, 0), 1);
    assert_eq!(cuMemHostAlloc(&mut null_mut(), 0, 0), 1);
    assert_eq!(cuMemHostAlloc(null_mut(), 8, 0), 1);
    assert_eq!(cuMemHostRegister_v2(null_mut(), 8, 0), 1);
    assert_eq!(cuMemAlloc_v2(&mut 0, 2 << 20), 2);
    assert_eq!(cuMemAllocAsync(&mut 0, 2 << 20, stream), 2);
    let most = device(1000 << 10);
    assert_eq!(cuMemAlloc_v2(&mut 0, 100 << 10), 2);
    let (mut free, mut total) = (0, 0);
    assert_eq!(cuMemGetInfo_v2(&mut free, &mut total), 0);
    assert_eq!((free, total), (24 << 10, 1 << 20));
    assert_eq!(cuMemFree_v2(most), 0);
    let again = device(1000 << 10);
    assert_eq!(cuMemFree_v2(again), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

#[test]
fn registered_memory_is_page_locked() {
    let bound = Bound::new(LAZY);
    let mut memory = vec![0u8; 64];
    let start: Ptr = memory.as_mut_ptr().cast();
    assert_eq!(cuMemHostRegister_v2(start, 64, 0), 0);
    assert_eq!(
        cuMemHostRegister_v2(start.wrapping_byte_add(32), 64, 0),
        712
    );
    let mut device_address = 0;
    assert_eq!(
        cuMemHostGetDevicePointer_v2(&mut device_address, start, 0),
        0
    );
    assert_eq!(device_address, start.addr() as u64);
    assert_eq!(bound.group.live("registered"), 1);
    // It counts as the device's own too.
    assert_eq!(cuMemsetD8Async(device_address, 7, 64, null_mut()), 0);
    assert_eq!(cuCtxSynchronize(), 0);
    assert_eq!(memory, [7; 64]);
    assert_eq!(cuMemHostUnregister(start), 0);
    assert_eq!(
        cuMemHostGetDevicePointer_v2(&mut device_address, start, 0),
        1
    );
    bound.end();
}

#[test]
fn pools_have_attributes_and_give_memory() {
    let bound = Bound::with_group(Group::open(2, 0));
    let group = bound.group;
    let stream = stream();
    let mut pool = null_mut();
    let props = [1, 0, 1, group.first, 0, 0, 0, 0];
    assert_eq!(cuMemPoolCreate(&mut pool, props.as_ptr()), 0);
    assert_eq!(cuMemPoolCreate(&mut null_mut(), [0; 8].as_ptr()), 1);
    assert_eq!(cuMemPoolSetAttribute(pool, 4, &u64::MAX), 0);
    assert_eq!(cuMemPoolSetAttribute(pool, 5, &0), 1);
    let mut memory = 0;
    assert_eq!(cuMemAllocFromPoolAsync(&mut memory, 24, pool, stream), 0);
    let get = |attribute| {
        let mut value = 0;
        assert_eq!(cuMemPoolGetAttribute(pool, attribute, &mut value), 0);
        value
    };
    assert_eq!((get(4), get(7), get(8)), (u64::MAX, 24, 24));
    assert_eq!(cuMemPoolDestroy(pool), 0); // before its memory
    assert_eq!(cuMemFreeAsync(memory, stream), 0);
    assert_eq!(cuMemPoolDestroy(pool), 400);
    let mut default = null_mut();
    assert_eq!(cuDeviceGetDefaultMemPool(&mut default, group.first + 1), 0);
    assert_eq!(cuMemAllocFromPoolAsync(&mut memory, 8, default, stream), 0);
    assert_eq!(attribute(9, memory), group.first + 1);
    assert_eq!(cuMemFreeAsync(memory, stream), 0);
    assert_eq!(cuMemPoolDestroy(default), 1);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    assert_eq!(group.drain(), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    group.assert_report(&["memory pool"]);
}

#[test]
fn an_engine_without_pools() {
    let bound = Bound::new(NO_POOLS | NO_CONCURRENT_MANAGED);
    let stream = stream();
    let value = |attribute| {
        let mut value = -1;
        assert_eq!(
            cuDeviceGetAttribute(&mut value, attribute, bound.group.first),
            0
        );
        value
    };
    assert_eq!(
        [115, 89, 41, 83, 91, 88, 75, 76].map(value),
        [0, 0, 1, 1, 1, 0, 9, 0]
    );
    assert_eq!(cuMemAllocAsync(&mut 0, 8, stream), 801);
    assert_eq!(cuMemFreeAsync(0, stream), 801);
    assert_eq!(
        cuDeviceGetDefaultMemPool(&mut null_mut(), bound.group.first),
        801
    );
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

/// One attribute that is an `int`, of an address that is known.
fn attribute(attribute: c_int, ptr: u64) -> c_int {
    let mut value: c_int = -1;
    let data: *mut c_int = &mut value;
    assert_eq!(cuPointerGetAttribute(data.cast(), attribute, ptr), 0);
    value
}

#[derive(Debug, PartialEq)]
struct Known {
    kind: u32,
    ordinal: c_int,
    managed: c_int,
    ctx: Ptr,
    device: u64,
    host: u64,
    start: u64,
    bytes: usize,
}

fn known(ptr: u64) -> Known {
    let mut known = Known {
        kind: 77,
        ordinal: 77,
        managed: 77,
        ctx: null_mut::<u8>().wrapping_add(77).cast(),
        device: 77,
        host: 77,
        start: 77,
        bytes: 77,
    };
    let data: [Ptr; 8] = [
        (&raw mut known.kind).cast(),
        (&raw mut known.ordinal).cast(),
        (&raw mut known.managed).cast(),
        (&raw mut known.ctx).cast(),
        (&raw mut known.device).cast(),
        (&raw mut known.host).cast(),
        (&raw mut known.start).cast(),
        (&raw mut known.bytes).cast(),
    ];
    let attributes = [2, 9, 8, 1, 3, 4, 11, 12];
    assert_eq!(
        cuPointerGetAttributes(8, attributes.as_ptr(), data.as_ptr(), ptr),
        0
    );
    known
}

#[test]
fn addresses_tell_what_they_are() {
    let bound = Bound::new(0);
    let stream = stream();
    let ordinal = bound.group.first;
    let (on_device, in_pool) = (device(8), pooled(8, stream));
    let (locked, shared) = (pinned(8).addr() as u64, managed(8));
    let expected = |start: u64, kind, managed, ctx, host| Known {
        kind,
        ordinal,
        managed,
        ctx,
        device: start + 7,
        host: if host { start + 7 } else { 0 },
        start,
        bytes: 8,
    };
    let ctx = bound.ctx;
    assert_eq!(known(on_device + 7), expected(on_device, 2, 0, ctx, false));
    assert_eq!(
        known(in_pool + 7),
        expected(in_pool, 2, 0, null_mut(), false)
    );
    assert_eq!(known(locked + 7), expected(locked, 1, 0, ctx, true));
    assert_eq!(known(shared + 7), expected(shared, 2, 1, ctx, true));
    let unknown = Known {
        kind: 0,
        ordinal: -2,
        managed: 0,
        ctx: null_mut(),
        device: 0,
        host: 0,
        start: 0,
        bytes: 0,
    };
    assert_eq!(known(on_device + 8), unknown);
    let stack = 0u8;
    assert_eq!(known((&raw const stack).addr() as u64), unknown);
    let mut nothing = 0u64;
    assert_eq!(cuPointerGetAttribute((&raw mut nothing).cast(), 2, 8), 1);
    assert_eq!(attribute(13, locked), 1);
    // Whether other processes could open it by a handle: not memory of pools.
    assert_eq!([on_device, in_pool].map(|ptr| attribute(10, ptr)), [1, 0]);
    // Reported as a part of more, as memory that a program has mapped by itself.
    Group::misreport(on_device as usize, 64);
    assert_eq!(
        (known(on_device + 7).bytes, attribute(10, on_device)),
        (64, 0)
    );
    assert_eq!(known(on_device + 8), unknown);
    // The calls of this thread alone.
    let asked = || Group::thread_calls()["cuPointerGetAttribute"];
    let before = asked();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(attribute(13, locked), 1));
    });
    assert_eq!(asked(), before);
    assert_eq!(attribute(13, locked), 1);
    assert_eq!(asked(), before + 1);
    assert_eq!(cuMemFree_v2(on_device), 0);
    assert_eq!(cuMemFreeAsync(in_pool, stream), 0);
    assert_eq!(cuStreamSynchronize(stream), 0);
    assert_eq!(cuMemFree_v2(shared), 0);
    assert_eq!(cuMemFreeHost(locked as Ptr), 0);
    for ptr in [on_device, in_pool, locked, shared] {
        assert_eq!(known(ptr), unknown);
    }
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

#[test]
fn kernels_reach_pinned_and_managed_memory_only() {
    let ptx = c".version 8.0\n.visible .entry fill_i64 (.param .u64 p) { ret; }";
    for flags in [0, LAZY] {
        let bound = Bound::new(flags);
        let mut module = null_mut();
        assert_eq!(cuModuleLoadData(&mut module, c"\x7fELF".as_ptr()), 200);
        assert_eq!(cuModuleLoadData(&mut module, c".version 8.0".as_ptr()), 218);
        assert_eq!(cuModuleLoadData(&mut module, ptx.as_ptr()), 0);
        let mut fill = null_mut();
        assert_eq!(
            cuModuleGetFunction(&mut fill, module, c"fail".as_ptr()),
            500
        );
        assert_eq!(
            cuModuleGetFunction(&mut fill, module, c"fill_i64".as_ptr()),
            0
        );
        let launch = |out: u64, grid| {
            let (value, n) = (-2i64, 2u64);
            let params: [Ptr; 3] = [
                (&raw const out).cast_mut().cast(),
                (&raw const value).cast_mut().cast(),
                (&raw const n).cast_mut().cast(),
            ];
            launch_kernel(fill, grid, &params)
        };
        let (locked, shared) = (pinned(16), managed(16));
        assert_eq!(launch(locked.addr() as u64, 0), 1);
        assert_eq!(launch(locked.addr() as u64, 2), 0);
        assert_eq!(launch(shared, 2), 0);
        assert_eq!(cuCtxSynchronize(), 0);
        assert_eq!(host::<16>(locked), host::<16>(shared as *const u8));
        assert_eq!(host::<16>(locked)[..8], (-2i64).to_ne_bytes());
        assert_eq!(cuMemFreeHost(locked.cast()), 0);
        assert_eq!(cuMemFree_v2(shared), 0);
        // Pageable memory, and addresses that are not aligned.
        let mut pageable = [0i64; 2];
        let wrong = pageable.as_mut_ptr().addr() as u64 + if flags == LAZY { 4 } else { 0 };
        assert_eq!(launch(wrong, 2), 0);
        let expected = if flags == LAZY { 716 } else { 700 };
        assert_eq!(cuCtxSynchronize(), expected);
        assert_eq!(pageable, [0; 2]);
        assert_eq!(cuModuleUnload(module), expected);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
        match flags {
            LAZY => bound.group.assert_clean(),
            _ => bound
                .group
                .assert_report(&["not an address of this device"]),
        }
    }
}

#[test]
fn codes_have_names() {
    let mut text = null();
    assert_eq!(cuGetErrorName(700, &mut text), 0);
    // SAFETY: the library returned a static text.
    let text_of_it = unsafe { CStr::from_ptr(text) };
    assert_eq!(text_of_it, c"CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(cuGetErrorName(123456, &mut text), 1);
    assert!(text.is_null());
}
