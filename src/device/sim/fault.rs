//! Injected failures.

use std::sync::Mutex;

use super::INJECTED;
use crate::device::{DeviceId, device_error, lock};
use crate::error::{Error, Result};

/// An operation of a simulated device that can be made to fail.
///
/// Freeing memory and releasing events cannot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultOp {
    /// `RawQueue::allocate`; fails with [`Error::OutOfMemory`].
    Allocate,
    /// `Backend::allocate_host`; fails with [`Error::OutOfMemory`].
    HostAllocate,
    /// `RawQueue::copy`, one for the whole list.
    Copy,
    /// `RawQueue::fill`.
    Fill,
    /// [`SimQueue::launch`](super::SimQueue::launch).
    Launch,
    /// `RawQueue::record`.
    Record,
    /// `RawQueue::wait`.
    QueueWait,
    /// `Backend::wait_event`. `Backend::synchronize` fails only if the device has failed for good.
    HostWait,
    /// `Backend::query_event` and `Backend::notify_event`.
    Query,
    /// `Backend::new_queue`.
    NewQueue,
}

impl FaultOp {
    /// All operations.
    pub const ALL: [Self; 10] = [
        Self::Allocate,
        Self::HostAllocate,
        Self::Copy,
        Self::Fill,
        Self::Launch,
        Self::Record,
        Self::QueueWait,
        Self::HostWait,
        Self::Query,
        Self::NewQueue,
    ];
}

/// Makes chosen operations of a [`SimDevice`](super::SimDevice) fail, and counts all of them.
///
/// A failure happens when the operation is submitted: the call returns an error and nothing is
/// queued. The next call succeeds again. To fail each operation of a program in turn, run the
/// program once to learn [`ops_seen`](Self::ops_seen), then once for each `n` up to that with
/// [`fail_nth_of_any(n)`](Self::fail_nth_of_any).
#[derive(Debug, Default)]
pub struct Faults(Mutex<Counters>);

#[derive(Debug, Default)]
struct Counters {
    /// Operations since the last reset, by kind.
    seen: [u64; FaultOp::ALL.len()],
    /// The count of `seen` that fails; 0 for none.
    armed: [u64; FaultOp::ALL.len()],
    /// The sum of `seen` that fails; 0 for none.
    armed_any: u64,
    fired: u64,
}

impl Faults {
    /// Makes the `n`-th operation of this kind from now fail; 1 is the next one. Replaces an
    /// earlier call for the same kind, and 0 cancels it.
    pub fn fail_nth(&self, op: FaultOp, n: u64) {
        let mut counters = lock(&self.0);
        let seen = counters.seen[op as usize];
        counters.armed[op as usize] = if n == 0 { 0 } else { seen.saturating_add(n) };
    }

    /// As [`fail_nth`](Self::fail_nth), but counts operations of all kinds.
    pub fn fail_nth_of_any(&self, n: u64) {
        let mut counters = lock(&self.0);
        let seen: u64 = counters.seen.iter().sum();
        counters.armed_any = if n == 0 { 0 } else { seen.saturating_add(n) };
    }

    /// Returns how many operations of this kind were tried since the last [`clear`](Self::clear),
    /// failed ones included.
    pub fn seen(&self, op: FaultOp) -> u64 {
        lock(&self.0).seen[op as usize]
    }

    /// Returns how many operations of all kinds were tried since the last [`clear`](Self::clear).
    pub fn ops_seen(&self) -> u64 {
        lock(&self.0).seen.iter().sum()
    }

    /// Returns how many failures were injected since the last [`clear`](Self::clear).
    pub fn fired(&self) -> u64 {
        lock(&self.0).fired
    }

    /// Cancels all failures that have not happened yet, and resets all counts.
    pub fn clear(&self) {
        *lock(&self.0) = Counters::default();
    }

    /// Counts one operation. `bytes` is the size of an allocation.
    pub(super) fn pass(
        &self,
        op: FaultOp,
        device: DeviceId,
        operation: &'static str,
        bytes: usize,
    ) -> Result<()> {
        let mut counters = lock(&self.0);
        counters.seen[op as usize] += 1;
        let total: u64 = counters.seen.iter().sum();
        let mut fail = false;
        if counters.armed[op as usize] == counters.seen[op as usize] {
            counters.armed[op as usize] = 0;
            fail = true;
        }
        if counters.armed_any == total {
            counters.armed_any = 0;
            fail = true;
        }
        if !fail {
            return Ok(());
        }
        counters.fired += 1;
        Err(match op {
            FaultOp::Allocate | FaultOp::HostAllocate => Error::OutOfMemory {
                device,
                operation,
                bytes,
            },
            _ => device_error(device, operation, INJECTED, "injected failure"),
        })
    }
}
