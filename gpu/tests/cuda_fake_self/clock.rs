//! The stand-in as a clock. Least times hold always; greatest ones, which a busy machine may miss,
//! in one of several attempts.

use std::ffi::c_void;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use crate::fake::{Group, HOLLOW, LAZY, fake};
use crate::raw::*;

const MS: Duration = Duration::from_millis(1);
/// Takes 200 ms at `RATE`.
const BYTES: usize = 2 << 20;
const RATE: f64 = BYTES as f64 / 0.2;

fn set(group: Group, [up, down]: [f64; 2], [call, query]: [u64; 2]) {
    let set = fake!(fake_cuda_clock(group.first => i32, up => f64, down => f64, call => u64,
        query => u64) -> i32);
    assert_eq!(set, 0);
}

/// Whether what `attempt` measures is ever as short as it can be.
fn once(limit: Duration, mut attempt: impl FnMut() -> Duration) {
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= limit) {
        assert!(took.len() < 8, "{took:?}, never below {limit:?}");
        took.push(attempt());
    }
}

extern "C" fn tell(sender: *mut c_void) {
    // SAFETY: the test passes a live sender, which no other thread uses.
    let sender = unsafe { &*sender.cast::<Sender<Instant>>() };
    let _ = sender.send(Instant::now());
}

#[test]
fn copies_take_their_time_in_each_direction() {
    let bound = Bound::new(0);
    set(bound.group, [RATE, RATE], [0, 0]);
    let streams = [stream(), stream(), stream()];
    let memory = [device(BYTES), device(BYTES)];
    let host = [pinned(BYTES), pinned(BYTES)];
    let (sender, told) = channel::<Instant>();
    let up = |i: usize| {
        let queued = cuMemcpyHtoDAsync_v2(memory[i], host[i], BYTES, streams[i]);
        assert_eq!(queued, 0);
    };
    let down = |i: usize| {
        let queued = cuMemcpyDtoHAsync_v2(host[i], memory[i], BYTES, streams[i]);
        assert_eq!(queued, 0);
    };
    let finish = |i: usize| assert_eq!(cuStreamSynchronize(streams[i]), 0);

    once(300 * MS, || {
        let begin = Instant::now();
        up(0);
        down(1);
        finish(0);
        assert!(begin.elapsed() >= 200 * MS);
        finish(1);
        begin.elapsed()
    });
    // A host function of a third stream runs while both are under way.
    once(100 * MS, || {
        let begin = Instant::now();
        up(0);
        down(1);
        let data = std::ptr::from_ref(&sender).cast_mut().cast();
        assert_eq!(cuLaunchHostFunc(streams[2], tell, data), 0);
        finish(2);
        let at = told.recv().unwrap() - begin;
        finish(0);
        finish(1);
        at
    });
    // Two of one direction are done one after the other, on one stream or two, without a pause.
    for second in [0, 1] {
        once(500 * MS, || {
            let begin = Instant::now();
            up(0);
            up(second);
            finish(0);
            finish(1);
            let took = begin.elapsed();
            assert!(took >= 400 * MS, "{took:?}");
            took
        });
    }
    for (stream, (memory, host)) in streams.into_iter().zip(memory.into_iter().zip(host)) {
        assert_eq!(cuMemFree_v2(memory), 0);
        assert_eq!(cuMemFreeHost(host.cast()), 0);
        assert_eq!(cuStreamDestroy_v2(stream), 0);
    }
    assert_eq!(cuStreamDestroy_v2(streams[2]), 0);
    bound.end();
}

