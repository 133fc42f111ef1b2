//! The conformance suite.

use std::cell::Cell;

use arrow_device_conformance::{Subject, run};

use super::hold::hold;
use super::{Place, everywhere};
use crate::vendor::{Config, MANAGED, Memory};

pub(crate) fn suite(place: &Place, memory: Memory) {
    let mut subject = Subject::new(place.open(memory).device);
    if !place.others.is_empty() {
        let (others, next) = (place.others.clone(), Cell::new(0));
        subject = subject.with_another(move || {
            next.set((next.get() + 1) % others.len());
            let config = Config::new(others[next.get()]).with_memory(memory);
            config.open().unwrap()
        });
    }
    // A driver may wait for the device when it copies managed memory: then nothing opens the hold.
    if Some(memory) != MANAGED {
        subject = subject.with_hold(hold);
    }
    run(&subject);
}

#[test]
fn device_memory() {
    everywhere(|place| suite(place, Memory::Device));
}

#[test]
fn page_locked_memory() {
    everywhere(|place| suite(place, Memory::Host));
}
