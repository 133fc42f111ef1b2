//! [`Shared`]: what a device and its queues share.

use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::DevicePtr;
use arrow_device::device::parts::{Block, Pool, Ranges, Worker};
use opencl_sys::{cl_command_queue, cl_event};

use crate::cells::Cells;
use crate::context::Context;
use crate::event;
use crate::memory::{Allocation, Allocations, Kind};
use crate::object::Event;
use crate::platform::OpenClDeviceInfo;
use crate::queues::Queues;
use crate::sys::{Answer, call};

/// How often [`settle`](Shared::settle) tries to wait for a queue.
pub(crate) const SETTLE: usize = 100;

/// Memory in the pool.
pub(crate) struct Idle {
    /// `None` if no event could be recorded: only its own queue may use the memory again, or `trim` waits.
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
            pool: Pool::with_limits(idle_bytes, 1024),
        }
    }

    fn is_done(&self, idle: &Idle) -> bool {
        // SAFETY: the pool keeps the event alive.
        let ended = |event: &Event| unsafe { event::has_ended(self.context.cl, event.raw()) };
        idle.after.as_ref().is_some_and(ended)
    }

    /// Allocates memory for work on the queue of this number.
    pub(crate) fn allocate(&self, queue: u64, bytes: usize) -> Result<DevicePtr> {
        let out_of_memory = || {
            self.context
                .out_of_memory("CL_DEVICE_MAX_MEM_ALLOC_SIZE", bytes)
        };
        let rounded = Pool::<Idle>::rounded(bytes).unwrap_or(usize::MAX);
        let memory = match self.pool.take(queue, rounded, |idle| self.is_done(idle)) {
            Some(block) => block.after.memory,
            None => {
                if bytes > self.info.max_allocation {
                    return Err(out_of_memory());
                }
                self.free_idle(false);
                let rounded = rounded.min(self.info.max_allocation);
                let made = self.kind.allocate(&self.context, rounded);
                Arc::new(made.or_else(|_| {
                    self.free_idle(true);
                    self.kind.allocate(&self.context, rounded)
                })?)
            }
        };
        let base = memory.base();
        self.live.insert(base, bytes, memory);
        Ok(base)
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

    /// Frees memory that nothing uses any more: what is over the limits, or all of it.
    pub(crate) fn free_idle(&self, all: bool) {
        drop(self.pool.take_done(all, |idle| self.is_done(idle)));
    }

    /// Frees all memory that nothing uses any more.
    pub(crate) fn trim(&self) {
        if self.context.is_forked() {
            return;
        }
        self.free_idle(true);
        let unknown = self.pool.take_done(true, |idle| idle.after.is_none());
        if unknown.is_empty() {
            return;
        }
        match self.queues.finish(&self.context, 1) {
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
        let finished = self.queues.finish(&self.context, 1);
        self.context.failure.check()?;
        self.context.check(finished)
    }

    /// As [`synchronize`](Self::synchronize), and tries again if that fails. After an error the device has failed.
    pub(crate) fn settle(&self) -> Result<()> {
        self.context.check_process()?;
        let finished = self.queues.finish(&self.context, SETTLE);
        if let Err(failed) = finished {
            self.context.failure.set(self.context.error(failed));
        }
        self.context.failure.check()
    }
}

impl Drop for Shared {
    /// Frees the pool once the queues, which were dropped, have ended.
    fn drop(&mut self) {
        if self.context.is_forked() {
            return;
        }
        let (idle, queues) = (self.pool.take_all(), std::mem::take(&mut self.queues));
        if idle.is_empty() || queues.are_done(&self.context) {
            return;
        }
        let context = self.context.clone();
        // Not the context's worker, whose jobs must not block. Dropping this one does not wait.
        Worker::new("arrow-device opencl end").push(move || {
            match queues.finish(&context, SETTLE) {
                Ok(()) => drop(idle),
                // Work may still use the memory.
                Err(_) => std::mem::forget(idle),
            }
        });
    }
}
