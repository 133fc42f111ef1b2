//! What a device shares with its queues.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arrow_device::device::parts::{Failure, Process, Worker};
use arrow_device::device::{DeviceId, EventPtr};
use arrow_device::{Error, Result};

use crate::event::{self, Recorded};
use crate::memory::Blocks;
use crate::object::Owned;
use crate::sys::{self, Answer, Failed, Sycl, raw};

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
    /// Asks about events, and opens gates. It runs code of this crate only, and nothing that blocks.
    watches: Worker,
    work: Mutex<Work>,
}

/// Where work of the device may be.
#[derive(Default)]
struct Work {
    queues: Vec<Weak<Owned<raw::Queue>>>,
    /// What keeps queues that were dropped, until their work has ended.
    left: Vec<Arc<Left>>,
}

/// A queue that was dropped, and the event after its work, if there could be one.
struct Left {
    _queue: Arc<Owned<raw::Queue>>,
    last: Option<Owned<raw::Event>>,
}

impl Left {
    /// Returns whether the work is known to have ended. It is not where the event has failed.
    fn has_ended(&self) -> bool {
        let last = self.last.as_ref();
        last.is_some_and(|last| matches!(last.is_complete(), Ok(true)))
    }
}

impl Shared {
    pub(crate) fn new(
        sycl: &'static Sycl,
        id: DeviceId,
        number: u64,
        found: &Found,
        blocks: Blocks,
        failure: Arc<Failure>,
    ) -> Self {
        Self {
            sycl,
            id,
            number,
            device: found.device.clone(),
            context: found.context.clone(),
            blocks,
            process: Process::this(),
            failure,
            watches: Worker::new("arrow-device oneapi events"),
            work: Mutex::default(),
        }
    }

    pub(crate) fn error(&self, failed: Failed) -> Error {
        failed.on(self.id)
    }

