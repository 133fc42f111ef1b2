//! The conformance suite on the three kinds of memory, with two ways to hold a queue.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use arrow_device::device::Queue;
use arrow_device_conformance::{Hold, Subject, run};
use arrow_device_oneapi::{OneApiConfig, OneApiDevice, OneApiMemory};

use crate::gate::{hold_by_event, hold_by_host_task};
use crate::rigs::config;

fn by_host_task(queue: &Queue) -> Hold {
    let gate = hold_by_host_task(queue, false);
    Hold::new(move || gate.open())
}

fn by_event(queue: &Queue) -> Hold {
    let gate = hold_by_event(queue);
    Hold::new(move || gate.open())
}

fn conforms(memory: OneApiMemory, hold: fn(&Queue) -> Hold) {
    static NEXT: AtomicI64 = AtomicI64::new(100);

    let Some(config) = config() else { return };
    let config = config.with_memory(memory);
    let device = config.open().unwrap();
    let measured = device.clone();
    let another: OneApiConfig = config.clone().with_own_context();
    let subject = Subject::new(device)
        .with_another(move || {
            another
                .clone()
                .with_id(NEXT.fetch_add(1, Ordering::Relaxed))
                .open()
                .unwrap()
        })
        .with_hold(hold)
        .with_patience(Duration::from_secs(20))
        .with_balance(
            move || match OneApiDevice::of(&measured).unwrap().outstanding() {
                [0, _, 0, 0, 0] => Ok(()),
                left => Err(format!("left: {left:?}")),
            },
        )
        .strict();
    run(&subject);
}

#[test]
fn device_memory() {
    conforms(OneApiMemory::Device, by_host_task);
    conforms(OneApiMemory::Device, by_event);
}

#[test]
fn shared_memory() {
    conforms(OneApiMemory::Shared, by_event);
}

#[test]
fn host_memory() {
    conforms(OneApiMemory::Host, by_host_task);
}
