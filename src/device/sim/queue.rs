//! Queues: what they hold, and how work is submitted.

use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::task::Waker;

use super::MISUSE;
use super::engine::{Core, Handle};
use super::event::Point;
use super::fault::FaultOp;
use super::kernel::{Kernel, SimMemory};
use crate::device::{CopyKind, CopyOp, DevicePtr, EventPtr, RawQueue, device_error};
use crate::error::{Error, Result};

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
    Kernel(Option<Kernel>),
    /// Where an event was recorded.
    Mark,
    Wait(Point),
}

impl Op {
    /// What is to be run now. The operation itself stays where it is.
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
    /// Notes that an operation is queued.
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

    /// Notes that an operation has run. What it uses was not freed meanwhile.
    pub(super) fn let_go(&mut self, op: &Op) {
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
    pub(super) due: Cell<Option<std::time::Instant>>,
    /// Its handle is gone; forgotten once its work is done.
    pub(super) dropped: bool,
}

/// Wakers by the position that they wait for, and by what [`Waker::will_wake`] compares. Neither adding one nor
/// taking out those that are ready looks at the others.
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

/// A queue of a [`SimDevice`](super::SimDevice); found by downcasting
/// [`RawQueue::as_any`].
pub struct SimQueue {
    handle: Arc<Handle>,
    id: u64,
}

impl fmt::Debug for SimQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimQueue({} #{})", self.core().id, self.id)
    }
}

impl SimQueue {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        let mut state = handle.0.state();
        let id = state.next_queue;
        state.next_queue += 1;
        state.queues.insert(id, QueueState::default());
        drop(state);
        Self { handle, id }
    }

    fn core(&self) -> &Arc<Core> {
        &self.handle.0
    }

    /// Counts an operation, then queues it.
    fn submit(&self, fault: FaultOp, operation: &'static str, op: Op) -> Result<()> {
        let core = self.core();
        let mut state = core.state();
        state.alive()?;
        core.faults.pass(fault, core.id, operation, 0)?;
        core.enqueue(&mut state, self.id, op)?;
        Ok(())
    }

    /// How many operations have not completed. Unlike an event's, the answer needs no further
    /// operation.
    pub fn pending_operations(&self) -> usize {
        let state = self.core().state();
        let queue = state.queues.get(&self.id);
        queue.map_or(0, |queue| queue.pending.len())
    }

    /// Queues a kernel: a closure that runs in queue order with a view of the device's memory.
    ///
    /// If it answers with an error, panics, or touches memory that it must not, the device fails:
    /// waiting for the work, and every later call, answers with that error. A kernel must not wait
    /// for a device; such a wait answers with an error. What the closure holds is dropped once it
    /// has run: in [`SimMode::Deferred`](super::SimMode::Deferred) a closure that holds the
    /// device and is never waited for keeps the device alive.
    ///
    /// ```
    /// use arrow_device::device::Backend;
    /// use arrow_device::device::sim::{SimConfig, SimDevice, SimMemory, SimQueue};
    /// # fn main() -> arrow_device::Result<()> {
    /// # if cfg!(any(miri, not(target_os = "linux"))) { return Ok(()) }
    /// let device = SimDevice::new(SimConfig::default())?;
    /// let queue = device.default_queue()?;
    /// let memory = queue.allocate(64)?;
    ///
    /// let sim = queue.as_any().downcast_ref::<SimQueue>().unwrap();
    /// // SAFETY (all kernels): they write only the memory that was allocated above.
    /// unsafe { sim.launch(move |m| m.write(memory, &[1i64, 2, 3])) }?;
    /// let tenfold = move |m: &mut SimMemory<'_>| {
    ///     for value in m.slice_mut::<i64>(memory, 3)? {
    ///         *value *= 10;
    ///     }
    ///     Ok(())
    /// };
    /// unsafe { sim.launch(tenfold) }?;
    ///
    /// let (sender, sum) = std::sync::mpsc::channel();
    /// let add = move |m: &mut SimMemory<'_>| {
    ///     let values = m.slice::<i64>(memory, 3)?;
    ///     sender.send(values.iter().sum::<i64>()).map_err(|e| e.to_string())
    /// };
    /// unsafe { sim.launch(add) }?;
    /// device.synchronize()?;
    /// assert_eq!(sum.recv().unwrap(), 60);
    /// // SAFETY: allocated above, freed once, used on this queue only.
    /// unsafe { queue.free(memory, 64)? };
    /// # device.assert_clean();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// The kernel writes only memory that nobody reads as arrow data yet: not that of a
    /// [`DeviceBuffer`](crate::DeviceBuffer), an array or a batch, whose values are relied upon.
    pub unsafe fn launch(
        &self,
        kernel: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let kernel = Op::Kernel(Some(Box::new(kernel)));
        self.submit(FaultOp::Launch, "launch", kernel)
    }
}

