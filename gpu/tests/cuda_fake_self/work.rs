//! Streams, events, copies, host functions.

use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::fake::{Group, LAZY, NO_BATCH, PAGEABLE_EAGER};
use crate::raw::*;

#[test]
fn events_stand_where_they_were_recorded() {
    let bound = Bound::new(LAZY);
    let (one, two) = (stream(), stream());
    let memory = device(4);
    let out = pinned(8);
    let fill = |byte, stream| assert_eq!(cuMemsetD8Async(memory, byte, 4, stream), 0);

    let event = event();
    assert_eq!(cuEventQuery(event), 0, "never recorded");
    assert_eq!(cuStreamWaitEvent(two, event, 0), 0);
    fill(1, one);
    assert_eq!(cuEventRecord(event, one), 0);
    assert_eq!(cuStreamWaitEvent(two, event, 0), 0);
    assert_eq!(cuMemcpyDtoHAsync_v2(out, memory, 4, two), 0);
    fill(2, one);
    assert_eq!(cuEventRecord(event, one), 0); // the wait stays where it was
    for _ in 0..3 {
        assert_eq!(cuEventQuery(event), 600);
        assert_eq!(cuStreamQuery(two), 600);
    }
    assert_eq!(host::<4>(out), [0xA5; 4]);
    assert_eq!(cuStreamSynchronize(two), 0);
    assert_eq!(host::<4>(out), [1; 4]);
    assert_eq!(cuStreamQuery(two), 0);
    assert_eq!(cuEventQuery(event), 600);
    assert_eq!(cuEventDestroy_v2(event), 0); // unfinished
    assert_eq!(cuStreamDestroy_v2(one), 0); // with work
    assert_eq!(group_pending(&bound), 2);
    assert_eq!(cuCtxSynchronize(), 0);
    assert_eq!(group_pending(&bound), 0);
    assert_eq!(cuMemcpyDtoH_v2(out, memory, 4), 0);
    assert_eq!(host::<4>(out), [2; 4]);

    assert_eq!(cuStreamDestroy_v2(two), 0);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!(cuMemFreeHost(out.cast()), 0);
    bound.end();
}

fn group_pending(bound: &Bound) -> u64 {
    bound.group.live("pending")
}

#[test]
fn default_streams_are_queues_of_their_own() {
    let bound = Bound::new(LAZY);
    let per_thread = without_provenance_mut(2);
    let (legacy, again, own) = (null_mut(), without_provenance_mut(1), stream());
    let memory = device(4);
    for stream in [legacy, per_thread, own] {
        assert_eq!(cuMemsetD8Async(memory, 1, 4, stream), 0);
        assert_eq!(cuStreamQuery(stream), 600);
    }
    assert_eq!(
        cuStreamQuery(again),
        600,
        "another name of the legacy stream"
    );
    let ctx = bound.ctx.addr();
    let elsewhere = std::thread::spawn(move || {
        assert_eq!(cuCtxPushCurrent_v2(without_provenance_mut(ctx)), 0);
        let per_thread = without_provenance_mut(2);
        assert_eq!(cuStreamQuery(per_thread), 0, "that of this thread");
        assert_eq!(cuStreamQuery(null_mut()), 600);
    });
    elsewhere.join().unwrap();
    assert_eq!(cuStreamSynchronize(again), 0);
    assert_eq!(cuStreamQuery(legacy), 0);
    assert_eq!(cuStreamQuery(per_thread), 600);
    assert_eq!(cuCtxSynchronize(), 0);
    assert_eq!(cuStreamQuery(per_thread), 0);
    assert_eq!(cuStreamDestroy_v2(own), 0);
    assert_eq!(cuMemFree_v2(memory), 0);
    bound.end();
}

