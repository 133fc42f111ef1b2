//! When work has ended, whatever has failed: memory and sources are freed only then.

use std::time::Duration;

use arrow_device::device::Backend;

use crate::gate::{hold_by_kernel, sycl_queue};
use crate::programs::*;
use crate::support::config;
use crate::traps::backend;

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
