//! Events that fail. What runtimes make of them differs: PoCL 3.1 ends the process when a command waits for one, and Intel's
//! runtime lets the command run. Here they are errors, and nothing of them reaches the runtime.

use std::sync::Arc;
use std::time::Duration;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::device::EventPtr;
use arrow_device::{Device, Queue};
use arrow_device_opencl::OpenClQueue;
use cl3::command_queue::enqueue_marker_with_wait_list;
use cl3::event::release_event;
use cl3::types::cl_event;

use crate::rigs::{Gate, memories, open};
use crate::suite::{assert_clean, assert_error, soon};

const FAILED: &str = "the producer's work before an event failed on opencl:";

fn batch() -> RecordBatch {
    let column = Arc::new(Int64Array::from_iter_values(0..900)) as _;
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

/// A `cl_event*`, as a foreign producer hands it over.
fn pointer(event: &cl_event) -> EventPtr {
    EventPtr::new(std::ptr::from_ref(event).cast_mut().cast()).unwrap()
}

/// Makes a queue wait for a foreign event.
fn wait(queue: &Queue, event: &cl_event) -> arrow_device::Result<bool> {
    // SAFETY: the tests pass live events.
    unsafe { queue.raw().wait(pointer(event)) }
}

fn assert_works(device: &Device) {
    assert_eq!(device.upload(&batch()).unwrap().to_host().unwrap(), batch());
    device.synchronize().unwrap();
}

#[test]
fn an_event_that_has_failed_is_an_error_of_the_call() {
    for memory in memories() {
        let device = open(memory);
        let queue = device.new_queue().unwrap();
        // In the device's context and in another one.
        for gate in [Gate::new(&device), Gate::new(&open(memory))] {
            gate.end(-5);
            let event = gate.event();
            assert_error(wait(&queue, &event), FAILED);
            let backend = device.backend();
            for _ in 0..2 {
                // SAFETY: the event is live.
                unsafe {
                    assert_error(backend.query_event(pointer(&event)), FAILED);
                    assert_error(backend.wait_event(pointer(&event)), FAILED);
                }
            }
            // The device itself has not failed.
            assert_works(&device);
        }
        drop(queue);
        assert_clean(&device);
    }
}

/// The device would go on with wrong data.
#[test]
fn a_pending_event_that_fails_is_the_end_of_the_device() {
    for memory in memories() {
        for other_context in [false, true] {
            let (device, other) = (open(memory), open(memory));
            let queue = device.new_queue().unwrap();
            let before = queue.record().unwrap().unwrap();
            before.wait().unwrap();
            let gate = Gate::new(if other_context { &other } else { &device });
            wait(&queue, &gate.event()).unwrap();
            let up = device.upload_on(&batch(), &queue).unwrap();
            let after = queue.record().unwrap().unwrap();
            assert!(!after.is_complete().unwrap());
            gate.end(-5);
            assert_error(after.wait(), FAILED);
            assert_error(after.is_complete(), FAILED);
            // And stays one, everywhere.
            for _ in 0..2 {
                assert_error(up.to_host(), FAILED);
                assert_error(device.upload(&batch()), FAILED);
                assert_error(queue.record(), FAILED);
                assert_error(device.synchronize(), FAILED);
                let text = "the device cannot be used any more in this process";
                assert_error(wait(&queue, &gate.event()), text);
            }
            drop((up, before, after, queue));
            assert_clean(&device);
            assert_works(&other);
        }
    }
}

#[test]
fn a_pending_event_that_fails_is_an_error_for_who_waits_for_it() {
    for memory in memories() {
        let device = open(memory);
        let gate = Gate::new(&open(memory));
        let event = gate.event();
        let backend = device.backend();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                gate.end(-5);
            });
            // SAFETY: the event is live until the end of the test.
            assert_error(unsafe { backend.wait_event(pointer(&event)) }, FAILED);
        });
        assert_works(&device);
        assert_clean(&device);
    }
}

/// A command of the producer that waited for something that failed. Intel's runtime reports status 0 for it.
#[test]
fn an_event_after_a_failed_one_is_an_error() {
    for memory in memories() {
        let (device, other) = (open(memory), open(memory));
        let queue = device.new_queue().unwrap();
        let gate = Gate::new(&other);
        let theirs = other.new_queue().unwrap();
        let handle = OpenClQueue::of(&theirs).unwrap().handle();
        let first = gate.event();
        // SAFETY: queue and event are live and of one context.
        let marker = unsafe { enqueue_marker_with_wait_list(handle, 1, &raw const first) }.unwrap();
        cl3::command_queue::flush(handle).unwrap();
        gate.end(-5);
        // SAFETY: the event is live.
        let query = || unsafe { device.backend().query_event(pointer(&marker)) };
        assert!(soon(|| !matches!(query(), Ok(false))), "it does not end");
        query().unwrap_err();
        // SAFETY: the marker is live until it is released below.
        unsafe { device.backend().wait_event(pointer(&marker)) }.unwrap_err();
        wait(&queue, &marker).unwrap_err();
        assert_works(&device);
        // SAFETY: this is the reference that the call has returned.
        unsafe { release_event(marker) }.unwrap();
    }
}

/// Its own events complete like any other.
#[test]
fn the_failure_of_another_device_is_an_error_for_who_waits_for_its_events() {
    for memory in memories() {
        let (device, failing) = (open(memory), open(memory));
        let (queue, theirs) = (device.new_queue().unwrap(), failing.new_queue().unwrap());
        let gate = Gate::new(&open(memory));
        wait(&theirs, &gate.event()).unwrap();
        let event = theirs.record().unwrap().unwrap();
        // SAFETY: the event is live.
        let wait_for = |queue: &Queue| unsafe { queue.raw().wait(event.as_ptr()) };
        wait_for(&queue).unwrap();
        let up = device.upload_on(&batch(), &queue).unwrap();
        gate.end(-5);
        assert_error(
            up.to_host(),
            "the work of another device before an event failed",
        );
        let third = open(memory);
        assert_error(
            wait_for(&third.default_queue()),
            "the work of another device before an event",
        );
        // SAFETY: the event is live until it is dropped below.
        unsafe {
            let text = "the work of another device before an event";
            assert_error(third.backend().query_event(event.as_ptr()), text);
            assert_error(third.backend().wait_event(event.as_ptr()), text);
        }
        assert_works(&third);
        assert_error(theirs.record(), FAILED);
        drop((up, event, queue, theirs));
        assert_clean(&device);
        assert_clean(&failing);
    }
}
