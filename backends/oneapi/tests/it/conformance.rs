//! The conformance suite on the three kinds of memory, with two ways to hold a queue.

use arrow_device::device::Queue;
use arrow_device_conformance::Hold;
use arrow_device_oneapi::OneApiMemory;

use crate::gate::hold_by_host_task;
use crate::rigs::{hold, open};
use crate::suite::conforms;

fn by_host_task(queue: &Queue) -> Hold {
    let gate = hold_by_host_task(queue, false);
    Hold::new(move || gate.open())
}

#[test]
fn device_memory() {
    conforms(|| open(OneApiMemory::Device), by_host_task);
    conforms(|| open(OneApiMemory::Device), hold);
}

#[test]
fn shared_memory() {
    conforms(|| open(OneApiMemory::Shared), hold);
}

#[test]
fn host_memory() {
    conforms(|| open(OneApiMemory::Host), by_host_task);
}