#[test]
fn pageable_sources_are_read_early_or_late() {
    for flags in [LAZY, LAZY | PAGEABLE_EAGER] {
        let bound = Bound::new(flags);
        let memory = device(8);
        let out = pinned(8);
        let mut pageable = [1u8; 4];
        let locked = pinned(4);
        // SAFETY: `locked` has 4 bytes of page-locked memory, and no copy runs meanwhile: the
        // engine is lazy.
        unsafe { locked.write_bytes(1, 4) };
        assert_eq!(
            cuMemcpyHtoDAsync_v2(memory, pageable.as_ptr(), 4, null_mut()),
            0
        );
        let upper = memory + 4;
        assert_eq!(cuMemcpyAsync(upper, locked.addr() as u64, 4, null_mut()), 0);
        pageable.fill(2);
        // SAFETY: `locked` has 4 bytes of page-locked memory, and no copy runs meanwhile: the
        // engine is lazy.
        unsafe { locked.write_bytes(2, 4) };
        assert_eq!(cuMemcpyDtoHAsync_v2(out, memory, 8, null_mut()), 0);
        // Down to pageable memory: never at once.
        let mut down = [0u8; 4];
        assert_eq!(
            cuMemcpyDtoHAsync_v2(down.as_mut_ptr(), memory, 4, null_mut()),
            0
        );
        assert_eq!(down, [0; 4]);
        assert_eq!(cuCtxSynchronize(), 0);
        let first = if flags & PAGEABLE_EAGER != 0 { 1 } else { 2 };
        assert_eq!(host::<8>(out), [first, first, first, first, 2, 2, 2, 2]);
        assert_eq!(down, [first; 4]);
        for ptr in [out, locked] {
            assert_eq!(cuMemFreeHost(ptr.cast()), 0);
        }
        assert_eq!(cuMemFree_v2(memory), 0);
        bound.end();
    }
}

