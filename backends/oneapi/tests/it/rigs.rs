//! The device under test, with each kind of memory.

use std::sync::atomic::{AtomicI64, Ordering};

use arrow_device_conformance::abort_if_hung;
use arrow_device_oneapi::{OneApiConfig, OneApiMemory};

use crate::kit::config;

/// The first device with unified shared memory, with an id that no other device of this process has.
pub(crate) fn with(memory: OneApiMemory) -> OneApiConfig {
    static NEXT: AtomicI64 = AtomicI64::new(100);
    abort_if_hung();
    let config = config().unwrap().with_memory(memory).with_own_context();
    config.with_id(NEXT.fetch_add(1, Ordering::Relaxed))
}
