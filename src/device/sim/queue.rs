//! Queues: how work is submitted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::kernel;
use super::memory::SimBacking;
use super::state::{Core, Op, QueueState, State, Work};
use super::{FaultOp, MISUSE, SimMemory};
use crate::device::backend::{not_supported, out_of_memory};
use crate::device::{CopyKind, CopyOp, DevicePtr, EventPtr, Queue, RawQueue};
use crate::error::{Error, Result};

/// A queue of a [`SimDevice`](super::SimDevice), which runs [kernels](Self::launch).
/// [`Queue::as_sim`] returns it.
pub struct SimQueue {
    core: Arc<Core>,
    id: u64,
}

impl fmt::Debug for SimQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimQueue({} #{})", self.core.id, self.id)
    }
}

impl Queue {
    /// Returns the queue as one of a simulated device, which runs [kernels](SimQueue::launch).
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the queue's device is not a simulated device.
    pub fn as_sim(&self) -> Result<&SimQueue> {
        let sim = self.raw().downcast_ref();
        let reason = "it is not a simulated device; open one with Devices::simulated()";
        let operation = "running a closure as a kernel";
        sim.ok_or_else(|| not_supported(self.device().id(), operation, reason))
    }
}

impl SimQueue {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let mut state = core.state();
        let id = state.next_queue;
        state.next_queue += 1;
        state.queues.insert(id, QueueState::default());
        drop(state);
        Self { core, id }
    }

    /// Counts an operation, then queues it.
    fn submit(&self, fault: FaultOp, operation: &'static str, op: Op) -> Result<()> {
        let state = self.core.alive()?;
        self.core.count(fault, operation, 0)?;
        self.core.enqueue(state, self.id, op)?;
        Ok(())
    }

    /// Returns how many operations have not completed. Unlike recording an event, this queues no
    /// further operation.
    pub fn pending_operations(&self) -> usize {
        let state = self.core.here();
        let queue = state.as_ref().and_then(|s| s.queues.get(&self.id));
        queue.map_or(0, |queue| queue.pending.len())
    }

    /// Returns when copies may run that are queued now, if they are slowed down.
    fn due(&self, state: &mut State, copies: &[CopyOp]) -> Option<Instant> {
        let rate = self.core.config.bytes_per_second? as f64;
        let bytes: f64 = copies.iter().map(|copy| copy.bytes as f64).sum();
        let (queue, now) = (state.queues.get_mut(&self.id)?, Instant::now());
        let start = queue.busy.map_or(now, |busy| busy.max(now));
        queue.busy = start.checked_add(Duration::try_from_secs_f64(bytes / rate).ok()?);
        queue.busy
    }

    /// Queues a kernel: a closure that runs in queue order with a view of the device's memory. This
    /// does not wait.
    ///
    /// If the kernel returns an error, panics, or touches memory that it must not touch, the device
    /// fails: waiting for the work, and every later call, returns that error. A kernel must not
    /// wait for a device; such a wait returns an error. What the closure holds is dropped once it
    /// has run: in [`SimMode::Deferred`](super::SimMode::Deferred) a closure that holds the device
    /// and is never waited for keeps the device alive.
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
    /// let sim = queue.downcast_ref::<SimQueue>().unwrap();
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
    /// The kernel writes only memory that is not yet arrow data: not that of a
    /// [`DeviceBuffer`](crate::DeviceBuffer), an array or a batch, whose values other code relies
    /// on.
    pub unsafe fn launch(
        &self,
        kernel: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let kernel = Op::Work(Work::new(move |core| kernel::run(core, kernel)));
        self.submit(FaultOp::Launch, "launch", kernel)
    }
}

/// Checks what holds for a copy in any memory.
fn check_copy(copy: &CopyOp) -> Result<()> {
    let (src, dst) = (copy.src.address(), copy.dst.address());
    if src == 0 || dst == 0 || copy.bytes == 0 {
        return Err(Error::argument(format!("empty or null: {copy:?}")));
    }
    if src.abs_diff(dst) < copy.bytes {
        return Err(Error::argument(format!("overlaps itself: {copy:?}")));
    }
    Ok(())
}

