//! The stand-in notices what the other tests rely on it to notice.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::fake::{Group, LAZY, fake};
use crate::vendor::unset_context;

type Ptr = *mut c_void;

/// Declares driver functions that answer a code.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {$(
        #[allow(non_snake_case)]
        fn $name($($arg: $type),*) -> i32 {
            fake!($name($($arg => $type),*) -> i32)
        }
    )*};
}

functions! {
    cuInit(flags: u32);
    cuDevicePrimaryCtxRetain(ctx: *mut Ptr, dev: i32);
    cuDevicePrimaryCtxRelease_v2(dev: i32);
    cuCtxSetCurrent(ctx: Ptr);
    cuCtxSynchronize();
    cuStreamCreate(stream: *mut Ptr, flags: u32);
    cuStreamDestroy_v2(stream: Ptr);
    cuStreamSynchronize(stream: Ptr);
    cuEventQuery(event: Ptr);
    cuEventCreate(event: *mut Ptr, flags: u32);
    cuEventDestroy_v2(event: Ptr);
    cuIpcGetEventHandle(handle: *mut [u64; 8], event: Ptr);
    cuIpcOpenEventHandle(event: *mut Ptr, handle: IpcHandle);
    cuMemCreate(handle: *mut u64, bytes: usize, prop: *const [i32; 4], flags: u64);
    cuMemRelease(handle: u64);
    cuMemAddressReserve(ptr: *mut u64, bytes: usize, alignment: usize, at: u64, flags: u64);
    cuMemAddressFree(ptr: u64, bytes: usize);
    cuMemMap(ptr: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(ptr: u64, bytes: usize);
    cuMemSetAccess(ptr: u64, bytes: usize, access: *const [i32; 3], count: usize);
    cuMemAlloc_v2(ptr: *mut u64, bytes: usize);
    cuMemFree_v2(ptr: u64);
    cuMemHostAlloc(ptr: *mut *mut u8, bytes: usize, flags: u32);
    cuMemFreeHost(ptr: *mut u8);
    cuMemcpyDtoHAsync_v2(dst: *mut u8, src: u64, bytes: usize, stream: Ptr);
    cuMemsetD8Async(dst: u64, byte: u8, bytes: usize, stream: Ptr);
    cuLaunchHostFunc(stream: Ptr, function: extern "C" fn(Ptr), data: Ptr);
}

/// `CUipcEventHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
struct IpcHandle([u64; 8]);

/// What a call writes, which must succeed.
fn made<T: Default>(make: impl FnOnce(*mut T) -> i32) -> T {
    let mut made = T::default();
    assert_eq!(make(&mut made), 0);
    made
}

fn made_ptr<T>(make: impl FnOnce(*mut *mut T) -> i32) -> *mut T {
    let mut made = null_mut();
    assert_eq!(make(&mut made), 0);
    made
}

fn memory() -> u64 {
    made(|ptr| cuMemAlloc_v2(ptr, 8))
}

fn stream() -> Ptr {
    made_ptr(|stream| cuStreamCreate(stream, 1))
}

/// Misuses a fresh device with its context current. Its report then has exactly these lines, each with one
/// of the texts.
#[track_caller]
fn reports(flags: u32, misuse: impl FnOnce(Group), expected: &[&str]) {
    let group = Group::open(2, flags);
    assert_eq!(cuInit(0), 0);
    let context = made_ptr(|ctx| cuDevicePrimaryCtxRetain(ctx, group.first));
    assert_eq!(cuCtxSetCurrent(context), 0);
    misuse(group);
    unset_context();
    let _ = group.drain();
    assert_eq!(cuDevicePrimaryCtxRelease_v2(group.first), 0);
    let report = group.report();
    let fits = report.lines().count() == expected.len()
        && report
            .lines()
            .zip(expected)
            .all(|(line, text)| line.contains(text));
    assert!(fits, "expected {expected:#?}, found:\n{report}");
    assert!(group.close());
}

/// A call that is to fail does nothing, and fails once.
#[test]
fn faults_that_are_asked_for() {
    let faults = |group: Group| {
        group.fail("cuMemAlloc_v2", 2, 999);
        let first = memory();
        assert_eq!(cuMemAlloc_v2(&mut 0, 8), 999);
        group.fail("*", 1, 46);
        assert_eq!(cuMemFree_v2(first), 46);
        assert_eq!((group.live("device"), group.clear()), (1, 2));
        assert_eq!(cuMemFree_v2(first), 0);
        assert_eq!(group.calls("cuMemFree_v2"), 2);
        group.break_with(700);
        assert_eq!((cuCtxSynchronize(), cuMemAlloc_v2(&mut 0, 8)), (700, 700));
    };
    reports(0, faults, &[]);
}

#[test]
fn leaks() {
    let leak = |group: Group| {
        let _ = (memory(), stream());
        assert_eq!((group.live("device"), group.live("streams")), (1, 1));
    };
    reports(0, leak, &["stream", "device memory"]);
}

/// Of memory on the device and on the host, before and after the work that uses it has run.
#[test]
fn uses_after_frees() {
    let before_the_work = |_: Group| {
        let memory = memory();
        assert_eq!(cuMemsetD8Async(memory, 0, 8, null_mut()), 0);
        assert_eq!(cuMemFree_v2(memory), 0);
        assert_eq!(cuCtxSynchronize(), 700);
    };
    reports(LAZY, before_the_work, &["not allocated, or freed"]);
    let of_the_host = |_: Group| {
        let (from, to) = (memory(), made_ptr(|ptr| cuMemHostAlloc(ptr, 8, 0)));
        assert_eq!(cuMemcpyDtoHAsync_v2(to, from, 8, null_mut()), 0);
        assert_eq!((cuMemFreeHost(to), cuCtxSynchronize()), (0, 0));
        assert_eq!((cuMemFree_v2(from), cuMemFree_v2(from)), (0, 1));
    };
    let texts = ["freed while queued work uses it", "double free?"];
    reports(LAZY, of_the_host, &texts);
    let past_the_end = |_: Group| {
        let memory = memory();
        assert_eq!(cuMemsetD8Async(memory, 0, 9, null_mut()), 0);
        assert_eq!(cuCtxSynchronize(), 700);
        assert_eq!(cuMemFree_v2(memory), 700);
    };
    reports(0, past_the_end, &["1 bytes past the end"]);
}

/// Who does not wait, on the host or on another stream, does not see what was written.
#[test]
fn missing_waits() {
    let read = |_: Group| {
        let (writer, reader) = (stream(), stream());
        let (memory, to) = (memory(), made_ptr(|ptr| cuMemHostAlloc(ptr, 8, 0)));
        // SAFETY: nothing else uses the 8 bytes of page-locked memory here: every copy to it was waited
        // for, or has not begun, since nothing runs on a lazy device before it is waited for.
        let seen = || unsafe { to.read() };
        assert_eq!(cuMemsetD8Async(memory, 7, 8, writer), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(to, memory, 8, reader), 0);
        assert_eq!(cuStreamSynchronize(reader), 0);
        assert_ne!(seen(), 7, "no wait for the writer");
        assert_eq!(cuMemcpyDtoHAsync_v2(to, memory, 8, writer), 0);
        assert_ne!(seen(), 7, "no wait on the host");
        assert_eq!(cuStreamSynchronize(writer), 0);
        assert_eq!(seen(), 7);
        assert_eq!((cuMemFreeHost(to), cuMemFree_v2(memory)), (0, 0));
        for stream in [writer, reader] {
            assert_eq!(cuStreamDestroy_v2(stream), 0);
        }
    };
    reports(LAZY, read, &[]);
}

#[test]
fn handles_and_host_functions() {
    extern "C" fn wait(_: Ptr) {
        assert_eq!(cuCtxSynchronize(), 800);
    }
    let misuse = |_: Group| {
        assert_eq!(cuEventQuery(8 as Ptr), 400);
        assert_eq!(cuLaunchHostFunc(null_mut(), wait, null_mut()), 0);
        assert_eq!(cuCtxSynchronize(), 0);
    };
    reports(0, misuse, &["event 0x8: unknown", "inside a host function"]);
}

/// Memory is mapped as it was made, to addresses that stay until it is unmapped.
#[test]
fn virtual_memory() {
    const BYTES: usize = 2 << 20;
    let misuse = |group: Group| {
        let props = [1, 1, 1, group.first];
        assert_eq!(cuMemCreate(&mut 0, BYTES - 1, &props, 0), 1);
        let memory = made(|handle| cuMemCreate(handle, BYTES, &props, 0));
        let at = made(|ptr| cuMemAddressReserve(ptr, 2 * BYTES, 0, 0, 0));
        assert_eq!(group.live("reserved"), 2 * BYTES as u64);
        // More than there is, part of it, and what is there already.
        assert_eq!(cuMemMap(at, 2 * BYTES, 0, memory, 0), 1);
        assert_eq!(cuMemMap(at, BYTES, BYTES, memory, 0), 1);
        assert_eq!(cuMemMap(at, BYTES, 0, memory, 0), 0);
        assert_eq!(cuMemMap(at, BYTES, 0, memory, 0), 1);
        let (here, elsewhere) = ([1, group.first, 3], [1, group.first + 2, 3]);
        assert_eq!(cuMemSetAccess(at, BYTES, &elsewhere, 1), 1);
        assert_eq!(cuMemSetAccess(at, BYTES, &here, 1), 0);
        // What is mapped keeps the memory.
        assert_eq!((cuMemRelease(memory), cuMemRelease(memory)), (0, 400));
        assert_eq!(cuMemsetD8Async(at, 7, BYTES, null_mut()), 0);
        assert_eq!((cuCtxSynchronize(), cuMemFree_v2(at)), (0, 1));
        assert_eq!(cuMemAddressFree(at, 2 * BYTES), 1);
        assert_eq!((cuMemUnmap(at, BYTES), cuMemUnmap(at, BYTES)), (0, 1));
        assert_eq!(cuMemAddressFree(at, BYTES), 1);
        assert_eq!(cuMemAddressFree(at, 2 * BYTES), 0);
        assert_eq!(cuMemAddressFree(at, 2 * BYTES), 1);
    };
    let texts = [
        "destroyed, or of another kind",
        "cuMemFree of mapped memory",
        "mapped, or of another length",
        "cuMemUnmap",
        "mapped, or of another length",
        "not a reserved address",
    ];
    reports(0, misuse, &texts);
}

/// Events for other processes are few, and not for this one.
#[test]
fn interprocess_events() {
    let misuse = |_: Group| {
        assert_eq!(cuEventCreate(&mut null_mut(), 4), 1);
        let mut events = Vec::new();
        let refused = loop {
            let mut event = null_mut();
            match cuEventCreate(&mut event, 6) {
                0 => events.push(event),
                code => break code,
            }
        };
        assert_eq!(refused, 2);
        assert_eq!(events.len(), 64);
        let mut handle = IpcHandle([0; 8]);
        assert_eq!(cuIpcGetEventHandle(&mut handle.0, events[0]), 0);
        assert_eq!(cuIpcOpenEventHandle(&mut null_mut(), handle), 201);
        handle.0[0] ^= 1;
        assert_eq!(cuIpcOpenEventHandle(&mut null_mut(), handle), 400);
        for event in events {
            assert_eq!(cuEventDestroy_v2(event), 0);
        }
        let plain = made_ptr(|event| cuEventCreate(event, 2));
        assert_eq!(cuIpcGetEventHandle(&mut handle.0, plain), 1);
        assert_eq!(cuEventDestroy_v2(plain), 0);
    };
    reports(0, misuse, &[]);
}
