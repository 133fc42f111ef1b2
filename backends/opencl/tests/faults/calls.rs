//! What no runtime shows: which calls are made, and when.

use std::sync::Arc;
use std::time::Duration;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device::DeviceBufferMut;
use arrow_device::device::EventPtr;
use arrow_device_opencl::OpenClMemory;

use crate::fake;
use crate::opencl::{Gate, has, hold, memories, open, soon};

/// The stand-in fills new memory that the host can read.
#[test]
fn memory_that_the_host_reads_is_initialised() {
    let _alone = fake::alone();
    if !has(OpenClMemory::FineSvm) {
        return;
    }
    let device = open(OpenClMemory::FineSvm);
    let queue = device.new_queue().unwrap();
    for bytes in [1, 100, 70_000] {
        let memory = DeviceBufferMut::allocate(&queue, bytes).unwrap();
        let host = memory.freeze().unwrap().into_host().unwrap();
        assert!(host.iter().all(|byte| *byte == 0), "{bytes} bytes");
    }
}

/// A runtime may keep commands back until it is told to run them.
#[test]
fn queues_are_flushed() {
    let _alone = fake::alone();
    for memory in memories() {
        let device = open(memory);
        let flushes = || fake::calls("clFlush");
        let before = flushes();
        let event = device.default_queue().record().unwrap();
        assert!(flushes() > before, "an event may never complete");
        drop(event);

        // A foreign producer's queue, too.
        let other = open(memory);
        let theirs = other.new_queue().unwrap();
        let mut held = hold(&theirs);
        let event = theirs.record().unwrap().unwrap();
        // As a foreign producer's: not a cell of this crate.
        // SAFETY: the pointer is that of a live event.
        let handle = unsafe { *event.as_ptr().as_ptr().cast::<cl3::types::cl_event>() };
        let pointer = EventPtr::new((&raw const handle).cast_mut().cast()).unwrap();
        let before = flushes();
        // SAFETY: the event is live.
        unsafe { device.default_queue().raw().wait(pointer) }.unwrap();
        assert!(flushes() > before, "a wait that may never end");
        held.open();
        device.synchronize().unwrap();
    }
}

/// Memory and queues are given back when their work is done, and not before.
#[test]
fn a_device_that_ends_while_it_works() {
    let _alone = fake::alone();
    for memory in memories() {
        let other = open(memory);
        let gate = Gate::new(&other);
        let owned = fake::live();
        let device = open(memory);
        let queue = device.new_queue().unwrap();
        let event = gate.event();
        let pointer = EventPtr::new((&raw const event).cast_mut().cast()).unwrap();
        // SAFETY: the event is live.
        unsafe { queue.raw().wait(pointer) }.unwrap();
        let column = Arc::new(Int64Array::from_iter_values(0..100_000)) as _;
        let batch = RecordBatch::try_from_iter([("a", column)]).unwrap();
        drop(device.upload_on(&batch, &queue).unwrap());
        drop((queue, device));
        std::thread::sleep(Duration::from_millis(20));
        assert!(
            fake::live() > owned + 2,
            "{memory:?}: freed while it is used"
        );
        gate.end(0);
        assert!(
            soon(|| fake::live() == owned),
            "{memory:?}: {} instead of {owned}",
            fake::live()
        );
        assert_eq!(fake::misuses(), 0);
    }
}
