//! The conformance suite on the three kinds of memory, with two ways to hold a queue.

use arrow_device::device::Queue;
use arrow_device_conformance::{Hold, every_call_fails};
use arrow_device_oneapi::OneApiMemory;

use crate::kit::{config, hold_by_host_task};
use crate::rigs::{hold, open, with};
use crate::suite::conforms;

fn by_host_task(queue: &Queue) -> Hold {
    hold_by_host_task(queue, false)
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

#[test]
fn calls_fail() {
    let Some(_) = config() else { return };
    let parts = || {
        let (device, queue, _) = with(OneApiMemory::Device).unwrap().parts()?;
        Ok((device, queue))
    };
    every_call_fails(parts, 30);
}
