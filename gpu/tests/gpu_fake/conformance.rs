//! The conformance suite, for each kind of memory and way of the driver.

use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_device_conformance::{Subject, run};

use crate::fake::{Group, LAZY, NO_BATCH, NO_POOLS, PAGEABLE_EAGER, PINS, in_mode};
use crate::rig::{Rig, assert_gone, hold, unclean};
use crate::vendor::{Config, Memory};

pub(crate) fn suite(flags: u32, memory: Memory) {
    let pins = if memory == Memory::Host { PINS } else { 0 };
    let group = Group::open(4, flags | pins);
    let open = move |i: usize| {
        let config = Config::new(group.ordinal() + i).with_memory(memory);
        Rig::of(group, &config).device
    };
    let next = AtomicUsize::new(0);
    let mut subject = Subject::new(open(0))
        .with_another(move || open(1 + next.fetch_add(1, Ordering::Relaxed) % 3))
        .with_hold(hold)
        .with_balance(move || match unclean(group) {
            None => Ok(()),
            Some(text) => Err(text),
        });
    if flags & LAZY != 0 || in_mode(LAZY) {
        subject = subject.runs_only_when_waited_for();
    }
    run(&subject);
    drop(subject);
    assert_gone(group);
}

#[test]
fn device_memory() {
    suite(0, Memory::Device);
    suite(PAGEABLE_EAGER | NO_BATCH, Memory::Device);
}

#[test]
fn device_memory_and_a_lazy_driver() {
    suite(LAZY, Memory::Device);
    suite(LAZY | PAGEABLE_EAGER | NO_BATCH, Memory::Device);
}

#[test]
fn device_memory_without_pools() {
    suite(NO_POOLS, Memory::Device);
    suite(NO_POOLS | LAZY, Memory::Device);
}

#[test]
fn page_locked_memory() {
    suite(0, Memory::Host);
    suite(LAZY, Memory::Host);
}