/// What a copy must be, whatever memory it is of.
fn check_copy(copy: &CopyOp) -> Result<()> {
    let CopyOp {
        src, dst, bytes, ..
    } = *copy;
    if src.is_null() || dst.is_null() || bytes == 0 {
        return Err(Error::argument(format!("empty or null: {copy:?}")));
    }
    let ends = (
        src.address().checked_add(bytes),
        dst.address().checked_add(bytes),
    );
    match ends {
        (Some(src_end), Some(dst_end)) if src.address() < dst_end && dst.address() < src_end => {
            Err(Error::argument(format!("overlaps itself: {copy:?}")))
        }
        (Some(_), Some(_)) => Ok(()),
        _ => Err(Error::argument(format!("past all memory: {copy:?}"))),
    }
}

// SAFETY: the allocator hands out 64-byte aligned blocks that nothing else has, valid from then on;
// the engine runs the first operation of a queue only, takes it off when it has run, and runs a wait
// only when its event's position is reached.
unsafe impl RawQueue for SimQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let core = self.core();
        let mut state = core.state();
        state.alive()?;
        if bytes == 0 {
            return Err(Error::argument("allocation of 0 bytes"));
        }
        core.faults
            .pass(FaultOp::Allocate, core.id, "allocate", bytes)?;
        match state.memory.allocate(&core.mapping, bytes) {
            Some(offset) => Ok(DevicePtr::new(core.mapping.device(offset).cast())),
            None => Err(Error::OutOfMemory {
                device: core.id,
                operation: "allocate",
                bytes,
            }),
        }
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let core = self.core();
        let mut state = core.state();
        let offset = core.begin_free(&mut state, base, bytes)?;
        if state.error.is_some() {
            // Nothing runs any more, so nothing uses it.
            state.finish_free(&core.mapping, offset);
        } else {
            core.enqueue(&mut state, self.id, Op::Free(offset))?;
        }
        Ok(())
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        copies.iter().try_for_each(check_copy)?;
        if copies.is_empty() {
            return self.core().state().alive();
        }
        let op = Op::Copy {
            copies: copies.into(),
            host: Vec::new(),
        };
        self.submit(FaultOp::Copy, "copy", op)
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        if dst.is_null() || bytes == 0 {
            return Err(Error::argument("empty or null fill"));
        }
        self.submit(FaultOp::Fill, "fill", Op::Fill { dst, byte, bytes })
    }

    fn record(&self) -> Result<EventPtr> {
        let core = self.core();
        let mut state = core.state();
        state.alive()?;
        core.faults.pass(FaultOp::Record, core.id, "record", 0)?;
        let point = core.enqueue(&mut state, self.id, Op::Mark)?;
        let event = state.events.record(core.id.id, point);
        event.ok_or_else(|| device_error(core.id, "record", MISUSE, "null event"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let core = self.core();
        let mut state = core.state();
        state.alive()?;
        let point = core.point_of(&mut state, event, "queue wait")?;
        core.faults
            .pass(FaultOp::QueueWait, core.id, "queue wait", 0)?;
        core.enqueue(&mut state, self.id, Op::Wait(point))?;
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        let mut state = self.core().state();
        let queue = state.queues.get_mut(&self.id);
        if queue.is_some_and(|queue| {
            queue.dropped = true;
            queue.pending.is_empty()
        }) {
            state.queues.remove(&self.id);
        }
    }
}
