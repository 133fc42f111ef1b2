//! The conformance suite, on a device of this crate and on one that a program has.

use std::time::Duration;

use arrow_device::Device;
use arrow_device_conformance::{Subject, every_call_fails, next_id, run};
use arrow_device_vulkan::{VulkanConfig, VulkanDevice, VulkanQueue, devices, register};

use crate::program::Program;
use crate::rigs::{consumer, foreign, hold, is_there, open};

fn subject(open: fn() -> Device) -> Option<Subject> {
    let subject = is_there().then(|| Subject::of::<VulkanDevice>(open))?;
    let subject = subject
        .with_patience(Duration::from_secs(60))
        .with_hold(hold)
        .with_foreign_event(foreign)
        .with_consumer(consumer)
        .with_registration(register, 0);
    Some(subject.with_refused(|queue| {
        vec![
            VulkanQueue::of(queue).unwrap().submitted().unwrap_err(),
            devices().unwrap_err(),
            VulkanConfig::new(0).open().unwrap_err(),
        ]
    }))
}

#[test]
fn on_a_device_of_this_crate() {
    subject(open).as_ref().map(run);
}

#[test]
fn on_a_device_of_a_program() {
    subject(|| Program::new().adopt()).as_ref().map(run);
}

#[test]
fn every_call() {
    if is_there() {
        let open = || {
            let config = VulkanConfig::new(0).with_id(next_id());
            config.parts().map(|(device, queue, _)| (device, queue))
        };
        every_call_fails(open, 0);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn in_processes() {
    arrow_device_conformance::run_in_processes("conformance::in_processes", || subject(open));
}
