//! [`Shared`]: what a device and its queues share, the queues that were dropped included, and the memory that waits for its next use.

use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use arrow_device::device::DevicePtr;
use arrow_device::device::parts::{Block, Pool, Ranges, Worker};
use arrow_device::{Error, Result};
use opencl_sys::*;

use crate::context::Context;
use crate::event::is_done;
use crate::memory::{Allocation, Memory};
use crate::sys::{Answer, Cl, EVENT, Failed, Object, lock};

/// A command queue, of which its device has a clone until its work is done.
pub(crate) struct Queue {
    pub(crate) object: Object,
    /// An event after the last work of a queue that was dropped, if one could be recorded.
    pub(crate) last: OnceLock<Object>,
}

/// The queues of a device, those that were dropped included: their work may still run.
#[derive(Default)]
pub(crate) struct Queues(Mutex<Vec<Arc<Queue>>>);

impl Queues {
    pub(crate) fn add(&self, queue: Arc<Queue>) {
        lock(&self.0).push(queue);
    }

    /// Returns whether all queues were dropped and have ended, and forgets those that have.
    pub(crate) fn are_done(&self, context: &Context) -> bool {
        // The runtime is called outside the lock: to ask, and to release the queues.
        let mut ended = lock(&self.0).clone();
        ended.retain(|queue| queue.last.get().is_some_and(|last| is_done(context, last)));
        let mut queues = lock(&self.0);
        queues.retain(|queue| !ended.iter().any(|ended| Arc::ptr_eq(ended, queue)));
        queues.is_empty()
    }

    /// Makes this thread wait for the work of all queues, and forgets those that were dropped before.
    pub(crate) fn finish(&self, cl: &Cl, patience: Patience) -> Answer {
        let (queues, mut outcome) = (lock(&self.0).clone(), Ok(()));
        for queue in queues {
            let finished = finish(cl, &queue, patience);
            // Nobody else has one that was dropped.
            if finished.is_ok() && Arc::strong_count(&queue) == 2 {
                lock(&self.0).retain(|other| !Arc::ptr_eq(other, &queue));
            }
            outcome = outcome.and(finished);
        }
        outcome
    }
}

/// When a wait for a queue gives up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// At the first error.
    Once,
    /// Once the queue's work certainly does not run any more, as long as it takes. There is no bound: to give up while the runtime
    /// answers with other errors, such as `CL_OUT_OF_RESOURCES`, would free memory that work may still use.
    UntilEnded,
}

/// Makes this thread wait for the work of a queue.
pub(crate) fn finish(cl: &Cl, queue: &Queue, patience: Patience) -> Answer {
    loop {
        // SAFETY: the queue is live.
        match unsafe { cl.clFinish(queue.object.raw()) } {
            Err(failed) if patience == Patience::UntilEnded && !is_gone(failed.code) => {
                // Such as a lack of memory, which says nothing about the work.
                std::thread::sleep(Duration::from_millis(10));
            }
            finished => return finished,
        }
    }
}

/// Returns whether a queue for which a wait fails with this code runs nothing any more.
fn is_gone(code: cl_int) -> bool {
    matches!(
        code,
        CL_INVALID_COMMAND_QUEUE | CL_INVALID_CONTEXT | CL_INVALID_DEVICE | CL_DEVICE_NOT_AVAILABLE
    )
}

/// How long an allocation waits, while there is no memory left, for work that uses what was freed.
const PATIENCE: Duration = Duration::from_secs(1);

/// Memory in the pool.
struct Idle {
    /// `None` if no event could be recorded: only its own queue may use the memory again, or `trim` waits. So it is if the event
    /// fails.
    after: Option<Object>,
    memory: Arc<Allocation>,
}

/// What a device and its queues share.
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    pub(crate) memory: Memory,
    /// Host memory in use.
    pub(crate) host: Ranges<()>,
    pub(crate) queues: Queues,
    pool: Pool<Idle>,
}

impl Shared {
    pub(crate) fn new(context: Context, idle_bytes: usize) -> Self {
        let context = Arc::new(context);
        Self {
            memory: Memory::new(context.clone()),
            context,
            host: Ranges::new(),
            queues: Queues::default(),
            pool: Pool::new(idle_bytes),
        }
    }

    fn is_done(&self, idle: &Idle) -> bool {
        let after = idle.after.as_ref();
        after.is_some_and(|event| is_done(&self.context, event))
    }

