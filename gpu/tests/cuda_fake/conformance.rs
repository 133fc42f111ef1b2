//! The conformance suite where the driver can do less, or does it otherwise.

use crate::fake::places::place;
use crate::fake::{LAZY, NO_BATCH, NO_CONCURRENT_MANAGED, NO_POOLS, PAGEABLE_EAGER};
use crate::gpu_suite::{at, conformance::suite};
use crate::vendor::{DEVICE, MANAGED, Memory};

fn run(flags: &[u32], memory: Memory) {
    let places = flags.iter().map(|flags| place(*flags));
    at(places.collect(), |place| suite(place, memory));
}

#[test]
fn device_memory_without_pools() {
    run(&[NO_POOLS, NO_POOLS | LAZY], DEVICE);
}

#[test]
fn device_memory_and_early_reads_without_lists() {
    let flags = PAGEABLE_EAGER | NO_BATCH;
    run(&[flags, flags | LAZY], DEVICE);
}

#[test]
fn managed_memory_that_the_host_must_not_touch() {
    let flags = NO_CONCURRENT_MANAGED;
    run(&[flags, flags | LAZY], MANAGED);
}
