//! What a program sets of a simulated device, and what it reads: how the device behaves, which operations fail, and what is live.

use std::sync::Mutex;

use super::SimDevice;
use super::memory::SimBacking;
use crate::device::lock;
use crate::error::Error;

/// When queued work runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SimMode {
    /// Soon, on a worker thread that starts with the first work.
    #[default]
    Async,
    /// When a thread waits for it, on that thread: waiting for an event runs exactly what the event
    /// needs, synchronizing runs everything. Queries and notifications run nothing: a task that
    /// waits for an event continues only once a thread has waited.
    Deferred,
}

/// How a [`SimDevice`] behaves.
///
/// ```
/// use arrow_device::device::sim::{SimConfig, SimMode};
/// // Nothing runs before it is waited for, so a missing wait fails every time.
/// let config = SimConfig { mode: SimMode::Deferred, capacity_bytes: 16 << 20, ..SimConfig::default() };
/// # let _ = config;
/// ```
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// When queued work runs.
    pub mode: SimMode,
    /// How many bytes the device has. They are reserved addresses, and take up memory only once allocated.
    pub capacity_bytes: usize,
    /// How fast a queue copies, in bytes per second, for tests of overlap; `None` is at full speed. The copies of different
    /// queues overlap, and time passes from when they are queued. Has an effect only in [`SimMode::Async`].
    pub bytes_per_second: Option<u64>,
    /// Whether the device copies straight out of other simulated devices' memory.
    pub peer_access: bool,
    /// What allocates the device's memory, in place of ordinary memory of the host's: it gets a number of bytes, and returns at least as
    /// many, which nothing else uses, aligned to 64 bytes, or `None` if there are not as many. It must not use the device, which is locked meanwhile.
    /// The device does not fill it, as it fills fresh memory of its own, which shows reads of it and costs as much time as a copy.
    pub memory: Option<fn(usize) -> Option<SimBacking>>,
}

impl Default for SimConfig {
    /// [`SimMode::Async`], 4 GiB of addresses (256 MiB where they are 32 bits), memory filled when fresh, copies at full speed,
    /// no peer access.
    fn default() -> Self {
        Self {
            mode: SimMode::default(),
            capacity_bytes: usize::try_from(4u64 << 30).unwrap_or(256 << 20),
            bytes_per_second: None,
            peer_access: false,
            memory: None,
        }
    }
}

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

/// Makes chosen operations of a [`SimDevice`] fail, and counts all of them.
///
/// A failure happens when the operation is submitted: the call returns an error and nothing is
/// queued. The next call succeeds again. To fail each operation of a program in turn, run it with
/// [`fail_nth(None, n)`](Self::fail_nth) for each `n` from 1 on until nothing has [`fired`](Self::fired).
#[derive(Debug, Default)]
pub struct Faults(pub(super) Mutex<Counters>);

#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Operations since the last reset, by kind.
    pub(super) seen: [u64; FaultOp::ALL.len()],
    /// What fails, an operation of this kind or of any, and how many of them until then.
    pub(super) armed: Vec<(Option<FaultOp>, u64)>,
    pub(super) fired: u64,
}

impl Faults {
    /// Makes the `n`-th operation of this kind from now fail, or of any with `None`; 1 is the next one. Replaces an earlier call
    /// for the same kind, and 0 cancels it.
    pub fn fail_nth(&self, op: impl Into<Option<FaultOp>>, n: u64) {
        let op = op.into();
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
}

/// The state of a [`SimDevice`], from [`SimDevice::report`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SimReport {
    /// Device allocations that were not freed.
    pub live_allocations: usize,
    /// Their bytes, as requested.
    pub live_bytes: usize,
    /// Host allocations that were not freed.
    pub live_host_allocations: usize,
    /// Their bytes.
    pub live_host_bytes: usize,
    /// Events that were not released.
    pub live_events: usize,
    /// Queued operations that have not completed.
    pub pending_operations: usize,
    /// Mistakes: double frees and releases, dead events used, invalid accesses, host memory freed
    /// under a copy.
    pub violations: Vec<String>,
    /// The error that ended the device, if it has failed.
    pub error: Option<Error>,
}

impl SimReport {
    /// Whether nothing is live and there were no mistakes.
    pub fn is_clean(&self) -> bool {
        self.live_allocations == 0
            && self.live_host_allocations == 0
            && self.live_events == 0
            && self.violations.is_empty()
    }
}

impl SimDevice {
    /// Returns what is live and which mistakes were made so far. In a child of the process (`fork`), which has nothing of the
    /// device, only the error says so.
    pub fn report(&self) -> SimReport {
        let core = &self.core;
        if let Err(forked) = core.check_process() {
            return SimReport {
                error: Some(forked),
                ..SimReport::default()
            };
        }
        let state = core.state();
        SimReport {
            live_allocations: state.memory.owned().count(),
            live_bytes: state.memory.owned().map(|memory| memory.bytes).sum(),
            live_host_allocations: state.host.len(),
            live_host_bytes: state.host.values().map(|memory| memory.bytes).sum(),
            live_events: state.events.len(),
            pending_operations: state.queues.values().map(|q| q.pending.len()).sum(),
            violations: state.violations.clone(),
            error: state.error.clone(),
        }
    }

    /// Panics unless the [report](Self::report) is clean. For tests.
    #[track_caller]
    pub fn assert_clean(&self) {
        let report = self.report();
        assert!(report.is_clean(), "{self:?} is not clean: {report:#?}");
    }
}
