//! The conformance suite, while work is held back by the host, and while it is held up on the device.

use arrow_device::{Device, Queue};
use arrow_device_conformance::Hold;
use arrow_device_vulkan::VulkanConfig;

use crate::rigs::{hold, hold_on_device, is_there, next_id, open};

fn conforms(open: fn() -> Device, hold: fn(&Queue) -> Hold) {
    crate::suite::conforms(move || is_there().then(open), hold);
}

#[test]
fn behind_an_event_of_a_program() {
    conforms(open, hold);
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
    conforms(open_with_two_queues, hold);
}

#[test]
fn on_two_queues_behind_a_semaphore_on_the_device() {
    conforms(open_with_two_queues, hold_on_device);
}
