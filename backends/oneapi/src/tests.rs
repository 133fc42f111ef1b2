//! Failures that SYCL lets no program outside make.

use std::time::Duration;

use arrow_device::device::device_error;
use arrow_device::device::engine::Runtime;

#[path = "../tests/it/kit.rs"]
#[allow(dead_code)]
mod kit;

use kit::{Held, hold_by_kernel};

#[test]
fn failed_events_are_no_end_of_work() {
    let Some(config) = kit::config() else {
        return;
    };
    for is_recorded in [false, true] {
        let (device, queue, _) = config.parts().unwrap();
        let (event, end) = Held::new(device.health.id().id as usize, 0);
        end(-5);
        // SAFETY: the event is live.
        let mut failed = unsafe { device.foreign_event(event.event()) }.unwrap();
        failed.recorder = Some(device.health.clone());
        // SAFETY: the queue is live.
        let gate = unsafe { hold_by_kernel(queue.sycl_queue()) };
        let last = match is_recorded {
            true => Ok(failed),
            false => Err(device_error(device.health.id(), "a test", -1, "refused")),
        };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| device.outlast(&queue, last));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!waiting.is_finished());
            drop(gate);
            waiting.join().unwrap().unwrap();
        });
        assert_eq!(device.health.check().is_err(), is_recorded);
    }
}
