//! When memory is freed that no stream frees in its order, and what a driver refuses.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use arrow_device::device::{CopyKind, CopyOp};
use arrow_device::{DeviceBufferMut, Error};

use crate::fake::{FREE_BLOCKS, Group, LAZY, MODES, NO_BATCH, NO_POOLS, in_mode};
use crate::gpu_suite::soon;
use crate::rig::{Rig, hold};
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::{DEVICE, HOST, MANAGED, open_device};

/// Far longer than any of this takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ends the program if `work` hangs: what hangs holds the library's lock.
fn watched(work: impl FnOnce() + Send + 'static) {
    let (told, done) = channel();
    let worker = thread::spawn(move || {
        work();
        let _ = told.send(());
    });
    if done.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        eprintln!("a free hangs");
        std::process::abort();
    }
    worker.join().unwrap();
}

/// A host function may wait for a thread that frees memory and then makes calls: no free that the
/// thread causes waits for the host function.
#[test]
fn a_host_function_waits_for_a_thread_that_frees() {
    for (flags, memory) in [(0, DEVICE), (NO_POOLS, DEVICE), (0, HOST), (0, MANAGED)] {
        watched(move || {
            let rig = Rig::with(flags | FREE_BLOCKS, memory);
            let (queue, other) = (rig.new_queue().unwrap(), rig.new_queue().unwrap());
            let staging = rig.backend().allocate_host(1 << 20).unwrap();
            // More than are kept for reuse.
            let buffer = |_| DeviceBufferMut::allocate(&other, 1000).unwrap();
            let buffers: Vec<_> = (0..1100).map(buffer).collect();
            let held = hold(&queue);
            let device = rig.device.clone();
            let thread = thread::spawn(move || {
                if let Some(staging) = staging {
                    // SAFETY: the memory was allocated above with this length, and no copy uses it.
                    unsafe { device.backend().free_host(staging, 1 << 20) };
                }
                drop(buffers);
                // Long enough for a free on another thread to begin.
                thread::sleep(Duration::from_millis(100));
                let other = device.new_queue().unwrap();
                let buffer = DeviceBufferMut::allocate(&other, 3000).unwrap();
                drop((buffer, device.host_buffer(4 << 20).unwrap(), other));
                // The host function may return now.
                drop(held);
            });
            thread.join().unwrap();
            rig.synchronize().unwrap();
            rig.trim();
            drop((queue, other));
            rig.end();
        });
    }
}

/// Page-locked memory that the device's pool does not keep is freed where the device is waited for.
#[test]
fn page_locked_memory_is_freed_by_a_wait() {
    let rig = Rig::new(0);
    let allocate = |mib: usize| rig.backend().allocate_host(mib << 20).unwrap().unwrap();
    // SAFETY: the memory is from `allocate` with this length, and no copy uses it.
    let free = |base, mib: usize| unsafe { rig.backend().free_host(base, mib << 20) };
    let pinned = || rig.group.live("pinned");
    let first = allocate(2);
    let queue = rig.new_queue().unwrap();
    let held = hold(&queue);
    free(first, 2);
    assert_eq!(pinned(), 1, "work is pending");
    drop(held);
    rig.synchronize().unwrap();
    assert_eq!(pinned(), 0);
    free(allocate(1), 1);
    drop(queue);
    assert_eq!(pinned(), 1);
    rig.trim();
    assert_eq!(pinned(), 0);
    free(allocate(1), 1);
    let group = rig.group;
    drop(rig);
    // The device's end.
    assert!(soon(|| group.live("pinned") == 0));
    crate::rig::assert_gone(group);
}

/// Whatever code a driver refuses page-locked memory with: ordinary memory serves.
#[test]
fn page_locked_memory_that_is_refused() {
    let rig = Rig::new(0);
    for code in [1, 2, 208, 911] {
        rig.group.fail("cuMemHostAlloc", 1, code);
        let host = rig.host_buffer(4 << 20).unwrap();
        assert_eq!((rig.group.clear(), rig.group.live("pinned")), (1, 0));
        drop(host);
        rig.trim();
    }
    rig.end();

    // A device that is lost is an error.
    let rig = Rig::new(0);
    rig.group.break_with(719);
    assert!(matches!(
        rig.host_buffer(1 << 20),
        Err(Error::Device { code: 719, .. })
    ));
}

/// Where pools are promised and refused, blocks are used again without one.
#[test]
fn pools_that_cannot_be_created() {
    for mode in MODES {
        let group = Group::open(1, mode);
        group.fail("cuMemPoolCreate", 1, 801);
        let rig = Rig::of(group, open_device(DEVICE, group.ordinal()));
        let batch = wide_batch(20, 300);
        for _ in 0..2 {
            let up = rig.upload(&batch).unwrap();
            assert_same_batch(&batch, &up.to_host().unwrap(), "no pool");
        }
        assert_eq!(group.calls("cuMemAllocFromPoolAsync"), 0);
        assert!(group.calls("cuMemAlloc_v2") > 0);
        group.clear();
        rig.end();
    }
}

