//! The conformance suite, for each kind of memory and way of the driver.

use arrow_device::conformance::{Subject, run};
use arrow_device::cuda::{CudaConfig, CudaMemory};

use crate::fake::{Group, LAZY, NO_BATCH, NO_CONCURRENT_MANAGED, NO_POOLS, PAGEABLE_EAGER};
use crate::rig::{Rig, assert_gone, hold, unclean};

fn suite(flags: u32, memory: CudaMemory) {
    let group = Group::open(4, flags);
    let open = move |i: usize| {
        let config = CudaConfig::new(group.ordinal() + i).with_memory(memory);
        Rig::of(group, &config).device
    };
    let next = std::cell::Cell::new(0);
    let subject = Subject::new(open(0))
        .with_another(move || {
            next.set(next.get() % 3 + 1);
            open(next.get())
        })
        .with_hold(hold)
        .with_balance(move || match unclean(group) {
            None => Ok(()),
            Some(text) => Err(text),
        });
    run(&subject);
    drop(subject);
    assert_gone(group);
}

#[test]
fn device_memory() {
    suite(0, CudaMemory::Device);
    suite(PAGEABLE_EAGER | NO_BATCH, CudaMemory::Device);
}

#[test]
fn device_memory_and_a_lazy_driver() {
    suite(LAZY, CudaMemory::Device);
    suite(LAZY | PAGEABLE_EAGER | NO_BATCH, CudaMemory::Device);
}

#[test]
fn device_memory_without_pools() {
    suite(NO_POOLS, CudaMemory::Device);
    suite(NO_POOLS | LAZY, CudaMemory::Device);
}

#[test]
fn page_locked_memory() {
    suite(0, CudaMemory::Host);
    suite(LAZY, CudaMemory::Host);
}

#[test]
fn managed_memory() {
    suite(0, CudaMemory::Managed);
    suite(LAZY, CudaMemory::Managed);
}

#[test]
fn managed_memory_that_the_host_must_not_touch() {
    suite(NO_CONCURRENT_MANAGED, CudaMemory::Managed);
    suite(NO_CONCURRENT_MANAGED | LAZY, CudaMemory::Managed);
}
