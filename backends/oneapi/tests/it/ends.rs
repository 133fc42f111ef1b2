//! When work has ended, whatever has failed: memory and sources are freed only then.

use std::time::Duration;

use arrow_device::Error;
use arrow_device::device::{Backend, CopyKind, CopyOp};

use crate::first::config;
use crate::fork_kit::alone;
use crate::gate::{hold_by_event, hold_by_kernel, sycl_queue};
use crate::programs::*;
use crate::suite::soon;
use crate::traps::{backend, frees_are_done};

/// Some work runs, what comes after it has failed already.
#[test]
fn settling_outlasts_work_before_a_failure() {
    let Some(config) = config() else { return };
    for is_dropped in [false, true] {
        let device = config.open().unwrap();
        let queue = device.new_queue().unwrap();
        // SAFETY: the queue is live, and the event ended once.
        let gate = unsafe {
            let gate = hold_by_kernel(sycl_queue(&queue));
            let held = (programs().hold_by_event)(sycl_queue(&queue));
            assert!(!held.is_null());
            (programs().end_event)(held, -5);
            gate
        };
        if is_dropped {
            drop(queue);
        }
        let waiting = [(); 2].map(|()| {
            let device = device.clone();
            std::thread::spawn(move || backend(&device).settle())
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(waiting.iter().all(|one| !one.is_finished()));
        gate.open();
        for one in waiting {
            // OpenCL says nothing of it.
            one.join().unwrap().unwrap();
        }
    }
}

/// `sycl::free` waits for work that uses the memory.
#[test]
fn frees_do_not_wait() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let backend = backend(&device);
    let queue = device.new_queue().unwrap();
    let host = backend.allocate_host(1 << 16).unwrap().unwrap();
    let base = queue.raw().allocate(1 << 20).unwrap();
    let copy = CopyOp {
        src: host,
        dst: base,
        bytes: 1 << 16,
        kind: CopyKind::HostToDevice,
    };
    // SAFETY: the memory is freed once, after the copy.
    unsafe {
        let gate = hold_by_event(&queue);
        queue.raw().copy(&[copy]).unwrap();
        queue.raw().free(base, 1 << 20).unwrap();
        device.trim();
        assert_eq!(backend.outstanding()[0], 0);
        gate.open();
    }
    device.synchronize().unwrap();
    // SAFETY: the copy has completed; freed once.
    unsafe { backend.free_host(host, 1 << 16) };
    device.trim();
    frees_are_done(&device);

    // A block whose work has ended, as far as this crate knows, while a program still uses it: SYCL's free waits for that.
    // SAFETY: freed once, and that waits for the fill; the queue is live.
    unsafe {
        let base = device.default_queue().raw().allocate(1 << 20).unwrap();
        let gate = hold_by_event(&queue);
        let fill = (programs().queue_fill)(sycl_queue(&queue), base.as_ptr(), 1 << 20);
        device.default_queue().raw().free(base, 1 << 20).unwrap();
        device.default_queue().synchronize().unwrap();
        device.trim();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(backend.outstanding()[4], 1, "SYCL's free did not wait");
        // Nor does an allocation wait long for that free, if there is no memory.
        let refused = device.default_queue().raw().allocate(1 << 60).unwrap_err();
        assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
        gate.open();
        (programs().event_delete)(fill);
    }
    device.synchronize().unwrap();
    device.trim();
    frees_are_done(&device);
}

/// Nor does the drop of a queue, or of the device with memory in use. A queue that was dropped still counts.
#[test]
fn drops_do_not_wait() {
    let Some(config) = config() else { return };
    let device = config.open().unwrap();
    let queue = device.new_queue().unwrap();
    let gate = hold_by_event(&queue);
    drop(queue);
    let waiting = {
        let device = device.clone();
        std::thread::spawn(move || device.synchronize().unwrap())
    };
    std::thread::sleep(Duration::from_millis(50));
    assert!(
        !waiting.is_finished(),
        "the dropped queue's work was not waited for"
    );
    gate.open();
    waiting.join().unwrap();

    let queue = device.new_queue().unwrap();
    // SAFETY: the memory is freed once.
    unsafe {
        let gate = hold_by_event(&queue);
        let base = queue.raw().allocate(1 << 20).unwrap();
        queue.raw().fill(base, 1, 1 << 20).unwrap();
        queue.raw().free(base, 1 << 20).unwrap();
        drop((queue, device));
        let other = config.open().unwrap();
        let owns = || backend(&other).owns(base).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(owns());
        gate.open();
        assert!(soon(|| !owns()), "the memory is not freed");
    }
}

/// Memory over the pool's limit goes back to SYCL when it is freed, not only when more is asked for.
#[test]
fn idle_memory_is_bounded() {
    const BYTES: usize = 200 << 20;
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    alone("ends::idle_memory_is_bounded", || {
        let Some(config) = config() else { return };
        let device = config.open().unwrap();
        let queue = device.default_queue();
        let blocks = [(); 4].map(|()| queue.raw().allocate(BYTES).unwrap());
        // SAFETY: the memory was just allocated, and each block is freed once.
        unsafe {
            for base in blocks {
                queue.raw().fill(base, 1, BYTES).unwrap();
            }
            device.synchronize().unwrap();
            assert!(resident() > 4 * BYTES);
            for base in blocks {
                queue.raw().free(base, BYTES).unwrap();
                device.synchronize().unwrap();
            }
        }
        assert!(soon(|| resident() < 3 * BYTES), "{} bytes", resident());
    });
}
