//! The device under test, with each kind of memory.

use arrow_device_conformance::next_id;
use arrow_device_oneapi::{OneApiConfig, OneApiMemory};

use crate::kit::config;

/// The first device with unified shared memory, with an id that no other device of this process has.
pub(crate) fn with(memory: OneApiMemory) -> OneApiConfig {
    let config = config().unwrap().with_memory(memory).with_own_context();
    config.with_id(100 + next_id())
}