/// Lists of copies are one call, where the driver has it.
#[test]
fn lists_of_many_copies() {
    for flags in [0, LAZY, LAZY | NO_BATCH] {
        let columns = 50;
        let rig = Rig::new(flags);
        let batch = wide_batch(columns, 20);
        // Cut, so that buffers do not go together.
        let up = rig.upload(&batch).unwrap().slice(0, 19).unwrap();
        rig.synchronize().unwrap();
        let made = || ["cuMemcpyBatchAsync_v2", "cuMemcpyAsync"].map(|name| rig.group.calls(name));
        let (before, stats) = (made(), rig.stats());
        assert_same_batch(&batch.slice(0, 19), &up.to_host().unwrap(), "lists");
        let copies = rig.stats().since(&stats).copies;
        assert!(copies > columns as u64, "{copies} copies");
        let [lists, alone] = made();
        let (lists, alone) = (lists - before[0], alone - before[1]);
        if flags & NO_BATCH != 0 || in_mode(NO_BATCH) {
            assert_eq!(alone, copies);
        } else {
            assert!((1..=2).contains(&lists) && alone < 8, "{lists}, {alone}");
        }
        drop(up);
        rig.end();
    }
}

/// A copy of 1 MiB goes by itself, and those beside it, one byte shorter at most, go as one list.
#[test]
fn a_large_copy_beside_a_list() {
    const MIB: usize = 1 << 20;
    let rig = Rig::new(0);
    let queue = rig.new_queue().unwrap();
    let lengths = [100, 100, 100, MIB, 100, 100, 100, 100, MIB - 1];
    let all = lengths.iter().sum();
    let host = rig.host_buffer(all).unwrap();
    let memory = DeviceBufferMut::allocate(&queue, all).unwrap();
    let mut at = 0;
    let copies = lengths.map(|bytes| {
        let copy = CopyOp {
            src: host.as_device_ptr().offset(at),
            dst: memory.address().offset(at),
            bytes,
            kind: CopyKind::HostToDevice,
        };
        at += bytes;
        copy
    });
    let made = || ["cuMemcpyAsync", "cuMemcpyBatchAsync_v2"].map(|name| rig.group.calls(name));
    let before = made();
    // SAFETY: host buffer and memory have `all` bytes, and live until the queue is done.
    unsafe { queue.raw().copy(&copies) }.unwrap();
    let [alone, lists] = made();
    let (alone, lists) = (alone - before[0], lists - before[1]);
    match in_mode(NO_BATCH) {
        true => assert!((alone, lists) <= (9, 1), "{alone} alone, {lists} lists"),
        false => assert_eq!((alone, lists), (1, 1)),
    }
    queue.synchronize().unwrap();
    drop((memory, host, queue));
    rig.end();
}

/// Copies of a list that the driver does not take go one by one.
#[test]
fn lists_that_fail() {
    let batch = wide_batch(50, 100).slice(0, 99);
    for code in [1, 801, 999] {
        let rig = Rig::new(0);
        let whole = rig.upload(&wide_batch(50, 100)).unwrap();
        let up = whole.slice(0, 99).unwrap();
        drop(whole);
        rig.group.fail("cuMemcpyBatchAsync_v2", 1, code);
        assert_same_batch(&batch, &up.to_host().unwrap(), "refused");
        assert_eq!(rig.group.clear(), 1);
        let before = rig.group.calls("cuMemcpyBatchAsync_v2");
        assert_same_batch(&batch, &up.to_host().unwrap(), "after");
        assert!(rig.group.calls("cuMemcpyBatchAsync_v2") > before);
        drop(up);
        rig.end();
    }
}

/// An allocation waits for memory that pending work frees.
#[test]
fn memory_that_pending_work_frees() {
    for flags in [0, LAZY, NO_POOLS, LAZY | NO_POOLS] {
        let group = Group::with_capacity(1, flags, 8 << 20);
        let rig = Rig::of(group, open_device(DEVICE, group.ordinal()));
        let (one, two) = (rig.new_queue().unwrap(), rig.new_queue().unwrap());
        let first = DeviceBufferMut::allocate(&one, 5 << 20).unwrap();
        // On a lazy driver nothing runs before it is waited for.
        let held = (flags & LAZY == 0).then(|| hold(&one));
        drop(first);
        let opener = held.map(|held| {
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                drop(held);
            })
        });
        let second = DeviceBufferMut::allocate(&two, 6 << 20).unwrap();
        if let Some(opener) = opener {
            opener.join().unwrap();
        }
        drop((second, one, two));
        rig.end();
    }
}
