//! The conformance suite, while work is held back by the host, and while it is held up on the device.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow_device::{Device, Queue};
use arrow_device_conformance::{Hold, Subject, run};
use arrow_device_vulkan::VulkanConfig;

use crate::rigs::{hold_back, hold_on_device, is_there, next_id, open, unclean};

fn conforms(open: fn() -> Device, hold: fn(&Queue) -> Hold) {
    if !is_there() {
        return;
    }
    let device = open();
    let all = Arc::new(Mutex::new(vec![device.clone()]));
    let others = all.clone();
    let subject = Subject::new(device)
        .with_another(move || {
            let device = open();
            others.lock().unwrap().push(device.clone());
            device
        })
        .with_hold(hold)
        // The validation layer may hold a thread up for ten seconds at a time.
        .with_patience(Duration::from_secs(60))
        .with_balance(move || {
            let all = all.lock().unwrap();
            all.iter().find_map(unclean).map_or(Ok(()), Err)
        })
        .strict();
    run(&subject);
}

#[test]
fn behind_an_event_of_a_program() {
    conforms(open, hold_back);
}

#[test]
fn behind_a_semaphore_on_the_device() {
    conforms(open, hold_on_device);
}

/// The driver may have a single VkQueue: two that are the same one wait for each other as two do.
fn open_with_two_queues() -> Device {
    let config = VulkanConfig::new(0).with_id(next_id());
    config.with_repeated_queues().open().unwrap()
}

#[test]
fn on_two_queues_behind_an_event_of_a_program() {
    conforms(open_with_two_queues, hold_back);
}

#[test]
fn on_two_queues_behind_a_semaphore_on_the_device() {
    conforms(open_with_two_queues, hold_on_device);
}
