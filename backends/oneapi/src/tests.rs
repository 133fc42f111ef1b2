//! Failures that SYCL lets no program outside make.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::Device;
use arrow_device::device::{DevicePtr, EventPtr};

use crate::OneApiDevice;
use crate::memory::After;
use crate::object::Owned;
use crate::shared::Shared;
use crate::sys::{Answer, Failed, raw};

#[path = "../tests/it/first.rs"]
#[allow(dead_code)]
mod first;
#[path = "../tests/it/gate.rs"]
#[allow(dead_code)]
mod gate;
#[path = "../tests/it/programs.rs"]
#[allow(dead_code)]
mod programs;

use gate::{Gate, hold_by_kernel};
use programs::programs;

const BRIEF: Duration = Duration::from_millis(100);

fn device() -> Option<(Device, Arc<Shared>)> {
    let device = first::device()?;
    let shared = OneApiDevice::of(&device).unwrap().shared.clone();
    Some((device, shared))
}

/// A queue with work that runs until the gate is open.
fn busy(shared: &Shared) -> (Arc<Owned<raw::Queue>>, Gate) {
    let queue = Arc::new(shared.context.queue(&shared.device).unwrap());
    shared.add_queue(&queue);
    // SAFETY: the queue is live.
    let gate = unsafe { hold_by_kernel(queue.sycl_queue()) };
    (queue, gate)
}

/// An event that has failed.
fn failed(shared: &Shared) -> Owned<raw::Event> {
    let mut held = std::ptr::null_mut();
    // SAFETY: each is live until it is deleted; `held` is valid for a write.
    unsafe {
        let queue = (programs().queue_new)(shared.id.id, 0);
        let event = (programs().event_held)(queue, &raw mut held);
        (programs().end_event)(held, -5);
        let copy = shared.sycl.copy_event(EventPtr::new(event).unwrap());
        (programs().event_delete)(event);
        (programs().queue_delete)(queue);
        copy.unwrap()
    }
}

/// No event at all.
fn refused(_: &Shared) -> Answer<Owned<raw::Event>> {
    Err(Failed {
        call: "a test",
        code: -1,
        message: "a test".into(),
    })
}

#[test]
fn failed_events_are_no_end_of_work() {
    let Some(_) = device() else { return };
    for last in [|shared: &Shared| Ok(failed(shared)), refused] {
        for is_dropped in [false, true] {
            let (_device, shared) = device().unwrap();
            let (queue, gate) = busy(&shared);
            let last = last(&shared);
            let waiting = {
                let shared = shared.clone();
                std::thread::spawn(move || {
                    if is_dropped {
                        shared.leave(queue, last);
                        shared.finish()
                    } else {
                        shared.drain(&queue, last)
                    }
                })
            };
            std::thread::sleep(BRIEF);
            assert!(!waiting.is_finished());
            gate.open();
            waiting.join().unwrap().unwrap_err();
        }
    }
}

/// Memory is free once the queue's work has ended.
#[test]
fn failed_events_free_no_memory() {
    let Some((_device, other)) = device() else {
        return;
    };
    let owns = |base: DevicePtr| other.context.kind(base).unwrap().is_some();
    for is_dropped in [false, true] {
        let (device, shared) = device().unwrap();
        let (queue, gate) = busy(&shared);
        let base = shared.blocks.allocate(0, 1 << 20).unwrap();
        let event = failed(&shared);
        let after = After { event, queue };
        shared.blocks.free(base, 0, Some(after)).unwrap();
        if is_dropped {
            drop((device, shared));
        } else {
            // Neither given to another queue nor freed.
            assert_ne!(shared.blocks.allocate(1, 1 << 20).unwrap(), base);
            shared.check().unwrap_err();
            shared.blocks.free_idle(true);
        }
        std::thread::sleep(BRIEF);
        assert!(owns(base));
        gate.open();
        let start = Instant::now();
        while owns(base) {
            assert!(start.elapsed() < Duration::from_secs(10), "it is not freed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
