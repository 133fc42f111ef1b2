//! The device under test, with each kind of memory, for the tests that all backends share.

use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device::device::engine::Engine;
use arrow_device::{Device, Error, Queue};
use arrow_device_oneapi::{OneApiConfig, OneApiDevice, OneApiMemory};

use crate::kit::config;
pub(crate) use crate::kit::hold_by_event as hold;
use crate::stream_suite::Rig;
use crate::suite::{limit, rig};

pub(crate) const MEMORIES: [OneApiMemory; 3] = [
    OneApiMemory::Device,
    OneApiMemory::Shared,
    OneApiMemory::Host,
];

/// The first device with unified shared memory, with an id that no other device of this process has.
pub(crate) fn with(memory: OneApiMemory) -> Option<OneApiConfig> {
    static NEXT: AtomicI64 = AtomicI64::new(100);
    limit();
    let config = config()?.with_memory(memory).with_own_context();
    Some(config.with_id(NEXT.fetch_add(1, Ordering::Relaxed)))
}

pub(crate) fn open(memory: OneApiMemory) -> Option<Device> {
    with(memory).map(|config| config.open().unwrap())
}

pub(crate) fn all() -> Vec<Device> {
    MEMORIES.into_iter().filter_map(open).collect()
}

pub(crate) fn unclean(device: &Device) -> Option<String> {
    device.trim();
    match Engine::<OneApiDevice>::of(device).unwrap().in_use() {
        (0, _, 0) => None,
        left => Some(format!("{device}: {left:?} are in use")),
    }
}

/// What a forked child is refused, beside the core's functions.
pub(crate) fn refused(_queue: &Queue) -> Vec<Error> {
    vec![OneApiConfig::new(0).open().unwrap_err()]
}

pub(crate) fn rigs() -> Vec<Rig> {
    all().into_iter().map(|device| rig(device, None)).collect()
}
