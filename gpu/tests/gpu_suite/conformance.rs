//! The conformance suite.

use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_device_conformance::{Subject, run};

use super::hold::hold;
use super::{Place, everywhere};
use crate::vendor::{DEVICE, HOST, Memory, open_device};

pub(crate) fn suite(place: &Place, memory: Memory) {
    let mut subject = Subject::new(place.open(memory).device);
    if !place.others.is_empty() {
        let (others, next) = (place.others.clone(), AtomicUsize::new(1));
        subject = subject.with_another(move || {
            let other = others[next.fetch_add(1, Ordering::Relaxed) % others.len()];
            open_device(memory, other).unwrap()
        });
    }
    if let Some(balance) = place.balance.clone() {
        subject = subject.with_balance(move || balance());
    }
    // A real driver waits for the device when it copies between host memories, and may do so for managed
    // memory: then nothing opens the hold.
    if memory == DEVICE || place.balance.is_some() {
        subject = subject.with_hold(hold);
    }
    if place.lazy {
        subject = subject.runs_only_when_waited_for();
    }
    run(&subject);
}

#[test]
fn device_memory() {
    everywhere(|place| suite(place, DEVICE));
}

#[test]
fn page_locked_memory() {
    everywhere(|place| suite(place, HOST));
}