#[test]
fn the_direction_must_fit_the_addresses() {
    let bound = Bound::new(LAZY);
    let (a, b) = (device(8), managed(8));
    let locked = pinned(8);
    let mut pageable = [3u8; 8];
    let host_address = pageable.as_mut_ptr().expose_provenance() as u64;
    let no = null_mut();
    assert_eq!(cuMemcpyAsync(b, host_address, 8, no), 0); // host to managed
    assert_eq!(cuMemcpyAsync(a, b, 8, no), 0);
    assert_eq!(cuMemcpyAsync(locked.addr() as u64, a, 8, no), 0);
    assert_eq!(cuMemcpyDtoDAsync_v2(b, locked.addr() as u64, 8, no), 0); // all the device's
    assert_eq!(cuMemcpyDtoHAsync_v2(pageable.as_mut_ptr(), b, 8, no), 0);
    assert_eq!(cuCtxSynchronize(), 0);
    assert_eq!(host::<8>(locked), [3; 8]);
    bound
        .group
        .assert_report(&["live", "live", "live", "live: context"]);
    assert_eq!(cuMemcpyAsync(0, a, 8, no), 1);
    assert_eq!(cuMemcpyAsync(a, a, 0, no), 0);
    bound
        .group
        .assert_report(&["live", "live", "live", "live: context"]);
    // These are wrong.
    assert_eq!(cuMemcpyHtoDAsync_v2(host_address, locked, 8, no), 1);
    assert_eq!(
        cuMemcpyHtoDAsync_v2(a, without_provenance_mut(a as usize), 4, no),
        1
    );
    assert_eq!(cuMemcpyDtoHAsync_v2(locked, host_address, 8, no), 1);
    assert_eq!(cuMemcpyDtoDAsync_v2(a, host_address, 8, no), 1);
    assert_eq!(cuMemcpyAsync(a, a + 4, 8, no), 1);
    assert_eq!(cuMemcpyAsync(a, locked.addr() as u64 + 4, 8, no), 1);
    assert_eq!(cuMemsetD8Async(host_address, 0, 8, no), 1);
    for (ptr, free) in [(a, cuMemFree_v2 as fn(u64) -> i32), (b, cuMemFree_v2)] {
        assert_eq!(free(ptr), 0);
    }
    assert_eq!(cuMemFreeHost(locked.cast()), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
    bound.group.assert_report(&[
        "the wrong way, from Locked to Pageable",
        "overlaps itself",
        "the wrong way, from Pageable to Locked",
        "the wrong way, from Pageable to Device",
        "overlaps itself",
        "past the end of pinned memory",
        "memset of 8 bytes",
    ]);
}

#[test]
fn copies_of_wrong_device_memory_end_the_engine() {
    type Wrong = fn(u64, Ptr);
    let cases: [(Wrong, &str); 4] = [
        (
            |memory, stream| assert_eq!(cuMemsetD8Async(memory, 0, 9, stream), 0),
            "1 bytes past the end",
        ),
        (
            |memory, stream| {
                assert_eq!(
                    cuMemcpyHtoDAsync_v2(memory + 64, [0u8; 4].as_ptr(), 4, stream),
                    0
                );
            },
            "not allocated, or freed",
        ),
        (
            |memory, stream| {
                assert_eq!(cuMemsetD8Async(memory, 0, 8, stream), 0);
                assert_eq!(cuMemFreeAsync(memory, stream), 0);
                assert_eq!(cuMemsetD8Async(memory, 0, 8, stream), 0);
            },
            "not allocated, or freed",
        ),
        (
            |memory, stream| {
                let other = Bound::new(0);
                let foreign = device(8);
                assert_eq!(cuCtxPopCurrent_v2(null_mut()), 0);
                assert_eq!(cuMemcpyAsync(memory, foreign, 8, stream), 0);
                assert_eq!(cuCtxPushCurrent_v2(other.ctx), 0);
            },
            "not an address of this device",
        ),
    ];
    for (wrong, text) in cases {
        for flags in [0, LAZY] {
            let bound = Bound::new(flags);
            let stream = stream();
            let memory = pooled(8, stream);
            wrong(memory, stream);
            assert_eq!(cuStreamSynchronize(stream), 700, "{text}");
            assert_eq!(cuMemAlloc_v2(&mut 0, 8), 700);
            assert_eq!(cuStreamDestroy_v2(stream), 700);
            cuMemFreeAsync(memory, stream);
            assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
            let report = bound.group.report();
            assert!(report.contains(text), "{report}");
        }
    }
}

#[test]
fn freed_memory_that_work_still_uses_is_noticed() {
    let bound = Bound::new(LAZY);
    let memory = device(8);
    assert_eq!(cuMemsetD8Async(memory, 0, 8, null_mut()), 0);
    assert_eq!(cuMemFree_v2(memory), 0); // runs nothing
    assert_eq!(bound.group.live("pending"), 1);
    assert_eq!(cuCtxSynchronize(), 700);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
    bound.group.assert_report(&["not allocated, or freed"]);
}

#[test]
fn batches_are_all_or_nothing() {
    for v2 in [false, true] {
        let bound = Bound::new(LAZY);
        let stream = stream();
        let (memory, locked) = (device(16), pinned(16));
        let pageable = [[1u8; 4], [2; 4], [3; 4]];
        let source = |i: usize| pageable[i].as_ptr().expose_provenance() as u64;
        let failed = std::cell::Cell::new(0);
        let batch = |dsts: &[u64],
                     srcs: &[u64],
                     sizes: &[usize],
                     attrs: &[Attributes],
                     starts: &[usize],
                     stream| {
            let mut index = 77;
            let (dsts, srcs, sizes, n) =
                (dsts.as_ptr(), srcs.as_ptr(), sizes.as_ptr(), sizes.len());
            let (attrs, starts, count) = (attrs.as_ptr(), starts.as_ptr(), starts.len());
            let code = match v2 {
                true => cuMemcpyBatchAsync_v2(dsts, srcs, sizes, n, attrs, starts, count, stream),
                false => cuMemcpyBatchAsync(
                    dsts, srcs, sizes, n, attrs, starts, count, &mut index, stream,
                ),
            };
            failed.set(index);
            code
        };
        let orders = [Attributes::new(2), Attributes::new(1)];
        let dsts = [memory, memory + 4, memory + 8];
        let srcs = [source(0), source(1), source(2)];
        assert_eq!(batch(&dsts, &srcs, &[4; 3], &orders, &[0, 1], stream), 0);
        assert_eq!(group_pending(&bound), 1);

        // Nothing of these is queued.
        assert_eq!(
            batch(&dsts, &srcs, &[4; 3], &orders, &[0, 1], null_mut()),
            1
        );
        assert_eq!(batch(&dsts, &srcs, &[4, 4, 0], &orders, &[0, 1], stream), 1);
        assert_eq!(failed.get(), if v2 { 77 } else { 2 });
        assert_eq!(
            batch(
                &[memory, 0, memory],
                &srcs,
                &[4; 3],
                &orders,
                &[0, 1],
                stream
            ),
            1
        );
        assert_eq!(failed.get(), if v2 { 77 } else { 1 });
        assert_eq!(batch(&dsts, &srcs, &[4; 3], &orders, &[1, 2], stream), 1);
        assert_eq!(batch(&dsts, &srcs, &[4; 3], &orders, &[0, 0], stream), 1);
        assert_eq!(batch(&dsts, &srcs, &[4; 3], &orders, &[0, 3], stream), 1);
        assert_eq!(
            batch(&dsts, &srcs, &[4; 3], &[Attributes::new(0)], &[0], stream),
            1
        );
        assert_eq!(batch(&dsts, &srcs, &[4; 3], &[], &[], stream), 1);
        assert_eq!(batch(&[], &[], &[], &orders, &[0, 1], stream), 1);
        assert_eq!(group_pending(&bound), 1);

        let down = [locked.addr() as u64, locked.addr() as u64 + 4];
        let up = [memory, memory + 4];
        assert_eq!(
            batch(&down, &up, &[4, 8], &[Attributes::new(3)], &[0], stream),
            0
        );
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(host::<12>(locked), [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
        assert_eq!(cuStreamDestroy_v2(stream), 0);
        assert_eq!(cuMemFree_v2(memory), 0);
        assert_eq!(cuMemFreeHost(locked.cast()), 0);
        bound.end();
    }
    let bound = Bound::new(NO_BATCH);
    let stream = stream();
    let attributes = Attributes::new(1);
    let code = cuMemcpyBatchAsync_v2(null(), null(), null(), 0, &attributes, &0, 1, stream);
    assert_eq!(code, 801);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

#[test]
fn host_functions_run_in_order_and_may_not_call() {
    static CALLED: AtomicU32 = AtomicU32::new(0);
    static ANSWER: AtomicI32 = AtomicI32::new(-1);
    extern "C" fn count(data: Ptr) {
        assert_eq!(data.addr(), 5);
        CALLED.fetch_add(1, Ordering::SeqCst);
        ANSWER.store(cuCtxSynchronize(), Ordering::SeqCst);
    }
    let bound = Bound::new(LAZY);
    let stream = stream();
    assert_eq!(
        cuLaunchHostFunc(stream, count, without_provenance_mut(5)),
        0
    );
    assert_eq!(CALLED.load(Ordering::SeqCst), 0);
    assert_eq!(cuStreamSynchronize(stream), 0);
    assert_eq!(CALLED.load(Ordering::SeqCst), 1);
    assert_eq!(ANSWER.load(Ordering::SeqCst), 800);
    // Not called any more once the engine has failed.
    assert_eq!(
        cuLaunchHostFunc(stream, count, without_provenance_mut(5)),
        0
    );
    bound.group.break_with(214);
    assert_eq!(cuStreamSynchronize(stream), 214);
    assert_eq!(CALLED.load(Ordering::SeqCst), 1);
    assert_eq!(cuStreamDestroy_v2(stream), 214);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(bound.group.first), 0);
    bound
        .group
        .assert_report(&["cuCtxSynchronize inside a host function"]);
}

#[test]
fn a_blocked_stream_blocks_no_call_that_does_not_wait() {
    static GATE: Mutex<()> = Mutex::new(());
    extern "C" fn pass(_: Ptr) {
        drop(GATE.lock());
    }
    let bound = Bound::new(0);
    let stream = stream();
    let (memory, mine) = (pooled(4, stream), pinned(4));
    let mut down = [0u8; 4];
    let gate = GATE.lock().unwrap();
    assert_eq!(cuLaunchHostFunc(stream, pass, null_mut()), 0);
    assert_eq!(cuMemsetD8Async(memory, 6, 4, stream), 0);
    assert_eq!(
        cuMemcpyDtoHAsync_v2(down.as_mut_ptr(), memory, 4, stream),
        0
    );
    let event = recorded(stream);
    assert_eq!(cuMemFreeAsync(memory, stream), 0);
    assert_eq!(cuMemFreeHost(mine.cast()), 0);
    assert_eq!(cuMemFree_v2(device(8)), 0);
    assert_eq!((cuEventQuery(event), cuStreamQuery(stream)), (600, 600));
    // A waiter on another thread does not keep this one from calling.
    let handle = event.addr();
    let waiter = std::thread::spawn(move || cuEventSynchronize(without_provenance_mut(handle)));
    assert_eq!(cuMemFree_v2(device(8)), 0);
    drop(gate);
    assert_eq!(waiter.join().unwrap(), 0);
    assert_eq!(down, [6; 4]);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

#[test]
fn events_cross_ordinals_but_not_engines() {
    let bound = Bound::with_group(Group::open(2, LAZY));
    let first = stream();
    let event = recorded(first);
    let other = Bound::with_group(Group {
        first: bound.group.first + 1,
        ordinals: 1,
    });
    let second = stream();
    assert_ne!(bound.ctx, other.ctx);
    assert_eq!(cuStreamWaitEvent(second, event, 0), 0);
    assert_eq!(cuStreamSynchronize(second), 0);
    assert_eq!(cuEventQuery(event), 0);
    assert_eq!(cuStreamDestroy_v2(second), 0);

    let elsewhere = Bound::new(0);
    let third = stream();
    assert_eq!(cuStreamWaitEvent(third, event, 0), 400);
    assert_eq!(cuStreamDestroy_v2(third), 0);
    elsewhere
        .group
        .assert_report(&["live: context", "of another engine"]);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(elsewhere.group.first), 0);

    assert_eq!(cuStreamDestroy_v2(first), 0);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(other.group.first), 0);
    bound.end();
}
