//! What all handles of a device share: its memory, its queues and what they hold.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Instant;

use super::memory::{Allocator, SimBacking};
use super::{FaultOp, Faults, INJECTED, INVALID_ACCESS, MISUSE, SimConfig};
use crate::device::backend::out_of_memory;
use crate::device::engine::ranges::Ranges;
use crate::device::engine::{Reserved, Worker};
use crate::device::{DeviceId, DevicePtr, EventPtr, Process, device_error, lock};
use crate::error::{Error, Result};

/// The simulated devices of this process, by their addresses.
static DEVICES: Ranges<Weak<Core>> = Ranges::new();

/// Returns the simulated device whose address this is.
pub(super) fn owner_of(address: DevicePtr) -> Option<Arc<Core>> {
    DEVICES.find(address, 1)?.0.upgrade()
}

/// Whether these are host addresses, as far as this crate knows.
pub(super) fn is_host(address: DevicePtr, bytes: usize) -> bool {
    !address.is_null() && !Reserved::covers(address, bytes.max(1))
}

/// What a device and its queues share. It lives until they, and the work that a worker has to run, are gone.
///
/// Locks are taken in this order: `engine`, `state`. Closures are dropped while neither is held.
pub(super) struct Core {
    pub(super) id: DeviceId,
    /// Where the worker runs. A child of that process has no worker, and the locks may be held for ever there.
    process: Process,
    pub(super) config: SimConfig,
    /// The addresses that users see, behind which there is never any memory.
    addresses: Reserved,
    pub(super) faults: Faults,
    state: Mutex<State>,
    /// Held by whoever runs work.
    pub(super) engine: Mutex<()>,
    /// Runs work that nobody waits for.
    pub(super) worker: Worker,
    /// Signalled when work has run.
    pub(super) done: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) memory: Allocator,
    /// Live events by address.
    pub(super) events: BTreeMap<usize, Point>,
    pub(super) queues: BTreeMap<u64, QueueState>,
    pub(super) next_queue: u64,
    /// Live host allocations by address. Queued copies share them.
    pub(super) host: BTreeMap<usize, Arc<SimBacking>>,
    pub(super) violations: Vec<String>,
    /// The error that ended this device. Nothing runs or is queued any more.
    pub(super) error: Option<Error>,
}

/// A position in a queue. Reached when that many operations of the queue have run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point {
    pub(super) queue: u64,
    pub(super) position: u64,
}

impl Core {
    pub(super) fn new(id: DeviceId, config: SimConfig, addresses: Reserved) -> Arc<Self> {
        let core = Arc::new(Self {
            id,
            process: Process::this(),
            config,
            faults: Faults::default(),
            state: Mutex::new(State {
                memory: Allocator::new(addresses.base().range(addresses.bytes)),
                ..State::default()
            }),
            addresses,
            engine: Mutex::new(()),
            worker: Worker::new("arrow-device sim"),
            done: Condvar::new(),
        });
        DEVICES.insert(
            core.addresses.base(),
            core.addresses.bytes,
            Arc::downgrade(&core),
        );
        core
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// As [`state`](Self::state), or `None` in a child of the process that made the device.
    pub(super) fn here(&self) -> Option<MutexGuard<'_, State>> {
        self.process.is_this().then(|| self.state())
    }

    /// As [`state`](Self::state), of a device that can be used. The error says why it cannot.
    pub(super) fn alive(&self) -> Result<MutexGuard<'_, State>> {
        self.check_process()?;
        let state = self.state();
        state.alive()?;
        Ok(state)
    }

    /// Refuses to work in a child of the process that made the device.
    pub(super) fn check_process(&self) -> Result<()> {
        self.process.check(self.id, MISUSE)
    }

    /// An error of this device.
    pub(super) fn error(
        &self,
        operation: &'static str,
        code: i32,
        message: impl Into<String>,
    ) -> Error {
        device_error(self.id, operation, code, message.into())
    }

    /// Counts one operation, and makes it fail if it is its turn. `bytes` is the size of an allocation.
    pub(super) fn count(&self, op: FaultOp, operation: &'static str, bytes: usize) -> Result<()> {
        let mut counters = lock(&self.faults.0);
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
            FaultOp::Allocate | FaultOp::HostAllocate => out_of_memory(self.id, operation, bytes),
            _ => self.error(operation, INJECTED, "injected failure"),
        })
    }

    /// Returns where the engine finds `bytes` bytes at `ptr`, and what keeps them. The error says why it must not touch them.
    pub(super) fn locate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
    ) -> Result<(Arc<SimBacking>, *mut u8), String> {
        let own = self.addresses.base().range(self.addresses.bytes);
        if !own.contains(&ptr.address()) {
            return Err(self.invalid(ptr, bytes, "not an address of this device"));
        }
        let state = self.state();
        let found = state.memory.find(ptr.address(), bytes);
        let (allocation, offset) = found.map_err(|why| self.invalid(ptr, bytes, &why))?;
        let start = allocation.memory.start.as_ptr();
        Ok((allocation.memory.clone(), start.wrapping_add(offset)))
    }

    /// Says why the engine must not touch `bytes` bytes at `ptr`.
    pub(super) fn invalid(&self, ptr: DevicePtr, bytes: usize, why: &str) -> String {
        format!(
            "invalid access at {ptr:?} ({bytes} bytes) on {}: {why}",
            self.id
        )
    }

    /// Marks an allocation as freed, and returns its address. Anything else is refused, and becomes a
    /// violation.
    pub(super) fn begin_free(
        &self,
        state: &mut State,
        base: DevicePtr,
        bytes: usize,
    ) -> Result<usize> {
        let freed = state.memory.begin_free(base.address(), bytes);
        freed
            .map(|()| base.address())
            .map_err(|why| self.misuse(state, "free", format!("{base:?} ({bytes} bytes): {why}")))
    }

    /// Notes a violation, and returns it as an error.
    fn misuse(&self, state: &mut State, operation: &'static str, text: String) -> Error {
        state.violations.push(format!("{operation}: {text}"));
        self.error(operation, MISUSE, text)
    }

    /// Returns the position of a live event of this device. Anything else is refused, and becomes a
    /// violation.
    pub(super) fn point_of(
        &self,
        state: &mut State,
        event: EventPtr,
        operation: &'static str,
    ) -> Result<Point> {
        let found = state.events.get(&event.as_ptr().addr()).copied();
        found.ok_or_else(|| {
            let text = format!("{event:?} is not a live event of {}", self.id);
            self.misuse(state, operation, text)
        })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // In a child, the table may be locked for ever.
        if self.process.is_this() {
            DEVICES.remove(self.addresses.base());
        }
    }
}

