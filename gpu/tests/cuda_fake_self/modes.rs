//! The modes in which drivers differ.

use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::fake::{
    FREE_BLOCKS, Group, INSTANT, LAZY, LISTS_UP_TO_64, LISTS_WITHOUT_ATTRIBUTES, OOM_IS_INVALID,
    PINNING_FAILS, POOL_CREATION_FAILS,
};
use crate::faults::child;
use crate::raw::*;

#[test]
fn page_locking_fails_with_three_codes_in_turn() {
    let bound = Bound::new(PINNING_FAILS);
    let mut bytes = [0u8; 64];
    let mut ptr = null_mut();
    for _ in 0..2 {
        assert_eq!(cuMemHostAlloc(&mut ptr, 64, 0), 1);
        assert_eq!(cuMemHostAlloc(&mut ptr, 64, 0), 208);
        assert_eq!(
            cuMemHostRegister_v2(bytes.as_mut_ptr().cast(), bytes.len(), 0),
            911
        );
    }
    assert!(ptr.is_null());
    assert_eq!(cuCtxSynchronize(), 0, "the device is not lost");
    bound.end();
}

/// `CUmemPoolProps` of a pool of this ordinal.
fn pool_props(ordinal: i32) -> [i32; 22] {
    let mut props = [0; 22];
    (props[0], props[2], props[3]) = (1, 1, ordinal);
    props
}

#[test]
fn pools_that_the_attribute_promises_cannot_be_created() {
    for (flags, code) in [(0, 0), (POOL_CREATION_FAILS, 801)] {
        let bound = Bound::new(flags);
        let mut supported = 0;
        assert_eq!(
            cuDeviceGetAttribute(&mut supported, 115, bound.group.first),
            0
        );
        assert_eq!(supported, 1);
        let mut pool = null_mut();
        let props = pool_props(bound.group.first);
        assert_eq!(cuMemPoolCreate(&mut pool, props.as_ptr()), code);
        if code == 0 {
            assert_eq!(cuMemPoolDestroy(pool), 0);
        }
        bound.end();
    }
}

/// Gives a list of copies of one byte each from one block to another.
fn list(from: u64, to: u64, copies: usize, attributes: usize, stream: Ptr) -> i32 {
    let at = |start: u64| (start..).take(copies).collect::<Vec<_>>();
    let (dsts, srcs, sizes) = (at(to), at(from), vec![1usize; copies]);
    let (dsts, srcs, sizes) = (dsts.as_ptr(), srcs.as_ptr(), sizes.as_ptr());
    let order = Attributes::new(1);
    match attributes {
        0 => cuMemcpyBatchAsync_v2(dsts, srcs, sizes, copies, null(), null(), 0, stream),
        n => cuMemcpyBatchAsync_v2(dsts, srcs, sizes, copies, &order, &0, n, stream),
    }
}

#[test]
fn lists_are_refused_by_length_and_by_attributes() {
    for (flags, long, with, without) in [
        (0, 0, 0, 1),
        (LISTS_UP_TO_64, 1, 0, 1),
        (LISTS_WITHOUT_ATTRIBUTES, 1, 1, 0),
    ] {
        let bound = Bound::new(flags);
        let stream = stream();
        let (from, to) = (device(9000), device(9000));
        assert_eq!(cuMemsetD8Async(from, 1, 9000, stream), 0);
        assert_eq!(list(from, to, 64, 1, stream), with, "{flags}");
        assert_eq!(list(from, to, 65, 1, stream), long, "{flags}");
        assert_eq!(list(from, to, 8192, 1, stream), long, "{flags}");
        assert_eq!(list(from, to, 64, 0, stream), without, "{flags}");
        assert_eq!(cuCtxSynchronize(), 0);
        bound
            .group
            .assert_report(&["device", "device", "context", "stream"]);
        assert_eq!(list(from, to, 8193, 1, stream), 1);
        assert_eq!(cuStreamDestroy_v2(stream), 0);
        for memory in [from, to] {
            assert_eq!(cuMemFree_v2(memory), 0);
        }
        assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
        bound.group.assert_report(&["8193 copies"]);
    }
}

#[test]
fn out_of_memory_is_answered_as_invalid() {
    for (flags, code) in [(0, 2), (OOM_IS_INVALID, 1)] {
        let bound = Bound::with_group(Group::with_capacity(1, flags, 1 << 20));
        assert_eq!(cuMemAlloc_v2(&mut 0, 2 << 20), code);
        assert_eq!(cuMemAlloc_v2(&mut 0, 1 << 52), code);
        assert_eq!(cuMemAllocAsync(&mut 0, 2 << 20, null_mut()), code);
        assert_eq!(cuMemHostAlloc(&mut null_mut(), 1 << 62, 0), code);
        assert_eq!(cuMemAllocManaged(&mut 0, 1 << 62, 1), code);
        bound.end();
    }
}

