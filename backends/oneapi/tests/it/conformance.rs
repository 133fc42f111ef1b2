//! The conformance suite on the three kinds of memory, with two ways to hold a queue.

use std::time::Duration;

use arrow_device_conformance::{Subject, every_call_fails, run, run_in_processes};
use arrow_device_oneapi::{OneApiConfig, OneApiDevice, OneApiMemory, register};

use crate::kit::{
    OWN_CONTEXT, config, consumer, foreign, hold_by_event, hold_by_host_task, number,
};
use crate::rigs::with;

fn subject(memory: OneApiMemory) -> Option<Subject> {
    config()?;
    let subject = Subject::of::<OneApiDevice>(move || with(memory).open().unwrap());
    let subject = subject
        .with_patience(Duration::from_secs(60))
        .with_hold(hold_by_event)
        .with_foreign_event(|_| foreign(0))
        .with_foreign_event(|_| foreign(OWN_CONTEXT))
        .with_consumer(consumer)
        .with_registration(register, number()? as i64);
    Some(subject.with_refused(|_| vec![OneApiConfig::new(0).open().unwrap_err()]))
}

#[test]
fn device_memory() {
    subject(OneApiMemory::Device).as_ref().map(run);
}

#[test]
fn device_memory_behind_host_tasks() {
    let subject = subject(OneApiMemory::Device);
    let subject = subject.map(|subject| subject.with_hold(|queue| hold_by_host_task(queue, false)));
    subject.as_ref().map(run);
}

#[test]
fn shared_memory() {
    subject(OneApiMemory::Shared).as_ref().map(run);
}

#[test]
fn host_memory() {
    subject(OneApiMemory::Host).as_ref().map(run);
}

#[test]
fn every_call() {
    if config().is_some() {
        let parts = || with(OneApiMemory::Device).parts();
        every_call_fails(|| parts().map(|(device, queue, _)| (device, queue)), 30);
    }
}

#[test]
fn in_processes() {
    let open = || subject(OneApiMemory::Device);
    run_in_processes("conformance::in_processes", open);
}
