//! When work has ended, whatever has failed; and the end of a process with work that ends never.

use std::time::Duration;

use arrow_array::Int64Array;
use arrow_device::DeviceBufferMut;
use arrow_device_conformance::{alone, ends_well};

use crate::kit::{
    Held, OWN_CONTEXT, config, device, hold_by_event, hold_by_kernel, programs, sycl_queue,
};

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
            std::thread::spawn(move || device.synchronize())
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(waiting.iter().all(|one| !one.is_finished()));
        drop(gate);
        for one in waiting {
            // OpenCL says nothing of it.
            one.join().unwrap().unwrap();
        }
    }
}

/// Threads that wait for work stay, since an error would be taken for its end: then its memory is freed.
#[test]
fn a_process_ends_while_threads_wait() {
    ends_well("ends::a_process_ends_while_threads_wait", || {
        let Some(device) = device() else { return };
        let queue = device.new_queue().unwrap();
        std::mem::forget(hold_by_event(&queue));
        drop(
            device
                .upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)
                .unwrap(),
        );
        let event = queue.record().unwrap().unwrap();
        // SAFETY: it ends the process.
        let ended = || unsafe { libc::_exit(1) };
        std::thread::spawn(move || {
            let _ = device.synchronize();
            ended()
        });
        std::thread::spawn(move || {
            let _ = event.wait();
            ended()
        });
        std::thread::sleep(Duration::from_millis(30));
    });
}

/// A queue waits for an event of another context, which never completes.
#[test]
fn a_process_ends_behind_a_gate() {
    ends_well("ends::a_process_ends_behind_a_gate", || {
        let Some(device) = device() else { return };
        let theirs = std::mem::ManuallyDrop::new(Held::new(device.id().id as usize, OWN_CONTEXT));
        let queue = device.new_queue().unwrap();
        // SAFETY: the event lives as long as the process.
        assert!(unsafe { queue.raw().wait(theirs.0.event()) }.unwrap());
        drop(
            device
                .upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)
                .unwrap(),
        );
        std::thread::sleep(Duration::from_millis(30));
    });
}

/// SYCL's frees wait, so that memory is freed only where the device is waited for anyway: what is kept meanwhile has a bound.
#[test]
fn idle_memory_is_bounded() {
    const MIB: usize = 1 << 20;
    alone("ends::idle_memory_is_bounded", || {
        let Some(config) = config() else { return };
        let device = config.with_idle_limit(MIB).open().unwrap();
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: usize = status.split(' ').nth(1).unwrap().parse().unwrap();
            pages * 4096
        };
        let (queue, mut before) = (device.default_queue(), 0);
        // Each is larger than all before, and so fits in none of them: 450 MiB together.
        for step in 0..100 {
            let bytes = MIB + step * (70 << 10);
            let mut memory = DeviceBufferMut::allocate(&queue, bytes).unwrap();
            memory.fill(1).unwrap();
            queue.synchronize().unwrap();
            if step == 10 {
                before = resident();
            }
        }
        let grown = resident().saturating_sub(before) / MIB;
        assert!(grown < 100, "{grown} MiB are kept");
    });
}
