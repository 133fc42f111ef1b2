//! Queues: a thread each, which runs jobs in order.

use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use arrow_device::device::parts::{Failure, Process, queue_number};
use arrow_device::device::{CopyOp, DevicePtr, EventPtr, RawQueue, device_error};
use arrow_device::{DeviceId, Error, Result};

use super::event::{Event, Events, lock};
use super::memory::Memory;

type Job = Box<dyn FnOnce() + Send>;

/// What a device and its queues share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: DeviceId,
    pub(crate) memory: Memory,
    pub(crate) events: Events,
    pub(crate) failure: Failure,
    pub(crate) process: Process,
    pub(crate) backlog: Backlog,
}

/// The jobs of all queues that have not ended, by number. Dropped queues count, too.
#[derive(Default, Debug)]
pub(crate) struct Backlog {
    jobs: Mutex<Jobs>,
    ended: Condvar,
}

#[derive(Default, Debug)]
struct Jobs {
    last: u64,
    pending: BTreeSet<u64>,
}

impl Backlog {
    fn begin(&self) -> u64 {
        let mut jobs = lock(&self.jobs);
        jobs.last += 1;
        let job = jobs.last;
        jobs.pending.insert(job);
        job
    }

    fn end(&self, job: u64) {
        lock(&self.jobs).pending.remove(&job);
        self.ended.notify_all();
    }

    /// Waits for all jobs so far.
    pub(crate) fn wait(&self) {
        let jobs = lock(&self.jobs);
        let last = jobs.last;
        let earlier = |jobs: &mut Jobs| jobs.pending.first().is_some_and(|job| *job <= last);
        let waited = self.ended.wait_while(jobs, earlier);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// An ordered queue. Its thread ends when the queue was dropped and all its jobs are done.
pub(crate) struct SampleQueue {
    shared: Arc<Shared>,
    number: u64,
    jobs: Sender<(u64, Job)>,
}

impl fmt::Debug for SampleQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SampleQueue({} #{})", self.shared.id, self.number)
    }
}

impl SampleQueue {
    pub(crate) fn start(shared: &Arc<Shared>) -> Result<Arc<Self>> {
        let (jobs, todo) = channel();
        let device = shared.clone();
        let thread = std::thread::Builder::new().name(format!("queue of {}", shared.id));
        let started = thread.spawn(move || work(&device, &todo));
        started.map_err(|e| device_error(shared.id, "start a queue", 1, e.to_string()))?;
        Ok(Arc::new(Self {
            shared: shared.clone(),
            number: queue_number(),
            jobs,
        }))
    }

    /// Queues a kernel: a closure that computes on the device's memory. If it returns an error or
    /// panics, the device fails: what was queued behind it does not run, and later calls return the
    /// error.
    ///
    /// # Safety
    /// The kernel reads and writes only memory that is valid for work on this queue, and writes none
    /// that other code relies on.
    pub(crate) unsafe fn launch(
        &self,
        kernel: impl FnOnce() -> std::result::Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let shared = self.shared.clone();
        self.submit(move || {
            if let Err(text) = kernel() {
                let failed = device_error(shared.id, "kernel", 2, text);
                shared.failure.set(failed);
            }
        })
    }

    /// Queues work of the device, unless the device has failed.
    fn submit(&self, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.shared.check()?;
        let shared = self.shared.clone();
        self.push(move || {
            if !shared.failure.is_set() {
                work();
            }
        })
    }

    /// Hands a job to the thread, which starts it without being asked. A backend of a runtime that
    /// batches work flushes it in `record`.
    fn push(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let number = self.shared.backlog.begin();
        self.jobs.send((number, Box::new(job))).map_err(|_| {
            self.shared.backlog.end(number);
            device_error(self.shared.id, "submit", 3, "the queue's thread has ended")
        })
    }

    /// Returns an event that completes after all work so far, even if the device has failed.
    fn mark(&self) -> Result<Arc<Event>> {
        let event = Arc::new(Event::default());
        let done = event.clone();
        self.push(move || done.complete())?;
        Ok(event)
    }
}

impl Drop for SampleQueue {
    fn drop(&mut self) {
        if !self.shared.process.is_this() {
            // The last sender would wake the thread, under a lock of the channel. So keep one.
            std::mem::forget(self.jobs.clone());
        }
    }
}

/// The thread of a queue.
fn work(shared: &Shared, todo: &Receiver<(u64, Job)>) {
    for (number, job) in todo {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            let failed = device_error(shared.id, "kernel", 4, "a kernel panicked");
            shared.failure.set(failed);
        }
        shared.backlog.end(number);
    }
}

// SAFETY: memory comes from `Memory`, aligned to 64 bytes, and goes to another queue only after the
// event behind its last use. One thread runs the jobs of a queue in order, events among them.
unsafe impl RawQueue for SampleQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        self.shared.check()?;
        self.shared.memory.allocate(self.number, bytes)
    }

    unsafe fn free(&self, base: DevicePtr, _: usize) -> Result<()> {
        if !self.shared.process.is_this() {
            return Ok(()); // the memory is the parent's
        }
        let after = self.mark()?;
        self.shared.memory.free(base, self.number, after);
        Ok(())
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let copies = copies.to_vec();
        self.submit(move || {
            for copy in copies {
                let (from, to) = (copy.src.as_ptr(), copy.dst.as_ptr());
                // SAFETY: the caller guarantees that both are valid for `bytes` bytes until the copy
                // has completed, and do not overlap (see `RawQueue::copy`).
                unsafe { from.copy_to_nonoverlapping(to.cast(), copy.bytes) }
            }
        })
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees that the memory is valid for `bytes` bytes until it is
        // filled (see `RawQueue::fill`).
        self.submit(move || unsafe { dst.as_ptr().write_bytes(byte, bytes) })
    }

    fn record(&self) -> Result<EventPtr> {
        self.shared.check()?;
        let event = self.shared.events.add(self.mark()?);
        event.ok_or_else(|| device_error(self.shared.id, "record", 5, "an event at null"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let event = self.shared.event(event)?;
        // The job holds the event, which may be released meanwhile.
        self.submit(move || event.wait())
    }
}

impl Shared {
    /// Returns an error in a forked child, where the queues have no threads and other threads' locks
    /// are held for ever. Every call begins with this.
    pub(crate) fn in_this_process(&self) -> Result<()> {
        self.process.check(self.id, 6)
    }

    /// Returns an error if the device cannot be used: in a forked child, and after a failure.
    pub(crate) fn check(&self) -> Result<()> {
        self.in_this_process()?;
        self.failure.check()
    }

    /// Returns a live event of this device.
    pub(crate) fn event(&self, event: EventPtr) -> Result<Arc<Event>> {
        self.in_this_process()?;
        self.events.find(event).ok_or_else(|| {
            Error::InvalidArgument(format!("{event:?} is not a live event of {}", self.id).into())
        })
    }
}