#[test]
fn lists_take_the_time_of_their_bytes_and_the_rest_is_free() {
    let bound = Bound::new(0);
    set(bound.group, [RATE, 0.0], [0, 0]);
    let stream = stream();
    let memory = [device(BYTES), device(BYTES)];
    let host = pinned(BYTES);
    let (targets, half) = ([memory[0], memory[0] + BYTES as u64 / 2], BYTES / 2);
    let sources = [host as u64, host as u64 + half as u64];
    let begin = Instant::now();
    let queued = cuMemcpyBatchAsync_v2(
        targets.as_ptr(),
        sources.as_ptr(),
        [half, half].as_ptr(),
        2,
        &Attributes::new(1),
        &0,
        1,
        stream,
    );
    assert_eq!(queued, 0);
    assert!(begin.elapsed() < 200 * MS, "it does not wait");
    assert_eq!(cuStreamSynchronize(stream), 0);
    assert!(begin.elapsed() >= 200 * MS);
    once(150 * MS, || {
        let begin = Instant::now();
        let [one, two] = memory;
        assert_eq!(cuMemcpyDtoDAsync_v2(two, one, BYTES, stream), 0);
        assert_eq!(cuMemsetD8Async(one, 1, BYTES, stream), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(host, two, BYTES, stream), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        begin.elapsed()
    });
    for memory in memory {
        assert_eq!(cuMemFree_v2(memory), 0);
    }
    assert_eq!(cuMemFreeHost(host.cast()), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

#[test]
fn on_a_lazy_engine_the_wait_takes_the_time() {
    let bound = Bound::new(LAZY);
    set(bound.group, [RATE, RATE], [0, 0]);
    let (stream, memory, host) = (stream(), device(BYTES), pinned(BYTES));
    let begin = Instant::now();
    assert_eq!(cuMemcpyHtoDAsync_v2(memory, host, BYTES, stream), 0);
    assert_eq!(cuStreamSynchronize(stream), 0);
    assert!(begin.elapsed() >= 200 * MS);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!(cuMemFreeHost(host.cast()), 0);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    bound.end();
}

#[test]
fn calls_and_queries_take_their_time_on_the_calling_thread() {
    let bound = Bound::new(0);
    let event = event();
    let memory = device(64);
    let took = |call: &dyn Fn() -> i32| {
        let begin = Instant::now();
        for _ in 0..20 {
            assert_eq!(call(), 0);
        }
        begin.elapsed()
    };
    let query = || cuEventQuery(event);
    let pointer = || {
        let mut kind = 0u32;
        cuPointerGetAttribute((&raw mut kind).cast(), 2, memory)
    };
    let call = || {
        let mut ctx = null_mut();
        cuStreamGetCtx(null_mut(), &mut ctx)
    };
    // Below and above what is slept through.
    for nanos in [20_000, 5_000_000] {
        let least = 20 * Duration::from_nanos(nanos);
        set(bound.group, [0.0; 2], [0, nanos]);
        assert!(took(&query) >= least);
        assert!(took(&pointer) >= least);
        set(bound.group, [0.0; 2], [nanos, 0]);
        assert!(took(&call) >= least);
        // What is free ends long before what is slept through would.
        once(20 * 5 * MS, || took(&query));
        once(20 * 5 * MS, || took(&pointer));
    }
    set(bound.group, [0.0; 2], [0, 0]);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuMemFree_v2(memory), 0);
    bound.end();
}

#[test]
fn hollow_copies_only_look_like_copies() {
    let bound = Bound::new(HOLLOW);
    const SMALL: usize = 64 << 10;
    let memory = device(2 * SMALL);
    let (from, to) = (pinned(2 * SMALL), pinned(2 * SMALL));
    // SAFETY: this test's own memory, which nothing uses now.
    unsafe { from.write_bytes(7, 2 * SMALL) };
    // SAFETY: this test's own memory, which no copy uses now: each has ended with its call.
    unsafe { to.write_bytes(1, 2 * SMALL) };
    for bytes in [SMALL, SMALL + 1] {
        assert_eq!(cuMemcpyHtoD_v2(memory, from, bytes), 0);
        assert_eq!(cuMemcpyDtoH_v2(to, memory, SMALL), 0);
        assert_eq!(host::<SMALL>(to), [7; SMALL]);
    }
    // SAFETY: this test's own memory, which no copy uses now: each has ended with its call.
    unsafe { to.write_bytes(1, 2 * SMALL) };
    assert_eq!(cuMemcpyDtoH_v2(to, memory, SMALL + 1), 0);
    assert_eq!(host::<SMALL>(to), [1; SMALL]);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!(cuMemFreeHost(from.cast()), 0);
    assert_eq!(cuMemFreeHost(to.cast()), 0);
    bound.end();
}

#[test]
fn wrong_rates_are_refused() {
    let group = Group::open(1, 0);
    for (up, down) in [(-1.0, 0.0), (0.0, f64::NAN), (f64::INFINITY, 0.0)] {
        let set = fake!(fake_cuda_clock(group.first => i32, up => f64, down => f64, 0 => u64,
            0 => u64) -> i32);
        assert_eq!(set, -1);
    }
    assert!(group.close());
}

#[test]
fn the_environment_sets_the_clock() {
    for (rates, opens) in [
        ("up=100e6, down=1e9,call=5,query=1", true),
        ("down=5e9,", true),
        ("up", false),
        ("up=fast", false),
        ("up=-1", false),
        ("sideways=1", false),
    ] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["clock::child_opens_a_group", "--exact"]);
        let output = command.env("FAKE_CUDA_CLOCK", rates).output().unwrap();
        assert_eq!(output.status.success(), opens, "{rates}: {output:?}");
    }
}

/// Run by `the_environment_sets_the_clock`.
#[test]
fn child_opens_a_group() {
    let Ok(rates) = std::env::var("FAKE_CUDA_CLOCK") else {
        return;
    };
    let bound = Bound::new(0);
    let (memory, host) = (device(BYTES), vec![0u8; BYTES]);
    let begin = Instant::now();
    assert_eq!(cuMemcpyHtoD_v2(memory, host.as_ptr(), BYTES), 0);
    assert!(!rates.contains("up=100e6") || begin.elapsed() >= 20 * MS);
    assert_eq!(cuMemFree_v2(memory), 0);
    bound.end();
}
