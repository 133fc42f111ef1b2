//! The conformance suite, on each kind of memory that the first device has.

use std::sync::{Arc, Mutex};

use arrow_device_conformance::{Subject, run};
use arrow_device_opencl::OpenClMemory;

use crate::rigs::{has, hold, open, unclean};

fn conforms(memory: OpenClMemory) {
    if !has(memory) {
        return;
    }
    let device = open(memory);
    let all = Arc::new(Mutex::new(vec![device.clone()]));
    let others = all.clone();
    let subject = Subject::new(device)
        .with_another(move || {
            let device = open(memory);
            others.lock().unwrap().push(device.clone());
            device
        })
        .with_hold(hold)
        .with_balance(move || {
            let all = all.lock().unwrap();
            all.iter().find_map(unclean).map_or(Ok(()), Err)
        })
        .strict();
    run(&subject);
}

#[test]
fn unified_shared_memory() {
    conforms(OpenClMemory::Usm);
}

#[test]
fn coarse_shared_virtual_memory() {
    conforms(OpenClMemory::Svm);
}

#[test]
fn fine_shared_virtual_memory() {
    conforms(OpenClMemory::FineSvm);
}

#[test]
fn handles() {
    conforms(OpenClMemory::Handles);
}
