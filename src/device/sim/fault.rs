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
    /// `Backend::query_event`, but not on the release thread, which asks at any time.
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
/// queued. The next call succeeds again. To fail each operation of a program in turn, run it with
/// [`fail_nth_of_any(n)`](Self::fail_nth_of_any) for each `n` from 1 on until nothing has [`fired`](Self::fired).
#[derive(Debug, Default)]
pub struct Faults(Mutex<Counters>);

#[derive(Debug, Default)]
struct Counters {
    /// Operations since the last reset, by kind.
    seen: [u64; FaultOp::ALL.len()],
    /// What fails, an operation of this kind or of any, and how many of them until then.
    armed: Vec<(Option<FaultOp>, u64)>,
    fired: u64,
}

impl Faults {
    /// Makes the `n`-th operation of this kind from now fail; 1 is the next one. Replaces an
    /// earlier call for the same kind, and 0 cancels it.
    pub fn fail_nth(&self, op: FaultOp, n: u64) {
        self.arm(Some(op), n);
    }

    /// As [`fail_nth`](Self::fail_nth), but counts operations of all kinds.
    pub fn fail_nth_of_any(&self, n: u64) {
        self.arm(None, n);
    }

    fn arm(&self, op: Option<FaultOp>, n: u64) {
        let armed = &mut lock(&self.0).armed;
        armed.retain(|(other, _)| *other != op);
        armed.extend((n > 0).then_some((op, n)));
    }

    /// Returns how many operations of this kind were tried since the last [`clear`](Self::clear),
    /// failed ones included.
    pub fn seen(&self, op: FaultOp) -> u64 {
        lock(&self.0).seen[op as usize]
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
        let mut fail = false;
        counters.armed.retain_mut(|(kind, left)| {
            *left -= u64::from(kind.is_none_or(|kind| kind == op));
            fail |= *left == 0;
            *left > 0
        });
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