    /// Fails in a child of the process, where other threads of the parent may have held the locks.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.process.check(self.id, -1)
    }

    /// Fails if the device has failed, and in a child of the process.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_process()?;
        self.failure.check()
    }

    /// Work of this device has failed: from now on everything does.
    pub(crate) fn fail(&self, failed: Failed) -> Error {
        self.failure.set(failed.on(self.id));
        match self.failure.check() {
            Err(first) => first,
            Ok(()) => sys::absent(
                self.id,
                "the device has failed; use another one, or start the process again",
            ),
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
    pub(crate) fn leave(&self, queue: Arc<Owned<raw::Queue>>, last: Answer<Owned<raw::Event>>) {
        let last = last.map_err(|failed| drop(self.fail(failed))).ok();
        let left = Left {
            _queue: queue,
            last,
        };
        self.work().left.push(Arc::new(left));
        // Asked, and dropped, without the lock. Meanwhile `queues` has them too.
        let (ended, goes_on): (Vec<_>, Vec<_>) = {
            let left = std::mem::take(&mut self.work().left);
            left.into_iter().partition(|left| left.has_ended())
        };
        self.work().left.extend(goes_on);
        drop(ended);
    }

    /// Waits for all work of the device, whatever fails.
    pub(crate) fn finish(&self) -> Result<()> {
        self.check_process()?;
        let (queues, left) = {
            let work = self.work();
            let queues: Vec<_> = work.queues.iter().filter_map(Weak::upgrade).collect();
            (queues, work.left.clone())
        };
        let mut outcome = Ok(());
        for queue in queues {
            outcome = outcome.and(self.drain(&queue, queue.record()));
        }
        for last in left.iter().filter_map(|left| left.last.as_ref()) {
            let failed = last.is_complete().map_err(|failed| self.fail(failed));
            outcome = outcome.and(failed.map(drop));
        }
        if outcome.is_ok() {
            let ended = |one: &mut Arc<Left>| left.iter().any(|left| Arc::ptr_eq(left, one));
            let ended: Vec<_> = self.work().left.extract_if(.., ended).collect();
            drop(ended);
        }
        outcome.and(self.check())
    }

    /// Waits for the work of a queue before an event.
    pub(crate) fn drain(
        &self,
        queue: &Owned<raw::Queue>,
        last: Answer<Owned<raw::Event>>,
    ) -> Result<()> {
        let waited = match last {
            Ok(last) => event::wait(|| last.is_complete()).map_err(|failed| {
                // It may have ended before the work that it stands for.
                self.end(queue);
                self.fail(failed)
            }),
            Err(failed) => {
                self.end(queue);
                Err(self.error(failed))
            }
        };
        waited.and(queue.check().map_err(|failed| self.fail(failed)))
    }

    /// Waits until no work of a queue runs any more, after a failure.
    pub(crate) fn end(&self, queue: &Owned<raw::Queue>) {
        if let Err(failed) = queue.finish() {
            drop(self.fail(failed));
        }
    }

    /// Returns whether an event has completed.
    ///
    /// # Safety
    /// `event` points to a live `sycl::event`.
    pub(crate) unsafe fn is_complete(&self, event: EventPtr) -> Result<bool> {
        self.check()?;
        let is_complete = match Recorded::find(event) {
            Some(recorded) => recorded.is_complete(),
            None => {
                // SAFETY: the caller guarantees a live event (see `# Safety`).
                unsafe { self.sycl.is_complete(event) }.map_err(|failed| self.error(failed))
            }
        }?;
        // A queue goes on after an event that it waited for has failed, and the device has failed before that.
        self.check()?;
        Ok(is_complete)
    }

    /// What a queue of this device has recorded.
    pub(crate) fn recorded(
        &self,
        event: Owned<raw::Event>,
        queue: Arc<Owned<raw::Queue>>,
    ) -> Recorded {
        Recorded {
            event,
            device: self.number,
            id: self.id,
            failure: self.failure.clone(),
            queue,
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
        let mut is_complete = unsafe { self.asked(event) }?;
        let failure = self.failure.clone();
        let ended = move || {
            is_complete().unwrap_or_else(|e| {
                failure.set(e);
                true
            })
        };
        // The device has failed before work goes on.
        self.watches.watch(ended, move || drop(gate));
        Ok(())
    }

    /// Returns a function that says whether an event has completed, which may be released meanwhile.
    ///
    /// # Safety
    /// `event` points to a live `sycl::event`.
    unsafe fn asked(
        &self,
        event: EventPtr,
    ) -> Result<Box<dyn FnMut() -> Result<bool> + Send + 'static>> {
        if let Some(recorded) = Recorded::find(event) {
            return Ok(Box::new(move || recorded.is_complete()));
        }
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        let event = unsafe { self.sycl.copy_event(event) }.map_err(|failed| self.error(failed))?;
        let id = self.id;
        Ok(Box::new(move || {
            event.is_complete().map_err(|failed| failed.on(id))
        }))
    }

    /// How many events are watched.
    pub(crate) fn watched(&self) -> usize {
        self.watches.pending()
    }
}

/// Refuses what cannot be a queue of this crate.
///
/// # Safety
/// `queue` is null, or points to a live `sycl::queue`.
pub(crate) unsafe fn check_queue(
    sycl: &'static Sycl,
    id: DeviceId,
    queue: *const c_void,
) -> Result<()> {
    if queue.is_null() {
        return Err(Error::InvalidArgument(
            format!("{id}: a queue cannot be adopted: the pointer is null; pass the address of a sycl::queue").into(),
        ));
    }
    // SAFETY: the caller guarantees that a pointer that is not null points to a live queue.
    let in_order = unsafe { sycl.is_in_order(queue) };
    if in_order.map_err(|failed| failed.on(id))? {
        return Ok(());
    }
    Err(Error::InvalidArgument(
        format!(
            "{id}: a queue cannot be adopted: it is out of order, and arrow-device needs one that runs its work in order; make it \
             with sycl::property::queue::in_order"
        )
        .into(),
    ))
}