#[test]
fn instant_work_is_complete_at_once() {
    let bound = Bound::new(INSTANT);
    let stream = stream();
    let memory = device(1 << 20);
    let out = pinned(4);
    for byte in 0..100 {
        assert_eq!(cuMemsetD8Async(memory, byte, 1 << 20, stream), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(out, memory, 4, stream), 0);
        let event = recorded(stream);
        assert_eq!(cuEventQuery(event), 0);
        assert_eq!(host::<4>(out), [byte; 4]);
        assert_eq!(cuEventDestroy_v2(event), 0);
    }

    // Behind a host function that blocks, work is not complete.
    static OPEN: AtomicBool = AtomicBool::new(false);
    extern "C" fn wait(_: Ptr) {
        while !OPEN.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(cuLaunchHostFunc(stream, wait, null_mut()), 0);
    let event = recorded(stream);
    assert_eq!(cuEventQuery(event), 600);
    OPEN.store(true, Ordering::SeqCst);
    assert_eq!(cuEventSynchronize(event), 0);
    assert_eq!(cuLaunchHostFunc(stream, wait, null_mut()), 0);
    assert_eq!(cuStreamQuery(stream), 0);

    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!(cuMemFreeHost(out.cast()), 0);
    bound.end();
}

#[test]
fn frees_block_all_calls_while_host_functions_are_queued() {
    static OPEN: AtomicBool = AtomicBool::new(false);
    extern "C" fn wait(_: Ptr) {
        while !OPEN.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    for flags in [0, FREE_BLOCKS] {
        OPEN.store(false, Ordering::SeqCst);
        let bound = Bound::new(flags);
        let stream = stream();
        let (out, event) = (pinned(4), event());
        assert_eq!(cuLaunchHostFunc(stream, wait, null_mut()), 0);
        let (ctx, out, raw) = (bound.ctx.addr(), out.addr(), event.addr());
        // The calls of two other threads: the free, and a query after it.
        let (told, done) = channel();
        let thread = std::thread::spawn(move || {
            assert_eq!(cuCtxPushCurrent_v2(without_provenance_mut(ctx)), 0);
            let query = told.clone();
            let other = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(cuEventQuery(without_provenance_mut(raw)), 0);
                query.send("query").unwrap();
            });
            assert_eq!(cuMemFreeHost(without_provenance_mut(out)), 0);
            told.send("free").unwrap();
            other.join().unwrap();
        });
        let first = done.recv_timeout(Duration::from_millis(200));
        match flags {
            0 => assert_eq!(first, Ok("free")),
            _ => assert_eq!(first, Err(RecvTimeoutError::Timeout)),
        }
        OPEN.store(true, Ordering::SeqCst);
        thread.join().unwrap();
        assert_eq!(done.iter().count(), if flags == 0 { 1 } else { 2 });
        assert_eq!(cuEventDestroy_v2(event), 0);
        assert_eq!(cuStreamDestroy_v2(stream), 0);
        bound.end();
    }
}

#[test]
fn a_blocking_free_runs_the_host_functions_of_a_lazy_engine() {
    static CALLED: AtomicBool = AtomicBool::new(false);
    extern "C" fn call(_: Ptr) {
        CALLED.store(true, Ordering::SeqCst);
    }
    let bound = Bound::new(FREE_BLOCKS | LAZY);
    let stream = stream();
    let memory = device(4);
    assert_eq!(cuLaunchHostFunc(stream, call, null_mut()), 0);
    assert!(!CALLED.load(Ordering::SeqCst));
    assert_eq!(cuMemFree_v2(memory), 0);
    assert!(CALLED.load(Ordering::SeqCst));
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

const FLAGS: &str = "FAKE_CUDA_FLAGS";

#[test]
fn the_environment_adds_flags() {
    child("modes::lazy_and_pinning_fails", FLAGS, "33");
    child("modes::instant_unless_lazy", FLAGS, "2048");
}

/// Whether the program has been started with these flags.
fn has(flags: &str) -> bool {
    std::env::var(FLAGS).is_ok_and(|set| set == flags)
}

/// The code of a query of an event behind a fill.
fn query(flags: u32) -> i32 {
    let bound = Bound::new(flags);
    let memory = device(1 << 20);
    assert_eq!(cuMemsetD8Async(memory, 1, 1 << 20, null_mut()), 0);
    let event = recorded(null_mut());
    let code = cuEventQuery(event);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(bound.group.drain(), 0);
    assert_eq!(cuMemFree_v2(memory), 0);
    bound.end();
    code
}

#[test]
fn lazy_and_pinning_fails() {
    if has("33") {
        assert_eq!(query(0), 600);
        assert_eq!(query(INSTANT), 0, "not both");
        let bound = Bound::new(0);
        assert_eq!(cuMemHostAlloc(&mut null_mut(), 64, 0), 1);
        bound.end();
    }
}

#[test]
fn instant_unless_lazy() {
    if has("2048") {
        assert_eq!(query(0), 0);
        assert_eq!(query(LAZY), 600);
    }
}
