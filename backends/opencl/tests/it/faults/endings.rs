//! Work whose end is not what an event or a wait says at first: memory that it uses is not given to others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arrow_device::{Device, Error, Queue};
use arrow_device_opencl::{OpenClMemory, OpenClQueue};
use cl3::command_queue::enqueue_barrier_with_wait_list;
use cl3::event::release_event;
use cl3::types::cl_event;

use crate::fake;
use crate::rigs::{Gate, hold, memories, open};
use crate::suite::{assert_clean, soon};

/// Enqueues a command that fails with an event. The caller releases its own event: PoCL ends the process if nobody has it when it
/// fails.
fn depend(queue: &Queue, gate: &Gate) -> cl_event {
    let handle = OpenClQueue::of(queue).unwrap().handle();
    let event = gate.event();
    // SAFETY: queue and event are live and of one context.
    unsafe { enqueue_barrier_with_wait_list(handle, 1, &raw const event) }.unwrap()
}

/// So many bytes that it takes a while to fill them.
const LONG: usize = 256 << 20;

/// PoCL fails the event after a command that has failed at once, while work before that command still runs.
#[test]
fn a_failed_event_does_not_end_the_work_before_it() {
    if !fake::is_loaded("faults::endings::a_failed_event_does_not_end_the_work_before_it") {
        return;
    }
    for memory in memories() {
        let owned = fake::live();
        let device = open(memory);
        let (one, two) = (device.new_queue().unwrap(), device.new_queue().unwrap());
        let base = one.raw().allocate(LONG).unwrap();
        let gate = Gate::new(&device);
        // SAFETY: the memory was just allocated.
        (0..4).for_each(|byte| unsafe { one.raw().fill(base, byte, LONG) }.unwrap());
        let barrier = depend(&one, &gate);
        // SAFETY: it is freed once.
        unsafe { one.raw().free(base, LONG) }.unwrap();
        std::thread::sleep(Duration::from_millis(5));
        gate.end(-5);
        // An error once the failure has been noticed.
        if let Ok(other) = two.raw().allocate(LONG) {
            assert_ne!(other, base, "{memory:?}: the fills still run");
            // SAFETY: it was just allocated on this queue, and is freed once.
            unsafe { two.raw().free(other, LONG) }.unwrap();
        }
        // An error where the runtime shows the failure.
        let _ = device.synchronize();
        // SAFETY: this is the reference of `depend`.
        unsafe { release_event(barrier) }.unwrap();
        let before = fake::live();
        assert_clean(&device);
        assert!(soon(|| {
            device.trim();
            fake::live() < before
        }));
        drop((one, two, gate, device));
        assert!(soon(|| fake::live() <= owned), "{memory:?}: lost");
        assert_eq!(fake::misuses(), 0);
    }
}

/// What has no memory left for an allocation, and another failure.
fn allocation(memory: OpenClMemory) -> (&'static str, Option<i32>) {
    match memory {
        OpenClMemory::Usm => ("clDeviceMemAllocINTEL", Some(-30)),
        OpenClMemory::Handles => ("clCreateBuffer", Some(-30)),
        // It returns no code.
        _ => ("clSVMAlloc", None),
    }
}

/// Memory that was freed, and is used until a gate opens, is there in the end.
#[test]
fn an_allocation_waits_for_memory_that_was_freed() {
    if !fake::is_loaded("faults::endings::an_allocation_waits_for_memory_that_was_freed") {
        return;
    }
    for memory in memories() {
        let device = open(memory);
        let (call, other_code) = allocation(memory);
        let (one, two) = (device.new_queue().unwrap(), device.new_queue().unwrap());
        let (first, second) = (piece(&one), piece(&two));
        free(&two, second);
        two.synchronize().unwrap();
        let mut held = hold(&one);
        free(&one, first);
        let opened = AtomicBool::new(false);
        fake::fail(call, 1, -4);
        std::thread::scope(|scope| {
            let large = scope.spawn(|| {
                let large = two.raw().allocate(1 << 20);
                (large, opened.load(Ordering::SeqCst))
            });
            std::thread::sleep(Duration::from_millis(30));
            opened.store(true, Ordering::SeqCst);
            held.open();
            let (large, was_opened) = large.join().unwrap();
            // SAFETY: it was just allocated, and is freed once.
            unsafe { two.raw().free(large.unwrap(), 1 << 20) }.unwrap();
            assert!(was_opened, "{memory:?}: allocated without memory");
        });
        assert!(fake::clear());
        other_failures(&device, &two, call, other_code);
        assert_clean(&device);
    }
}

/// No other failure is tried again.
fn other_failures(device: &Device, queue: &Queue, call: &str, code: Option<i32>) {
    let Some(code) = code else { return };
    // There is something that could be freed.
    free(queue, piece(queue));
    device.synchronize().unwrap();
    fake::fail(call, 1, code);
    let before = fake::calls(call);
    let failed = queue.raw().allocate(1 << 22);
    assert!(matches!(failed, Err(Error::Device { .. })), "{failed:?}");
    assert_eq!(fake::calls(call), before + 1);
    assert!(fake::clear());
}

fn piece(queue: &Queue) -> arrow_device::device::DevicePtr {
    queue.raw().allocate(1 << 10).unwrap()
}

fn free(queue: &Queue, base: arrow_device::device::DevicePtr) {
    // SAFETY: the tests free each piece once.
    unsafe { queue.raw().free(base, 1 << 10) }.unwrap();
}