    /// Allocates memory for work on the queue of this number.
    pub(crate) fn allocate(&self, queue: u64, bytes: usize) -> Result<DevicePtr> {
        let most = self.context.info.max_allocation;
        let rounded = Pool::<Idle>::rounded(bytes).unwrap_or(usize::MAX);
        let memory = match self.pool.take(queue, rounded, |idle| self.is_done(idle)) {
            Some(block) => block.after.memory,
            None if bytes > most => {
                let what = "a single allocation (the most is CL_DEVICE_MAX_MEM_ALLOC_SIZE; use smaller batches)";
                return Err(self.context.out_of_memory(what, bytes));
            }
            None => {
                self.free_idle(false);
                Arc::new(self.allocate_new(rounded.min(most))?)
            }
        };
        let base = memory.base;
        self.memory.live.insert(base, bytes, memory);
        Ok(base)
    }

    /// Asks the runtime for memory. If it has none left, what is in the pool is freed: at once what is done, and the rest once it
    /// is, for which this waits a while.
    fn allocate_new(&self, bytes: usize) -> Result<Allocation> {
        let start = Instant::now();
        loop {
            let made = Allocation::new(&self.context, bytes);
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
    pub(crate) fn free(&self, queue: u64, base: DevicePtr, after: Option<Object>) -> Result<()> {
        let Some((_, memory)) = self.memory.live.remove(base) else {
            let reason = format!("{base:?} is not the beginning of an allocation of this device");
            return Err(self.context.not_supported("free", reason));
        };
        self.pool.give(Block {
            base,
            bytes: memory.bytes,
            queue,
            after: Idle { after, memory },
        });
        if self.pool.is_over(1) {
            self.free_idle(false);
        }
        Ok(())
    }

    /// Frees memory that nothing uses any more: what is over the limits, or all of it. Returns whether there was any.
    fn free_idle(&self, all: bool) -> bool {
        let done = self.pool.take_done(all, |idle| self.is_done(idle));
        !done.is_empty()
    }

    /// Frees all memory that nothing uses any more.
    pub(crate) fn trim(&self) {
        self.free_idle(true);
        // What has no event, or one that may have failed, is done once all queues are.
        let is_unknown = |idle: &Idle| idle.after.is_none() || self.context.failure.is_set();
        let unknown = self.pool.take_done(true, is_unknown);
        if !unknown.is_empty() && self.queues.finish(self.context.cl, Patience::Once).is_err() {
            unknown.into_iter().for_each(|block| self.pool.give(block));
        }
    }

    /// Returns an event after the work of a queue so far. The queue is flushed, or the event might never complete.
    pub(crate) fn marker(&self, queue: &Queue) -> Answer<Object> {
        let (cl, queue) = (self.context.cl, queue.object.raw());
        let (mut event, code): (cl_event, _) = (null_mut(), CL_SUCCESS);
        // SAFETY: the queue is live, and the place for the event valid. The event is nobody else's.
        unsafe {
            cl.clEnqueueMarkerWithWaitList(queue, 0, null(), &raw mut event)?;
            let call = "clEnqueueMarkerWithWaitList";
            let event = NonNull::new(event).ok_or(Failed { call, code })?;
            let event = Object::own(cl, EVENT, event);
            cl.clFlush(queue).map(|()| event)
        }
    }
}

impl Drop for Shared {
    /// Frees the pool, and what was never freed, once the queues, which were dropped, have ended.
    fn drop(&mut self) {
        let (context, queues) = (self.context.clone(), std::mem::take(&mut self.queues));
        let memory = (self.pool.take_all(), std::mem::take(&mut self.memory.live));
        let Some(_inside) = context.cl.enter() else {
            return std::mem::forget((memory, queues));
        };
        let is_none = memory.0.is_empty() && memory.1.is_empty();
        if is_none || queues.are_done(&context) {
            return;
        }
        // Not the context's worker, whose jobs must not block. Dropping this one does not wait.
        Worker::new("arrow-device opencl end").push(move || {
            let Some(_inside) = context.cl.enter() else {
                return std::mem::forget((memory, queues));
            };
            match queues.finish(context.cl, Patience::UntilEnded) {
                Ok(()) => drop(memory),
                // Work may still use the memory.
                Err(_) => std::mem::forget(memory),
            }
        });
    }
}
