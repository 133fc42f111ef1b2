//! Waits within a poll, made visible.
//!
//! `host_waits` tells those that are counted. On a deferred device who waits runs the work, counted or not, so a
//! kernel in it knows on which thread, and in the middle of what.

use std::cell::Cell;

use arrow_device::Device;

use crate::simkit::launch;

thread_local! {
    static IN_POLL: Cell<bool> = const { Cell::new(false) };
}

/// Runs `poll`, which must not wait.
pub(crate) fn in_poll<T>(poll: impl FnOnce() -> T) -> T {
    IN_POLL.set(true);
    let result = poll();
    IN_POLL.set(false);
    result
}

/// Whoever waits, within a poll, for what is queued behind this gets an error.
pub(crate) fn forbid_waits(device: &Device) {
    let kernel = |_: &mut arrow_device::device::sim::SimMemory<'_>| match IN_POLL.get() {
        true => Err("ran within a poll".into()),
        false => Ok(()),
    };
    launch(&device.default_queue(), kernel).unwrap();
}
