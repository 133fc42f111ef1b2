//! What all handles of a device share: its memory, its queues and what they hold.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::event::{Events, Point};
use super::fault::Faults;
use super::memory::{Allocator, Mapping, Poison};
use super::{MISUSE, SimConfig, SimError};
use crate::abi::guard;
use crate::device::{CopyKind, CopyOp, DeviceId, DevicePtr, Process, lock};
use crate::error::{Error, Result};

/// What a device, its queues and its worker share.
///
/// Locks are taken in this order: `engine`, `state`. Wakers are called and closures dropped while
/// neither is held.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) id: DeviceId,
    /// Where the worker runs. A child of that process has neither the worker nor the memory, and the
    /// locks may be held for ever there.
    process: Process,
    pub(super) config: SimConfig,
    pub(super) mapping: Mapping,
    pub(super) faults: Faults,
    pub(super) clock: Clock,
    state: Mutex<State>,
    /// Held by whoever runs work when there is no worker.
    pub(super) engine: Mutex<()>,
    /// Signalled when there is work, or the device is closing.
    pub(super) work: Condvar,
    /// Signalled when work has run.
    pub(super) done: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) memory: Allocator,
    pub(super) events: Events,
    pub(super) queues: BTreeMap<u64, QueueState>,
    /// The queues that have pending work.
    pub(super) busy: BTreeSet<u64>,
    pub(super) next_queue: u64,
    pub(super) host: HostBlocks,
    pub(super) violations: Vec<String>,
    /// The error that ended this device. Nothing runs or is queued any more.
    pub(super) error: Option<Error>,
    pub(super) worker: Option<JoinHandle<()>>,
    pub(super) closing: bool,
}

