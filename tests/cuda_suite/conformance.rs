//! The conformance suite.

use std::cell::Cell;

use arrow_device::conformance::{Subject, run};
use arrow_device::cuda::{CudaConfig, CudaMemory};

use super::hold::hold;
use super::{Place, everywhere};

fn suite(place: &Place, memory: CudaMemory) {
    let mut subject = Subject::new(place.open(memory).device);
    if !place.others.is_empty() {
        let (others, next) = (place.others.clone(), Cell::new(0));
        subject = subject.with_another(move || {
            next.set((next.get() + 1) % others.len());
            let config = CudaConfig::new(others[next.get()]).with_memory(memory);
            config.open().unwrap()
        });
    }
    // A driver may wait for the device when it copies managed memory: then nothing opens the hold.
    if memory != CudaMemory::Managed {
        subject = subject.with_hold(hold);
    }
    run(&subject);
}

#[test]
fn device_memory() {
    everywhere(|place| suite(place, CudaMemory::Device));
}

#[test]
fn page_locked_memory() {
    everywhere(|place| suite(place, CudaMemory::Host));
}

#[test]
fn managed_memory() {
    everywhere(|place| suite(place, CudaMemory::Managed));
}
