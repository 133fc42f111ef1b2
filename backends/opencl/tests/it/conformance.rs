//! The conformance suite, on each kind of memory that the first device has.

use arrow_device_opencl::OpenClMemory;

use crate::rigs::{has, hold, open};

fn conforms(memory: OpenClMemory) {
    crate::suite::conforms(move || has(memory).then(|| open(memory)), hold);
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
fn handles() {
    conforms(OpenClMemory::Handles);
}
