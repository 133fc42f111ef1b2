//! A third-party backend whose memory the host reads and whose work is asynchronous: heap memory,
//! and a thread for each queue.

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::task::Waker;

use arrow_device::device::{Backend, CopyOp, DevicePtr, EventPtr, Notify, RawQueue, device_error};
use arrow_device::{ArrowDeviceType, Device, DeviceId, Error, Queue, Result};
use arrow_device_conformance::Hold;

use super::{Gate, wrap};

type Job = Box<dyn FnOnce() + Send>;

/// What was not given back.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    blocks: AtomicI64,
    events: AtomicI64,
}

impl Accounts {
    pub(crate) fn balance(&self) -> Result<(), String> {
        let live = [&self.blocks, &self.events].map(|count| count.load(Ordering::SeqCst));
        match live {
            [0, 0] => Ok(()),
            [blocks, events] => Err(format!("{blocks} blocks and {events} events are live")),
        }
    }
}

/// What fresh memory holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fresh {
    Written,
    /// What the allocator left there: a mistake, since the host may read it.
    Unwritten,
}

#[derive(Debug)]
struct Pinned {
    id: DeviceId,
    accounts: Arc<Accounts>,
    fresh: Fresh,
    queues: Mutex<Vec<Sender<Job>>>,
    queue: Arc<PinnedQueue>,
}

#[derive(Debug)]
struct PinnedQueue {
    id: DeviceId,
    accounts: Arc<Accounts>,
    fresh: Fresh,
    jobs: Sender<Job>,
}

/// What `sync_event` points to, inside an `Arc`.
#[derive(Default)]
struct Event {
    state: Mutex<(bool, Vec<Waker>)>,
    done: Condvar,
}

impl Event {
    fn complete(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 = true;
        let wakers = std::mem::take(&mut state.1);
        drop(state);
        self.done.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    fn wait(&self) {
        let state = self.state.lock().unwrap();
        drop(self.done.wait_while(state, |state| !state.0).unwrap());
    }

    /// # Safety
    /// `event` was recorded here and is not released.
    unsafe fn of(event: EventPtr) -> Arc<Self> {
        let ptr = event.as_ptr().cast_const().cast::<Self>();
        // SAFETY: the caller guarantees a live event of this device, so the reference of `record`
        // still exists (see `# Safety`).
        unsafe {
            Arc::increment_strong_count(ptr);
            Arc::from_raw(ptr)
        }
    }
}

pub(crate) fn device(fresh: Fresh) -> (Device, Arc<Accounts>) {
    static NEXT: AtomicI64 = AtomicI64::new(0);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let id = DeviceId::new(ArrowDeviceType::CUDA_HOST, id);
    let accounts = Arc::new(Accounts::default());
    let queue = PinnedQueue::start(id, &accounts, fresh);
    let backend = Pinned {
        id,
        accounts: accounts.clone(),
        fresh,
        queues: Mutex::new(vec![queue.jobs.clone()]),
        queue,
    };
    (wrap(Arc::new(backend)), accounts)
}

/// Keeps a queue's thread busy.
pub(crate) fn hold(queue: &Queue) -> Hold {
    let queue: &PinnedQueue = queue.raw().as_any().downcast_ref().unwrap();
    let gate = Arc::new(Gate::default());
    let job = gate.clone();
    queue.submit(move || job.pass()).unwrap();
    gate.hold()
}

impl PinnedQueue {
    fn start(id: DeviceId, accounts: &Arc<Accounts>, fresh: Fresh) -> Arc<Self> {
        let (jobs, todo) = channel::<Job>();
        // It ends with the last sender, when all jobs are done.
        std::thread::spawn(move || todo.into_iter().for_each(|job| job()));
        let accounts = accounts.clone();
        Arc::new(Self {
            id,
            accounts,
            fresh,
            jobs,
        })
    }

