//! [`Shared`]: what a device and its queues share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::device::DevicePtr;
use arrow_device::device::parts::{Block, Pool, Ranges, Worker};
use arrow_device::{Error, Result};
use opencl_sys::{cl_command_queue, cl_event};

use crate::cells::Cells;
use crate::context::Context;
use crate::event::{Work, work_before};
use crate::memory::{Allocation, Allocations, Kind};
use crate::object::Event;
use crate::platform::OpenClDeviceInfo;
use crate::queues::{Patience, Queues};
use crate::sys::{Answer, call};

/// How long an allocation waits, while there is no memory left, for work that uses what was freed.
const PATIENCE: Duration = Duration::from_secs(1);

/// Memory in the pool.
pub(crate) struct Idle {
    /// `None` if no event could be recorded: only its own queue may use the memory again, or `trim` waits. So it is if the event
    /// fails.
    after: Option<Event>,
    memory: Arc<Allocation>,
}

/// What a device and its queues share.
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    pub(crate) info: OpenClDeviceInfo,
    pub(crate) cells: Cells,
    /// Device memory in use.
    pub(crate) live: Allocations,
    /// Host memory in use.
    pub(crate) host: Ranges<()>,
    pub(crate) queues: Queues,
    pool: Pool<Idle>,
}

impl Shared {
    pub(crate) fn new(
        context: Context,
        kind: Kind,
        info: OpenClDeviceInfo,
        idle_bytes: usize,
    ) -> Self {
        Self {
            cells: Cells::new(context.failure.clone()),
            context: Arc::new(context),
            kind,
            info,
            live: Ranges::new(),
            host: Ranges::new(),
            queues: Queues::default(),
            pool: Pool::new(idle_bytes),
        }
    }

    /// Returns what is known about the last use of memory in the pool.
    fn last_use(&self, idle: &Idle) -> Work {
        // SAFETY: the pool keeps the event alive.
        let work = |event: &Event| unsafe { work_before(&self.context, event.raw()) };
        idle.after.as_ref().map_or(Work::Failed, work)
    }

    fn is_done(&self, idle: &Idle) -> bool {
        self.last_use(idle) == Work::Done
    }

    /// Allocates memory for work on the queue of this number.
    pub(crate) fn allocate(&self, queue: u64, bytes: usize) -> Result<DevicePtr> {
        let rounded = Pool::<Idle>::rounded(bytes).unwrap_or(usize::MAX);
        let memory = match self.pool.take(queue, rounded, |idle| self.is_done(idle)) {
            Some(block) => block.after.memory,
            None => {
                if bytes > self.info.max_allocation {
                    let what = "a single allocation (the most is CL_DEVICE_MAX_MEM_ALLOC_SIZE; use smaller batches)";
                    return Err(self.context.out_of_memory(what, bytes));
                }
                self.free_idle(false);
                Arc::new(self.allocate_new(rounded.min(self.info.max_allocation))?)
            }
        };
        let base = memory.base();
        self.live.insert(base, bytes, memory);
        Ok(base)
    }

    /// Asks the runtime for memory. If it has none left, what is in the pool is freed: at once what is done, and the rest once it
    /// is, for which this waits a while.
    fn allocate_new(&self, bytes: usize) -> Result<Allocation> {
        let start = Instant::now();
        loop {
            let made = self.kind.allocate(&self.context, bytes);
            if !matches!(made, Err(Error::OutOfMemory { .. })) {
                return made;
            }
            while !self.free_idle(true) {
                if self.pool.is_empty() || start.elapsed() > PATIENCE {
                    return made;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Gives memory back after the work of a queue so far, which `after` stands for.
    pub(crate) fn free(&self, queue: u64, base: DevicePtr, after: Option<Event>) -> Result<()> {
        let Some((_, memory)) = self.live.remove(base) else {
            let reason = format!("{base:?} is not the beginning of an allocation of this device");
            return Err(self.context.not_supported("free", reason));
        };
        self.pool.give(Block {
            base,
            bytes: memory.bytes(),
            queue,
            after: Idle { after, memory },
        });
        if self.pool.is_over(1) {
            self.free_idle(false);
        }
        Ok(())
    }

    /// Frees memory that nothing uses any more: what is over the limits, or all of it. Returns whether there was any.
    pub(crate) fn free_idle(&self, all: bool) -> bool {
        let done = self.pool.take_done(all, |idle| self.is_done(idle));
        !done.is_empty()
    }

    /// Frees all memory that nothing uses any more.
    pub(crate) fn trim(&self) {
        if self.context.is_forked() {
            return;
        }
        self.free_idle(true);
        let is_unknown = |idle: &Idle| self.last_use(idle) == Work::Failed;
        let unknown = self.pool.take_done(true, is_unknown);
        if unknown.is_empty() {
            return;
        }
        match self.queues.finish(&self.context, Patience::Once) {
            Ok(()) => drop(unknown),
            Err(_) => unknown.into_iter().for_each(|block| self.pool.give(block)),
        }
    }

    /// Returns an event after the work of a queue so far. The queue is flushed, or the event might never complete.
    ///
    /// # Safety
    /// The queue is live.
    pub(crate) unsafe fn marker(&self, queue: cl_command_queue) -> Answer<Event> {
        let cl = self.context.cl;
        let mut event: cl_event = std::ptr::null_mut();
        // SAFETY: the caller guarantees the queue, and the place for the event is valid.
        unsafe {
            call!(
                cl,
                clEnqueueMarkerWithWaitList(queue, 0, std::ptr::null(), &raw mut event)
            )?;
            let event = crate::sys::made("clEnqueueMarkerWithWaitList", event, 0)?;
            let event = Event::own(cl, event);
            call!(cl, clFlush(queue))?;
            Ok(event)
        }
    }

    /// Waits for all work of the device.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.context.check_process()?;
        let finished = self.queues.finish(&self.context, Patience::Once);
        self.context.failure.check()?;
        self.context.check(finished)
    }

    /// As [`synchronize`](Self::synchronize), and tries again if that fails. After an error the device has failed.
    pub(crate) fn settle(&self) -> Result<()> {
        self.context.check_process()?;
        let finished = self.queues.finish(&self.context, Patience::UntilEnded);
        if let Err(failed) = finished {
            self.context.failure.set(self.context.error(failed));
        }
        self.context.failure.check()
    }
}

impl Drop for Shared {
    /// Frees the pool, and what was never freed, once the queues, which were dropped, have ended.
    fn drop(&mut self) {
        if self.context.is_forked() {
            return;
        }
        let queues = std::mem::take(&mut self.queues);
        let memory = (self.pool.take_all(), std::mem::take(&mut self.live));
        let is_none = memory.0.is_empty() && memory.1.is_empty();
        if is_none || queues.are_done(&self.context) {
            return;
        }
        let context = self.context.clone();
        // Not the context's worker, whose jobs must not block. Dropping this one does not wait.
        Worker::new("arrow-device opencl end").push(move || {
            match queues.finish(&context, Patience::UntilEnded) {
                Ok(()) => drop(memory),
                // Work may still use the memory.
                Err(_) => std::mem::forget(memory),
            }
        });
    }
}