// SAFETY: the allocator returns 64-byte aligned blocks that nothing else has, valid from then on;
// the engine runs only the first operation of a queue, removes it when it has run, and runs a wait
// only when its event's position is reached.
unsafe impl RawQueue for SimQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let core = &self.core;
        let mut state = core.alive()?;
        if bytes == 0 {
            return Err(Error::argument("allocation of 0 bytes"));
        }
        core.count(FaultOp::Allocate, "allocate", bytes)?;
        let memory = || match core.config.memory {
            Some(allocate) => allocate(bytes)?.first(bytes),
            None => SimBacking::allocate(bytes),
        };
        match state.memory.allocate(bytes, memory) {
            Some(address) => Ok(DevicePtr::new(std::ptr::without_provenance_mut(address))),
            None => Err(out_of_memory(core.id, "allocate", bytes)),
        }
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let core = &self.core;
        // In a child, the memory is the parent's.
        let Some(mut state) = core.here() else {
            return Ok(());
        };
        let address = core.begin_free(&mut state, base, bytes)?;
        if state.error.is_some() {
            // Nothing runs any more, so nothing uses it.
            state.memory.finish_free(address);
        } else {
            core.enqueue(state, self.id, Op::Free(address))?;
        }
        Ok(())
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        copies.iter().try_for_each(check_copy)?;
        if copies.is_empty() {
            return self.core.alive().map(drop);
        }
        let mut state = self.core.alive()?;
        self.core.count(FaultOp::Copy, "copy", 0)?;
        let due = self.due(&mut state, copies);
        let host = copies.iter().flat_map(|copy| {
            state.host_at(match copy.kind {
                CopyKind::HostToDevice => copy.src.range(copy.bytes),
                CopyKind::DeviceToHost => copy.dst.range(copy.bytes),
                CopyKind::DeviceToDevice => 0..0,
            })
        });
        let (host, copies) = (host.cloned().collect(), copies.to_vec());
        // The last one first, because their order must not matter.
        let run =
            Work::new(move |core| copies.iter().rev().try_for_each(|copy| core.run_copy(copy)));
        let copies = Op::Work(Work { due, host, ..run });
        self.core.enqueue(state, self.id, copies).map(drop)
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        if dst.is_null() || bytes == 0 {
            return Err(Error::argument("empty or null fill"));
        }
        let fill = Op::Work(Work::new(move |core| core.run_fill(dst, byte, bytes)));
        self.submit(FaultOp::Fill, "fill", fill)
    }

    fn record(&self) -> Result<EventPtr> {
        static NEXT: AtomicUsize = AtomicUsize::new(64);
        let core = &self.core;
        let state = core.alive()?;
        core.count(FaultOp::Record, "record", 0)?;
        let point = core.enqueue(state, self.id, Op::Mark)?;
        // No other event of this process has or had the address.
        let address = NEXT.fetch_add(64, Ordering::Relaxed);
        core.state().events.insert(address, point);
        let event = EventPtr::new(std::ptr::without_provenance_mut(address));
        event.ok_or_else(|| core.error("record", MISUSE, "null event"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<bool> {
        let core = &self.core;
        let mut state = core.alive()?;
        let point = core.point_of(&mut state, event, "queue wait")?;
        core.count(FaultOp::QueueWait, "queue wait", 0)?;
        core.enqueue(state, self.id, Op::Wait(point))?;
        Ok(true)
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        let Some(mut state) = self.core.here() else {
            return;
        };
        let queue = state.queues.get_mut(&self.id);
        if queue.is_some_and(|queue| {
            queue.dropped = true;
            queue.pending.is_empty()
        }) {
            state.queues.remove(&self.id);
        }
    }
}