    fn submit(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let sent = self.jobs.send(Box::new(job));
        sent.map_err(|_| device_error(self.id, "submit", 1, "the queue has ended"))
    }
}

// SAFETY: memory is of the global allocator and so readable by the host; `classify` is the
// default; an event is completed by the job that stands behind all earlier work of its queue, and
// its lock makes that work visible; there is no host memory of its own.
unsafe impl Backend for Pinned {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn host_readable(&self) -> bool {
        true
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let queue = PinnedQueue::start(self.id, &self.accounts, self.fresh);
        self.queues.lock().unwrap().push(queue.jobs.clone());
        Ok(queue)
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        // SAFETY: the caller guarantees that `event` is a live event of this device (see `Backend`).
        Ok(unsafe { Event::of(event) }.state.lock().unwrap().0)
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: the caller guarantees that `event` is a live event of this device (see `Backend`).
        unsafe { Event::of(event) }.wait();
        Ok(())
    }

    unsafe fn notify_event(&self, event: EventPtr, waker: &Waker) -> Result<Notify> {
        // SAFETY: the caller guarantees that `event` is a live event of this device (see `Backend`).
        let event = unsafe { Event::of(event) };
        let mut state = event.state.lock().unwrap();
        if state.0 {
            return Ok(Notify::Completed);
        }
        state.1.push(waker.clone());
        Ok(Notify::Registered)
    }

    unsafe fn release_event(&self, event: EventPtr) {
        self.accounts.events.fetch_sub(1, Ordering::SeqCst);
        // SAFETY: the caller guarantees an event of `record` that is released once (see
        // `Backend::release_event`): this is its reference.
        drop(unsafe { Arc::from_raw(event.as_ptr().cast_const().cast::<Event>()) });
    }

    fn synchronize(&self) -> Result<()> {
        let queues = self.queues.lock().unwrap().clone();
        for jobs in queues {
            let event = Arc::new(Event::default());
            let done = event.clone();
            if jobs.send(Box::new(move || done.complete())).is_ok() {
                event.wait();
            }
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: memory comes from the global allocator with the requested size, aligned to 64 bytes; one
// thread runs a queue's jobs in order.
unsafe impl RawQueue for PinnedQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let out_of_memory = || Error::OutOfMemory {
            device: self.id,
            operation: "allocate",
            bytes,
        };
        if bytes == 0 {
            return Err(Error::InvalidArgument("no bytes".into()));
        }
        let layout = Layout::from_size_align(bytes, 64).map_err(|_| out_of_memory())?;
        // SAFETY: `bytes` is not 0.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            return Err(out_of_memory());
        }
        if self.fresh == Fresh::Written {
            // SAFETY: the memory was just allocated with this length. It is poisoned, so that a read
            // that comes too early shows.
            unsafe { memory.write_bytes(0xA5, bytes) };
        }
        self.accounts.blocks.fetch_add(1, Ordering::SeqCst);
        Ok(DevicePtr::new(memory.cast()))
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let accounts = self.accounts.clone();
        self.submit(move || {
            let layout = Layout::from_size_align(bytes, 64).unwrap();
            accounts.blocks.fetch_sub(1, Ordering::SeqCst);
            // SAFETY: the caller guarantees memory of `allocate` with this size, freed once (see
            // `RawQueue::free`); the queue's earlier work has run.
            unsafe {
                base.as_ptr().cast::<u8>().write_bytes(0x5A, bytes);
                dealloc(base.as_ptr().cast(), layout);
            }
        })
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let copies = copies.to_vec();
        self.submit(move || {
            for copy in copies {
                let (src, dst) = (copy.src.as_ptr().cast::<u8>(), copy.dst.as_ptr().cast());
                // SAFETY: the caller guarantees that both ranges are valid until the copy has
                // completed (see `RawQueue::copy`).
                unsafe { std::ptr::copy_nonoverlapping(src, dst, copy.bytes) };
            }
        })
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees that the range is valid until the queue has filled it (see `RawQueue::fill`).
        self.submit(move || unsafe { dst.as_ptr().cast::<u8>().write_bytes(byte, bytes) })
    }

    fn record(&self) -> Result<EventPtr> {
        let event = Arc::new(Event::default());
        let done = event.clone();
        self.submit(move || done.complete())?;
        self.accounts.events.fetch_add(1, Ordering::SeqCst);
        let ptr = Arc::into_raw(event).cast_mut().cast();
        EventPtr::new(ptr).ok_or_else(|| device_error(self.id, "record", 1, "null event"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        // SAFETY: the caller guarantees that `event` is a live event of this device (see `Backend`); the job holds a reference of its own.
        let event = unsafe { Event::of(event) };
        self.submit(move || event.wait())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
