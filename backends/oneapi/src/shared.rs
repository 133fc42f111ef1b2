//! What a device shares with its queues.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arrow_device::device::parts::{Failure, Process, Worker};
use arrow_device::device::{DeviceId, EventPtr};
use arrow_device::{Error, Result};

use crate::event::{self, Recorded};
use crate::memory::Blocks;
use crate::object::Owned;
use crate::sys::{Answer, Failed, Sycl, raw};

/// A device as SYCL names it, its context, and its default queue.
#[derive(Clone)]
pub(crate) struct Found {
    pub(crate) device: Arc<Owned<raw::Device>>,
    pub(crate) context: Arc<Owned<raw::Context>>,
    pub(crate) queue: Arc<Owned<raw::Queue>>,
}

/// What a device shares with its queues.
pub(crate) struct Shared {
    pub(crate) sycl: &'static Sycl,
    pub(crate) id: DeviceId,
    /// The device among all that this process has opened.
    pub(crate) number: u64,
    pub(crate) device: Arc<Owned<raw::Device>>,
    pub(crate) context: Arc<Owned<raw::Context>>,
    pub(crate) blocks: Blocks,
    process: Process,
    failure: Arc<Failure>,
    /// Asks about events. Nothing that it does blocks.
    watches: Worker,
    work: Mutex<Work>,
}

/// Where work of the device may be.
#[derive(Default)]
struct Work {
    queues: Vec<Weak<Owned<raw::Queue>>>,
    /// Events after the work of queues that were dropped.
    left: Vec<Arc<Owned<raw::Event>>>,
}

impl Shared {
    pub(crate) fn new(
        sycl: &'static Sycl,
        id: DeviceId,
        number: u64,
        found: &Found,
        blocks: Blocks,
    ) -> Self {
        Self {
            sycl,
            id,
            number,
            device: found.device.clone(),
            context: found.context.clone(),
            blocks,
            process: Process::this(),
            failure: Arc::new(Failure::new()),
            watches: Worker::new("arrow-device oneapi events"),
            work: Mutex::default(),
        }
    }

    pub(crate) fn error(&self, failed: Failed) -> Error {
        failed.on(self.id)
    }

    /// Fails if the device has failed, and in a child of the process.
    pub(crate) fn check(&self) -> Result<()> {
        self.process.check(self.id, -1)?;
        self.failure.check()
    }

    /// Work of this device has failed: from now on everything does.
    pub(crate) fn fail(&self, failed: Failed) -> Error {
        self.failure.set(failed.on(self.id));
        match self.failure.check() {
            Err(first) => first,
            Ok(()) => Error::InvalidArgument("unreachable: a failure was just set".into()),
        }
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_queue(&self, queue: &Arc<Owned<raw::Queue>>) {
        let mut work = self.work();
        work.queues.retain(|queue| queue.strong_count() > 0);
        work.queues.push(Arc::downgrade(queue));
    }

    /// A queue is dropped, whose work goes on until this event.
    pub(crate) fn leave(&self, last: Answer<Owned<raw::Event>>) {
        match last {
            Ok(last) => {
                let mut work = self.work();
                work.left
                    .retain(|event| !event.is_complete().unwrap_or(true));
                work.left.push(Arc::new(last));
            }
            Err(failed) => drop(self.fail(failed)),
        }
    }

    /// Waits for all work of the device, whatever fails.
    pub(crate) fn finish(&self) -> Result<()> {
        let (queues, left) = {
            let work = self.work();
            let queues: Vec<_> = work.queues.iter().filter_map(Weak::upgrade).collect();
            (queues, work.left.clone())
        };
        let mut outcome = Ok(());
        for queue in queues {
            let waited = match queue.record() {
                Ok(last) => event::wait(|| last.is_complete().map_err(|failed| self.fail(failed))),
                // No event: SYCL waits itself.
                Err(failed) => {
                    let _ = queue.finish();
                    Err(self.error(failed))
                }
            };
            let checked = queue.check().map_err(|failed| self.fail(failed));
            outcome = outcome.and(waited).and(checked);
        }
        for last in left {
            outcome = outcome.and(event::wait(|| {
                last.is_complete().map_err(|failed| self.fail(failed))
            }));
        }
        outcome
    }

    /// Returns whether an event has completed.
    ///
    /// # Safety
    /// `event` points to a live `sycl::event`.
    pub(crate) unsafe fn is_complete(&self, event: EventPtr) -> Result<bool> {
        self.check()?;
        match Recorded::find(event) {
            Some(own) if own.device == self.number => {
                own.is_complete().map_err(|failed| self.fail(failed))
            }
            Some(other) => other.is_complete().map_err(|failed| self.error(failed)),
            // SAFETY: the caller guarantees a live event (see `# Safety`).
            None => unsafe { self.sycl.is_complete(event) }.map_err(|failed| self.error(failed)),
        }
    }

    /// Makes later work of a queue wait for an event, without a wait of this thread.
    ///
    /// # Safety
    /// `queue` points to a live `sycl::queue` and `event` to a live `sycl::event`.
    pub(crate) unsafe fn order(
        &self,
        queue: *mut c_void,
        is_own: bool,
        event: EventPtr,
    ) -> Result<()> {
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        if unsafe { self.is_complete(event) }? {
            return Ok(());
        }
        if is_own && Recorded::find(event).is_some_and(|event| event.device == self.number) {
            // SAFETY: the caller guarantees both (see `# Safety`); the event is of the queue's context.
            return unsafe { self.sycl.wait(queue, event) }.map_err(|failed| self.error(failed));
        }
        // Another context's, perhaps: SYCL must not be told to wait for it. And if its work fails, SYCL runs what comes after.
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let gate = unsafe { self.sycl.gate(queue) }.map_err(|failed| self.error(failed))?;
        let Some(gate) = gate else {
            // SAFETY: the caller guarantees that the event lives during the call (see `# Safety`).
            return event::wait(|| unsafe { self.is_complete(event) });
        };
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        let event = unsafe { self.sycl.copy_event(event) }.map_err(|failed| self.error(failed))?;
        let (failure, id) = (self.failure.clone(), self.id);
        let ended = move || match event.is_complete() {
            Ok(is_complete) => is_complete,
            Err(failed) => {
                failure.set(failed.on(id));
                true
            }
        };
        // The device has failed before work goes on.
        self.watches.watch(ended, move || drop(gate));
        Ok(())
    }

    /// Calls `then` on a thread once an event has completed or its work has failed.
    ///
    /// # Safety
    /// `event` points to a live `sycl::event`.
    pub(crate) unsafe fn notify(
        &self,
        event: EventPtr,
        then: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        let event = unsafe { self.sycl.copy_event(event) }.map_err(|failed| self.error(failed))?;
        self.watches
            .watch(move || event.is_complete().unwrap_or(true), then);
        Ok(())
    }

    /// How many events are watched.
    pub(crate) fn watched(&self) -> usize {
        self.watches.pending()
    }
}