impl Core {
    pub(super) fn new(id: DeviceId, config: SimConfig, mapping: Mapping) -> Arc<Self> {
        let capacity_bytes = mapping.range().len();
        Arc::new(Self {
            id,
            process: Process::this(),
            mapping,
            faults: Faults::default(),
            clock: Clock::default(),
            state: Mutex::new(State {
                memory: Allocator::new(capacity_bytes, &config),
                events: Events::default(),
                queues: BTreeMap::new(),
                busy: BTreeSet::new(),
                next_queue: 0,
                host: HostBlocks::default(),
                violations: Vec::new(),
                error: None,
                worker: None,
                closing: false,
            }),
            config,
            engine: Mutex::new(()),
            work: Condvar::new(),
            done: Condvar::new(),
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Whether no thread has locked the state.
    #[cfg(test)]
    pub(super) fn is_unlocked(&self) -> bool {
        self.state.try_lock().is_ok()
    }

    /// As [`state`](Self::state), of a device that can be used. The error says why it cannot.
    pub(super) fn alive(&self) -> Result<MutexGuard<'_, State>> {
        self.check_process()?;
        let state = self.state();
        state.alive()?;
        Ok(state)
    }

    /// Whether this process is a child of the one that made the device.
    pub(super) fn is_forked(&self) -> bool {
        !self.process.is_this()
    }

    /// Refuses to work in a child of the process that made the device.
    pub(super) fn check_process(&self) -> Result<()> {
        self.process.check(self.id, MISUSE)
    }

    /// Poisons what was freed, without a lock held, and puts it into quarantine.
    pub(super) fn retire(&self, freed: Option<Poison>) {
        if let Some(freed) = freed {
            self.poison(&freed);
            self.state().memory.quarantine(freed);
        }
    }

    pub(super) fn poison(&self, poison: &Poison) {
        self.clock.filling(|| poison.apply(&self.mapping));
    }

    /// Returns where the engine finds `bytes` bytes at `ptr`. The error says why it must not touch
    /// them.
    pub(super) fn locate(&self, ptr: DevicePtr, bytes: usize) -> Result<*mut u8, String> {
        let check = match self.mapping.offset(ptr.address()) {
            None => Err("not an address of this device".into()),
            Some(offset) => self.state().memory.check(offset, bytes).map(|()| offset),
        };
        match check {
            Ok(offset) => Ok(self.mapping.engine(offset)),
            Err(why) => Err(format!(
                "invalid access at {ptr:?} ({bytes} bytes) on {}: {why}",
                self.id
            )),
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

    /// Records that the first operation of a queue has run.
    pub(super) fn complete(&mut self, id: u64, after: &mut After) {
        let Some(queue) = self.queues.get_mut(&id) else {
            return;
        };
        if let Some(op) = queue.pending.pop_front() {
            self.host.release(&op);
            after.garbage.push(op);
        }
        queue.completed += 1;
        queue.due.set(None);
        after.wakers.extend(queue.wakers.extract(queue.completed));
        if queue.pending.is_empty() {
            self.busy.remove(&id);
            if queue.dropped {
                self.queues.remove(&id);
            }
        }
    }

    /// Ends the device: runs queued frees, drops all other work, and wakes every waker.
    pub(super) fn fail(&mut self, mapping: &Mapping, error: Error, after: &mut After) {
        self.error.get_or_insert(error);
        let ids: Vec<u64> = self.queues.keys().copied().collect();
        for id in ids {
            while let Some(op) = self.queues.get(&id).and_then(|q| q.pending.front()) {
                if let Op::Free(offset) = *op {
                    // Rare, so it may as well be filled here.
                    if let Some(freed) = self.finish_free(mapping, offset) {
                        freed.apply(mapping);
                        self.memory.quarantine(freed);
                    }
                }
                self.complete(id, after);
            }
        }
    }

    /// Begins to run a free. Returns what was freed, if it was live: poisoned, it goes into quarantine.
    pub(super) fn finish_free(&mut self, mapping: &Mapping, offset: usize) -> Option<Poison> {
        let (intact, freed) = self.memory.finish_free(mapping, offset);
        if !intact {
            let address = mapping.device(offset);
            self.violations
                .push(format!("red zone damaged around {address:p}"));
        }
        freed
    }

    /// Returns a queue whose first operation can run, preferring those after `last`, or else when
    /// to look again.
    pub(super) fn pick(&self, last: u64, rate: Option<u64>) -> Pick {
        let mut again: Option<Instant> = None;
        let later = self.busy.range(last.saturating_add(1)..);
        let busy = later.chain(self.busy.range(..=last));
        for (id, queue) in busy.filter_map(|id| Some((id, self.queues.get(id)?))) {
            match (queue.pending.front(), rate) {
                (None, _) => {}
                (Some(Op::Wait(point)), _) => {
                    if self.reached(*point) {
                        return Pick::Run(*id);
                    }
                }
                (Some(Op::Copy { copies, .. }), Some(rate)) => {
                    let now = Instant::now();
                    let due = queue.due.get().unwrap_or_else(|| {
                        let bytes: u128 = copies.iter().map(|copy| copy.bytes as u128).sum();
                        let nanos = bytes * 1_000_000_000 / u128::from(rate.max(1));
                        let time = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
                        now.checked_add(time).unwrap_or(now)
                    });
                    queue.due.set(Some(due));
                    if due <= now {
                        return Pick::Run(*id);
                    }
                    again = Some(again.map_or(due, |other| other.min(due)));
                }
                _ => return Pick::Run(*id),
            }
        }
        Pick::Later(again)
    }
}

pub(super) enum Pick {
    Run(u64),
    Later(Option<Instant>),
}

/// What is left to do after work has run, once no lock is held.
#[derive(Default)]
pub(super) struct After {
    wakers: Vec<Waker>,
    garbage: Vec<Op>,
}

impl After {
    pub(super) fn finish(self) {
        for waker in self.wakers {
            // A waker that panics must not end the worker.
            let _ = guard::call_foreign("waker", || waker.wake());
        }
        let _ = guard::call_foreign("kernel", || drop(self.garbage));
    }
}

/// What a kernel does when it runs, on the engine of the device.
pub(super) type Work = Box<dyn FnOnce(&Core) -> Result<(), SimError> + Send>;

/// Queued work.
pub(super) enum Op {
    Copy {
        copies: Arc<[CopyOp]>,
        /// Host allocations that hold this copy as a user, by their addresses.
        host: Vec<usize>,
    },
    Fill {
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    },
    /// Frees the allocation at this byte offset.
    Free(usize),
    /// `None` once it has begun to run.
    Kernel(Option<Work>),
    /// The position of an event.
    Mark,
    Wait(Point),
}

impl Op {
    /// Returns what is to be run now. The operation itself stays where it is.
    pub(super) fn start(&mut self) -> Self {
        match self {
            Self::Copy { copies, .. } => Self::Copy {
                copies: copies.clone(),
                host: Vec::new(),
            },
            Self::Fill { dst, byte, bytes } => Self::Fill {
                dst: *dst,
                byte: *byte,
                bytes: *bytes,
            },
            Self::Free(offset) => Self::Free(*offset),
            Self::Kernel(kernel) => Self::Kernel(kernel.take()),
            Self::Mark => Self::Mark,
            Self::Wait(point) => Self::Wait(*point),
        }
    }
}

/// A host allocation.
#[derive(Debug)]
pub(super) struct HostBlock {
    pub(super) bytes: usize,
    /// How many queued copies read or write some of it.
    pub(super) copies: usize,
}

/// Live host allocations by address.
#[derive(Debug, Default)]
pub(super) struct HostBlocks(pub(super) BTreeMap<usize, HostBlock>);

impl HostBlocks {
    /// Records that an operation is queued.
    pub(super) fn hold(&mut self, op: &mut Op) {
        let Op::Copy { copies, host } = op else {
            return;
        };
        for copy in copies.iter() {
            let start = match copy.kind {
                CopyKind::HostToDevice => copy.src.address(),
                CopyKind::DeviceToHost => copy.dst.address(),
                CopyKind::DeviceToDevice => continue,
            };
            // They do not overlap, so the one that starts last ends last.
            let before = self.0.range_mut(..start.saturating_add(copy.bytes)).rev();
            for (address, block) in before.take_while(|(at, block)| start < **at + block.bytes) {
                block.copies += 1;
                host.push(*address);
            }
        }
    }

    /// Records that an operation has run. What it uses was not freed meanwhile.
    pub(super) fn release(&mut self, op: &Op) {
        let Op::Copy { host, .. } = op else {
            return;
        };
        for address in host {
            if let Some(block) = self.0.get_mut(address) {
                block.copies -= 1;
            }
        }
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy { .. } => "Copy",
            Self::Fill { .. } => "Fill",
            Self::Free(_) => "Free",
            Self::Kernel(_) => "Kernel",
            Self::Mark => "Mark",
            Self::Wait(_) => "Wait",
        })
    }
}

#[derive(Debug, Default)]
pub(super) struct QueueState {
    pub(super) pending: VecDeque<Op>,
    /// Operations ever submitted, and ever run.
    pub(super) submitted: u64,
    pub(super) completed: u64,
    pub(super) wakers: Wakers,
    /// When the first operation may run, if copies are slowed down.
    pub(super) due: Cell<Option<Instant>>,
    /// The handle was dropped; the queue is forgotten once its work is done.
    pub(super) dropped: bool,
}

/// Wakers by the position that they wait for, and by what [`Waker::will_wake`] compares. Neither
/// adding one nor taking out those that are ready looks at the others.
#[derive(Debug, Default)]
pub(super) struct Wakers {
    waiting: BTreeMap<(u64, usize, usize), Waker>,
    /// How many wakers were looked at, for tests.
    #[cfg(test)]
    pub(super) visits: usize,
}

impl Wakers {
    /// Adds a waker, unless it is there already: then it comes back, for the caller to drop.
    pub(super) fn add(&mut self, position: u64, waker: Waker) -> Option<Waker> {
        let vtable = std::ptr::from_ref(waker.vtable()).addr();
        self.waiting
            .insert((position, waker.data().addr(), vtable), waker)
    }

    /// Takes out those that wait for `completed` or an earlier position.
    pub(super) fn extract(&mut self, completed: u64) -> Vec<Waker> {
        let mut ready = Vec::new();
        while let Some(first) = self.waiting.first_entry() {
            #[cfg(test)]
            {
                self.visits += 1;
            }
            if first.key().0 > completed {
                break;
            }
            ready.push(first.remove());
        }
        ready
    }
}
