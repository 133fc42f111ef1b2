//! What the suite cannot know of events that fail: PoCL 3.1 and Intel's runtime make of the work around them what OpenCL does not say.

use arrow_device::Queue;
use arrow_device::device::EventPtr;
use arrow_device_conformance::{assert_works, soon};
use arrow_device_opencl::OpenClQueue;
use cl3::command_queue::{enqueue_barrier_with_wait_list, enqueue_marker_with_wait_list, flush};
use cl3::event::release_event;
use cl3::types::cl_command_queue;

use crate::rigs::{Gate, assert_clean, memories, open};

fn handle(queue: &Queue) -> cl_command_queue {
    OpenClQueue::of(queue).unwrap().handle()
}

/// A command of the producer that waited for something that failed. Intel's runtime reports status 0 for it.
#[test]
fn an_event_after_a_failed_one_is_an_error() {
    for memory in memories() {
        let (device, other) = (open(memory), open(memory));
        let (queue, theirs) = (device.new_queue().unwrap(), other.new_queue().unwrap());
        let gate = Gate::new(&other);
        let first = gate.event();
        // SAFETY: queue and event are live and of one context.
        let made = unsafe { enqueue_marker_with_wait_list(handle(&theirs), 1, &raw const first) };
        let mut marker = made.unwrap();
        flush(handle(&theirs)).unwrap();
        gate.end(-5);
        let event = EventPtr::new((&raw mut marker).cast()).unwrap();
        // SAFETY: the marker is live until it is released below.
        let query = || unsafe { device.backend().query_event(event) };
        assert!(soon(|| !matches!(query(), Ok(false))), "it does not end");
        query().unwrap_err();
        // SAFETY: the marker is live until the last line, which gives back the reference that the call has returned.
        unsafe {
            device.backend().wait_event(event).unwrap_err();
            queue.raw().wait(event).unwrap_err();
            assert_works(&device);
            release_event(marker).unwrap();
        }
    }
}

/// PoCL fails the event after a command that has failed at once, while work before that command still runs: its memory is given to nobody.
#[test]
fn a_failed_event_does_not_end_the_work_before_it() {
    /// So many bytes that it takes a while to fill them.
    const LONG: usize = 256 << 20;
    for memory in memories() {
        let device = open(memory);
        let (one, two) = (device.new_queue().unwrap(), device.new_queue().unwrap());
        let base = one.raw().allocate(LONG).unwrap();
        let gate = Gate::new(&device);
        // SAFETY: the memory was just allocated, and is freed once. Queue and event are live and of one context.
        let barrier = unsafe {
            (0..4).for_each(|byte| one.raw().fill(base, byte, LONG).unwrap());
            let event = gate.event();
            // PoCL ends the process if nobody has the barrier's event when it fails.
            let barrier = enqueue_barrier_with_wait_list(handle(&one), 1, &raw const event);
            one.raw().free(base, LONG).unwrap();
            barrier.unwrap()
        };
        gate.end(-5);
        // An error once the failure has been noticed.
        if let Ok(other) = two.raw().allocate(LONG) {
            assert_ne!(other, base, "{memory:?}: the fills still run");
            // SAFETY: it was just allocated on this queue, and is freed once.
            unsafe { two.raw().free(other, LONG) }.unwrap();
        }
        // An error where the runtime shows the failure.
        let _ = device.synchronize();
        // SAFETY: this is the reference of the barrier.
        unsafe { release_event(barrier) }.unwrap();
        assert_clean(&device);
    }
}
