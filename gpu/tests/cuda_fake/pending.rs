//! Much memory that cannot be freed at once: nothing watches it, and questions do not grow with it.

use std::time::Duration;

use arrow_device::{DeviceBufferMut, Queue};

use crate::fake::{LAZY, NO_POOLS, in_mode};
use crate::rig::{Rig, hold, hold_running};
use crate::vendor::DEVICE;

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

/// All work is waited for once for many buffers, by whoever waits for the device.
#[test]
fn one_wait_for_everything() {
    for (flags, call) in [
        (0, "cuMemFreeAsync"),
        (NO_POOLS, "cuEventRecord"),
        (LAZY | NO_POOLS, "cuEventRecord"),
    ] {
        let call = match in_mode(NO_POOLS) {
            true => "cuEventRecord",
            false => call,
        };
        let rig = Rig::new(flags);
        let queue = rig.default_queue();
        let buffers = buffers(&queue, N);
        let held = hold(&queue);
        let before = rig.group.calls("cuCtxSynchronize");
        give_up(&rig, call, buffers);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(rig.group.calls("cuCtxSynchronize"), before, "nothing waits");
        assert_eq!(rig.group.live("device"), N as u64, "work is under way");
        drop(held);
        rig.synchronize().unwrap();
        assert_eq!(rig.group.live("device"), 0);
        assert_eq!(rig.group.calls("cuCtxSynchronize"), before + 1);
        drop(queue);
        rig.end();
    }
}

/// Nor is a failed context asked once for each buffer whose event it does not answer for.
#[test]
fn events_of_a_failed_context() {
    let rig = Rig::new(NO_POOLS);
    let queue = rig.default_queue();
    let buffers = buffers(&queue, N);
    let held = hold_running(&queue);
    drop(buffers);
    drop(held);
    rig.group.break_with(719);
    let before = rig.group.calls("cuCtxSynchronize");
    rig.trim();
    assert_eq!(rig.group.live("device"), 0);
    let waits = rig.group.calls("cuCtxSynchronize") - before;
    assert!(waits <= 2, "{waits} waits");
    drop(queue);
    let _ = rig.take_drop_error();
}

/// Memory of another context is freed while a context is busy.
#[test]
fn a_busy_context_holds_up_no_other_free() {
    let [busy, other] = [DEVICE; 2].map(|memory| Rig::with(NO_POOLS, memory));
    let queue = busy.default_queue();
    let untold = buffers(&queue, 5);
    let held = hold(&queue);
    give_up(&busy, "cuEventRecord", untold);
    let theirs = buffers(&other.default_queue(), 5);
    give_up(&other, "cuEventRecord", theirs);
    drop(buffers(&other.default_queue(), 5));
    other.trim();
    assert_eq!(other.group.live("device"), 0);
    assert_eq!(busy.group.live("device"), 5);
    drop(held);
    busy.synchronize().unwrap();
    assert_eq!(busy.group.live("device"), 0);
    drop(queue);
    for rig in [busy, other] {
        rig.end();
    }
}

/// Nothing asks about events while work is pending, and each is asked about once in the end.
#[test]
fn questions_about_events_are_linear() {
    let rig = Rig::new(NO_POOLS);
    let queue = rig.default_queue();
    let buffers = buffers(&queue, N);
    let held = hold(&queue);
    drop(buffers);
    let asked = || rig.group.calls("cuEventQuery");
    let before = asked();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(asked(), before, "nothing watches");
    drop(held);
    rig.trim();
    assert_eq!(rig.group.live("device"), 0);
    assert!(asked() - before <= N as u64, "{}", asked() - before);
    drop(queue);
    rig.end();
}
