//! Devices of each kind of memory, for the tests that all backends share.

use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device::{Device, Error, Queue};
use arrow_device_conformance::Hold;
use arrow_device_oneapi::{OneApiConfig, OneApiDevice, OneApiMemory};

use crate::first::config;
use crate::gate::hold_by_event;
use crate::stream_suite::Rig;
use crate::suite::{limit, rig};

/// The first device with unified shared memory, with an id that no other device of this process has.
pub(crate) fn open(memory: OneApiMemory) -> Option<Device> {
    static NEXT: AtomicI64 = AtomicI64::new(100);
    limit();
    let config = config()?.with_memory(memory).with_own_context();
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    Some(config.with_id(id).open().unwrap())
}

pub(crate) fn all() -> Vec<Device> {
    let memories = [
        OneApiMemory::Device,
        OneApiMemory::Shared,
        OneApiMemory::Host,
    ];
    memories.into_iter().filter_map(open).collect()
}

pub(crate) fn unclean(device: &Device) -> Option<String> {
    device.trim();
    match OneApiDevice::of(device).unwrap().outstanding() {
        [0, _, 0, 0, 0] => None,
        left => Some(format!("{device}: {left:?} are left")),
    }
}

pub(crate) fn hold(queue: &Queue) -> Hold {
    let gate = hold_by_event(queue);
    Hold::new(move || gate.open())
}

/// What a forked child is refused, beside the core's functions.
pub(crate) fn refused(_queue: &Queue) -> Vec<Error> {
    vec![OneApiConfig::new(0).open().unwrap_err()]
}

pub(crate) fn rigs() -> Vec<Rig> {
    all().into_iter().map(|device| rig(device, None)).collect()
}
