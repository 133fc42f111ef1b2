//! Much memory that cannot be freed at once: threads and questions do not grow with it, and nothing waits for what is not its
//! own.

use std::time::{Duration, Instant};

use arrow_device::{DeviceBufferMut, Queue};

use crate::fake::{LAZY, NO_POOLS};
use crate::rig::{Rig, hold, soon};
use crate::vendor::Memory;

const N: usize = 400;

fn buffers(queue: &Queue, n: usize) -> Vec<DeviceBufferMut> {
    let one = |_| DeviceBufferMut::allocate(queue, 1000).unwrap();
    (0..n).map(one).collect()
}

/// Drops buffers of which the runtime refuses each free once: they may be freed only after all work.
fn give_up(rig: &Rig, call: &str, buffers: Vec<DeviceBufferMut>) {
    for buffer in buffers {
        rig.group.fail(call, 1, 1);
        drop(buffer);
        assert_eq!(rig.group.clear(), 1);
    }
    assert!(rig.take_drop_error().is_some());
}

/// How many threads of this process free memory of GPUs, whichever test's.
fn threads() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("comm")).ok()
    };
    // The system keeps 15 bytes.
    let ours = |name: &String| name.trim_end() == &"arrow-device gpu free"[..15];
    names.filter_map(name).filter(ours).count()
}

/// All work is waited for once for many buffers, by one thread.
#[test]
fn one_thread_waits_for_everything() {
    for (flags, call) in [
        (0, "cuMemFreeAsync"),
        (NO_POOLS, "cuEventRecord"),
        (LAZY | NO_POOLS, "cuEventRecord"),
    ] {
        let rig = Rig::new(flags);
        let queue = rig.default_queue();
        let buffers = buffers(&queue, N);
        let held = hold(&queue);
        let before = rig.group.calls("cuCtxSynchronize");
        give_up(&rig, call, buffers);
        assert!(threads() < N / 2, "{} threads", threads());
        assert_eq!(rig.group.live("device"), N as u64, "work is under way");
        drop(held);
        assert!(soon(|| rig.group.live("device") == 0));
        // What had come before the thread looked first, and the rest.
        let waits = rig.group.calls("cuCtxSynchronize") - before;
        assert!(waits <= 2, "{waits} waits");
        drop(queue);
        rig.assert_done();
        rig.end();
    }
}

/// Nor is a failed context asked once for each buffer whose event it does not answer for.
#[test]
fn events_of_a_failed_context() {
    let rig = Rig::new(NO_POOLS);
    let queue = rig.default_queue();
    let buffers = buffers(&queue, N);
    let held = hold(&queue);
    drop(buffers);
    drop(held);
    rig.group.break_with(719);
    let before = rig.group.calls("cuCtxSynchronize");
    rig.trim();
    assert!(soon(|| rig.group.live("device") == 0));
    let waits = rig.group.calls("cuCtxSynchronize") - before;
    // All came at once.
    assert!(waits <= 2, "{waits} waits");
    drop(queue);
    let _ = rig.take_drop_error();
}

/// Memory of another context, or with events that have completed, is freed while a context is waited for.
#[test]
fn a_busy_context_holds_up_no_other_free() {
    let [busy, other] = [Memory::Device; 2].map(|memory| Rig::with(NO_POOLS, memory));
    let (queue, free) = (busy.default_queue(), busy.new_queue().unwrap());
    let [untold, told] = [&queue, &free].map(|queue| buffers(queue, 5));
    drop(told);
    busy.synchronize().unwrap();
    let held = hold(&queue);
    give_up(&busy, "cuEventRecord", untold);
    // One thread waits for the busy context, for as long as this takes.
    busy.trim();
    assert!(soon(|| busy.group.live("device") == 5), "its own events");
    let theirs = buffers(&other.default_queue(), 5);
    give_up(&other, "cuEventRecord", theirs);
    drop(buffers(&other.default_queue(), 5));
    assert!(soon(|| {
        other.trim();
        other.group.live("device") == 0
    }));
    assert_eq!(busy.group.live("device"), 5);
    drop(held);
    assert!(soon(|| busy.group.live("device") == 0));
    drop((queue, free));
    for rig in [busy, other] {
        rig.assert_done();
        rig.end();
    }
}

/// Of a queue's events only the first is asked about again and again.
#[test]
fn questions_about_events_are_linear() {
    let rig = Rig::new(NO_POOLS);
    let queue = rig.default_queue();
    let buffers = buffers(&queue, N);
    let held = hold(&queue);
    drop(buffers);
    let asked = || rig.group.calls("cuEventQuery");
    let (before, start) = (asked(), Instant::now());
    rig.trim();
    assert!(soon(|| asked() - before >= 12), "it is asked about");
    std::thread::sleep(Duration::from_millis(100));
    // One a round; the pauses between rounds double up to 10 ms.
    let rounds = || 20 + start.elapsed().as_millis() as u64 / 5;
    let (questions, most) = (asked() - before, rounds());
    assert!(questions <= most, "{questions} questions, {most} rounds");
    drop(held);
    assert!(soon(|| rig.group.live("device") == 0));
    // All have completed: each is asked about once more.
    let (questions, most) = (asked() - before, rounds() + N as u64);
    assert!(questions <= most, "{questions} questions, {most} expected");
    drop(queue);
    rig.assert_done();
    rig.end();
}
