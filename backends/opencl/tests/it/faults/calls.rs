//! What no runtime shows: which calls are made, and when.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arrow_device::device::{CopyKind, CopyOp, DevicePtr, EventPtr};
use arrow_device::{DeviceBufferMut, Queue};
use arrow_device_opencl::OpenClMemory;

use crate::fake;
use crate::rigs::{Gate, hold, memories, open};
use crate::suite::{assert_error, soon};

/// A runtime may keep commands back until it is told to run them.
#[test]
fn queues_are_flushed() {
    if !fake::is_loaded("faults::calls::queues_are_flushed") {
        return;
    }
    for memory in memories() {
        let device = open(memory);
        let flushes = || fake::calls("clFlush");
        let before = flushes();
        let event = device.default_queue().record().unwrap();
        assert!(flushes() > before, "an event may never complete");
        drop(event);

        // Not a foreign producer's, which may release its queue at any time: its handle is not used.
        let other = open(memory);
        let theirs = other.new_queue().unwrap();
        let mut held = hold(&theirs);
        let event = theirs.record().unwrap().unwrap();
        // As a foreign producer's: not a place of this crate.
        // SAFETY: the pointer is that of a live event.
        let handle = unsafe { *event.as_ptr().as_ptr().cast::<cl3::types::cl_event>() };
        let pointer = EventPtr::new((&raw const handle).cast_mut().cast()).unwrap();
        let before = flushes();
        let queue = device.default_queue();
        // SAFETY: the event is live.
        unsafe {
            assert!(!device.backend().query_event(pointer).unwrap());
            queue.raw().wait(pointer).unwrap();
        }
        assert_eq!(flushes(), before, "the handle of a queue that may be gone");
        held.open();
        device.synchronize().unwrap();
    }
}

/// Memory and queues are given back when their work is done, and not before.
#[test]
fn a_device_that_ends_while_it_works() {
    if !fake::is_loaded("faults::calls::a_device_that_ends_while_it_works") {
        return;
    }
    for (memory, is_lost) in memories().into_iter().flat_map(|m| [(m, false), (m, true)]) {
        let other = open(memory);
        let gate = Gate::new(&other);
        let owned = fake::live();
        let device = open(memory);
        let queue = device.new_queue().unwrap();
        wait(&queue, &gate);
        let raw = queue.raw();
        let base = raw.allocate(100_000).unwrap();
        // SAFETY: the memory was just allocated, and is freed once.
        unsafe {
            raw.fill(base, 7, 100_000).unwrap();
            if !is_lost {
                raw.free(base, 100_000).unwrap();
            }
        }
        let before = fake::live();
        drop((queue, device));
        std::thread::sleep(Duration::from_millis(20));
        // The device's default queue is done; the other one and its memory, the context and the gate are kept.
        assert!(
            fake::live() + 1 >= before,
            "{memory:?}: freed while it is used"
        );
        gate.end(0);
        assert!(
            // The device before may not have ended yet when `owned` was counted.
            soon(|| fake::live() <= owned),
            "{memory:?}: {} instead of {owned}",
            fake::live()
        );
        assert_eq!(fake::misuses(), 0);
    }
}

/// None of a list of copies runs after an error, so that their memory may be freed.
#[test]
fn a_list_that_fails_half_way_waits_for_the_first_half() {
    if !fake::is_loaded("faults::calls::a_list_that_fails_half_way_waits_for_the_first_half") {
        return;
    }
    for memory in memories() {
        let (device, other) = (open(memory), open(memory));
        let (queue, gate) = (device.new_queue().unwrap(), Gate::new(&other));
        let call = match memory {
            OpenClMemory::Usm => "clEnqueueMemcpyINTEL",
            OpenClMemory::Handles => "clEnqueueWriteBuffer",
            _ => "clEnqueueSVMMemcpy",
        };
        let (block, source) = (DeviceBufferMut::allocate(&queue, 128).unwrap(), [1u8; 64]);
        let copy = |to| CopyOp {
            src: DevicePtr::new(source.as_ptr().cast_mut().cast()),
            dst: block.address().offset(to),
            bytes: 64,
            kind: CopyKind::HostToDevice,
        };
        wait(&queue, &gate);
        fake::fail(call, 2, -5);
        let opened = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let copies = scope.spawn(|| {
                // SAFETY: both live until the call has returned, which waits for the copies if it fails.
                let failed = unsafe { queue.raw().copy(&[copy(0), copy(64)]) };
                assert!(
                    opened.load(Ordering::SeqCst),
                    "{memory:?}: the first copy still runs"
                );
                failed
            });
            std::thread::sleep(Duration::from_millis(20));
            opened.store(true, Ordering::SeqCst);
            gate.end(0);
            assert_error(copies.join().unwrap(), call);
        });
        assert!(fake::clear());
    }
}

/// Makes a queue wait for a gate of another device.
fn wait(queue: &Queue, gate: &Gate) {
    let event = gate.event();
    let pointer = EventPtr::new((&raw const event).cast_mut().cast()).unwrap();
    // SAFETY: the event is live.
    unsafe { queue.raw().wait(pointer) }.unwrap();
}

/// Without a wait for the device: the next one that is dropped takes them along.
#[test]
fn queues_that_were_dropped_are_given_back() {
    if !fake::is_loaded("faults::calls::queues_that_were_dropped_are_given_back") {
        return;
    }
    for memory in memories() {
        let device = open(memory);
        let owned = fake::live();
        for _ in 0..20 {
            drop(device.new_queue().unwrap());
        }
        let few = soon(|| {
            drop(device.new_queue().unwrap());
            // The last one, with the event after its work.
            fake::live() <= owned + 2
        });
        assert!(few, "{memory:?}: {} instead of {owned}", fake::live());
    }
}