impl State {
    /// Returns the error of a device that has failed.
    pub(super) fn alive(&self) -> Result<()> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Whether a queue has reached a position. Queues are forgotten only when all of their work is
    /// done.
    pub(super) fn reached(&self, point: Point) -> bool {
        let queue = self.queues.get(&point.queue);
        queue.is_none_or(|queue| queue.completed >= point.position)
    }

    /// Returns the next queue after `last`, in a circle, whose first operation can run.
    pub(super) fn next_after(&self, last: u64) -> Option<u64> {
        let can_run = |(_, queue): &(&u64, &QueueState)| match queue.pending.front() {
            None => false,
            Some(Op::Wait(point)) => self.reached(*point),
            Some(Op::Work(work)) => work.due.is_none_or(|due| due <= Instant::now()),
            Some(Op::Free(_) | Op::Mark) => true,
        };
        let (others, after) = (self.queues.range(..=last), self.queues.range(last + 1..));
        let next = after.chain(others).find(can_run);
        next.map(|(id, _)| *id)
    }

    /// Records that the first operation of a queue has run.
    pub(super) fn complete(&mut self, id: u64) {
        if let Some(queue) = self.queues.get_mut(&id) {
            // Its closure is gone, since it was called.
            queue.pending.pop_front();
            queue.completed += 1;
            if queue.dropped && queue.pending.is_empty() {
                self.queues.remove(&id);
            }
        }
    }

    /// Returns the host allocations in which some of these bytes lie.
    pub(super) fn host_at(&self, range: Range<usize>) -> impl Iterator<Item = &Arc<SimBacking>> {
        let before = self.host.range(..range.end).rev();
        let overlapping = before.take_while(move |(at, memory)| range.start < *at + memory.bytes);
        overlapping.map(|(_, memory)| memory)
    }

    /// Ends the device: runs queued frees, and returns all other work, to be dropped while no lock is held.
    pub(super) fn fail(&mut self, error: Error) -> Vec<Op> {
        if let Error::Device {
            code: INVALID_ACCESS,
            ..
        } = error
        {
            self.violations.push(error.to_string());
        }
        self.error.get_or_insert(error);
        let mut left = Vec::new();
        for queue in self.queues.values_mut() {
            queue.completed = queue.submitted;
            left.extend(queue.pending.drain(..));
        }
        self.queues.retain(|_, queue| !queue.dropped);
        for op in &mut left {
            match op {
                Op::Free(address) => self.memory.finish_free(*address),
                // It may be freed from now on.
                Op::Work(work) => work.host.clear(),
                Op::Mark | Op::Wait(_) => {}
            }
        }
        left
    }
}

/// Queued work.
pub(super) enum Op {
    Work(Work),
    /// Frees the allocation at this address.
    Free(usize),
    /// The position of an event.
    Mark,
    Wait(Point),
}

type Run = Box<dyn FnOnce(&Core) -> Result<()> + Send>;

/// Copies, a fill, or a kernel.
pub(super) struct Work {
    /// What runs on the engine of the device; `None` once it has begun to run.
    pub(super) run: Option<Run>,
    /// When it may run, if copies are slowed down.
    pub(super) due: Option<Instant>,
    /// The host allocations that it uses, which must not be freed until it has run.
    pub(super) host: Vec<Arc<SimBacking>>,
}

impl Work {
    pub(super) fn new(run: impl FnOnce(&Core) -> Result<()> + Send + 'static) -> Self {
        Self {
            run: Some(Box::new(run)),
            due: None,
            host: Vec::new(),
        }
    }
}

#[derive(Default)]
pub(super) struct QueueState {
    pub(super) pending: VecDeque<Op>,
    /// Operations ever submitted, and ever run.
    pub(super) submitted: u64,
    pub(super) completed: u64,
    /// Until when it copies, if copies are slowed down.
    pub(super) busy: Option<Instant>,
    /// The handle was dropped; the queue is forgotten once its work is done.
    pub(super) dropped: bool,
}
