//! The conformance suite, on each kind of memory that the first device has.

use std::time::Duration;

use arrow_device_conformance::{Subject, every_call_fails, run};
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, devices, register};

use crate::rigs::{consumer, foreign, has, hold, memories, open};

fn subject(memory: OpenClMemory) -> Option<Subject> {
    let subject = has(memory).then(|| Subject::of::<OpenClDevice>(move || open(memory)))?;
    let subject = subject
        .with_patience(Duration::from_secs(60))
        .with_hold(hold)
        // In the device's context, and in another one.
        .with_foreign_event(foreign)
        .with_foreign_event(move |_| foreign(&open(memory)))
        .with_consumer(consumer)
        .with_registration(|devices| drop(register(devices)), 0)
        .with_refused(|_| {
            let opened = OpenClConfig::new(0).open();
            vec![devices().unwrap_err(), opened.unwrap_err()]
        });
    Some(subject)
}

#[test]
fn unified_shared_memory() {
    subject(OpenClMemory::Usm).as_ref().map(run);
}

#[test]
fn coarse_shared_virtual_memory() {
    subject(OpenClMemory::Svm).as_ref().map(run);
}

#[test]
fn handles() {
    subject(OpenClMemory::Handles).as_ref().map(run);
}

#[test]
fn every_call() {
    for memory in memories() {
        let config = OpenClConfig::new(0).with_memory(memory);
        every_call_fails(
            || config.parts().map(|(device, queue, _)| (device, queue)),
            0,
        );
    }
}

#[test]
#[cfg(target_os = "linux")]
fn in_processes() {
    let memory = || memories().into_iter().next();
    arrow_device_conformance::run_in_processes("conformance::in_processes", || subject(memory()?));
}
