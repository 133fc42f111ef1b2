//! The device: a provider of the engine, over a runtime that is made of threads and the heap.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

use arrow_device::device::engine::{Engine, Health, Memories, Runtime};
use arrow_device::device::{Capabilities, CopyOp, DevicePtr, EventPtr, device_error};
use arrow_device::{ArrowDeviceType, Device, DeviceId, Error, Queue, Result};

/// A device of the type VPI, without VPI: its memory is the heap, and each of its streams is a thread.
#[derive(Debug)]
pub(crate) struct SampleDevice {
    health: Health,
    memories: Memories<Arc<Block>>,
    host_readable: bool,
}

impl SampleDevice {
    /// Opens the device `vpi:<id>`. If it is not `host_readable`, programs see it as they see a GPU, whose memory only copies reach.
    pub(crate) fn open(id: i64, host_readable: bool) -> Result<Device> {
        let device = Self::new(id, host_readable);
        let stream = device.new_stream()?;
        // SAFETY: the stream is the device's.
        unsafe { Engine::open(device, stream, 64 << 20) }
    }

    pub(crate) fn new(id: i64, host_readable: bool) -> Self {
        let health = Health::new(DeviceId::new(ArrowDeviceType::VPI, id));
        let memories = Memories::default();
        Self {
            health,
            memories,
            host_readable,
        }
    }

    /// Names a failed call of the runtime.
    fn error(&self, call: &'static str, code: i32, text: impl Into<String>) -> Error {
        device_error(self.health.id(), call, code, text.into())
    }
}

/// Memory of the runtime.
#[derive(Debug)]
pub(crate) struct Block(DevicePtr, Layout);

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `allocate` took the memory with this layout, and the engine drops it once, when nothing uses it any more.
        unsafe { dealloc(self.0.as_ptr().cast(), self.1) }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A stream of the runtime: its thread runs jobs in their order, and ends when this is dropped and all are done.
pub(crate) struct SampleQueue {
    health: Health,
    jobs: Sender<Job>,
}

impl SampleQueue {
    /// Returns the stream of a queue.
    pub(crate) fn of(queue: &Queue) -> Result<&Self> {
        Engine::<SampleDevice>::stream(queue).map(Arc::as_ref)
    }

    /// Queues a kernel: a closure that computes on the device's memory. If it returns an error or panics, the device fails.
    ///
    /// # Safety
    /// The kernel reads and writes only memory that is valid for work of this queue, and writes none that other code relies on.
    pub(crate) unsafe fn launch(
        &self,
        kernel: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Result<()> {
        let _inside = self.health.enter()?;
        let health = self.health.clone();
        self.push(move || {
            // After a failure nothing is computed any more.
            if health.check().is_ok() {
                let outcome = catch_unwind(AssertUnwindSafe(kernel));
                if let Err(text) = outcome.unwrap_or(Err("a kernel panicked".into())) {
                    health.fail(device_error(health.id(), "kernel", 2, text));
                }
            }
        })
    }

    /// Gives the thread a job, which it starts without being asked. A runtime that batches work is flushed in `record`.
    fn push(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let text = "the stream's thread has ended";
        let ended = |_| device_error(self.health.id(), "submit", 3, text);
        self.jobs.send(Box::new(job)).map_err(ended)
    }
}

// SAFETY:
// - memory is the heap's, of the length that was asked for, aligned to 64 bytes and zeroed;
// - one thread runs the jobs of a stream in their order, those that complete events among them, and waits within them;
// - the engine's `synchronize` waits for an event behind the work of each stream.
unsafe impl Runtime for SampleDevice {
    type Stream = SampleQueue;
    type Event = Arc<AtomicBool>;
    type Memory = Arc<Block>;

    /// Foreign events are not known.
    const EVENT_WORDS: usize = 0;

    fn health(&self) -> &Health {
        &self.health
    }

    fn memories(&self) -> &Memories<Arc<Block>> {
        &self.memories
    }

    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.health.id());
        this.host_readable = self.host_readable;
        this
    }

    fn new_stream(&self) -> Result<Arc<SampleQueue>> {
        let (jobs, todo) = channel::<Job>();
        let thread = std::thread::Builder::new().name(format!("stream of {}", self.health.id()));
        let started = thread.spawn(move || todo.into_iter().for_each(|job| job()));
        started.map_err(|e| self.error("start a stream", 1, e.to_string()))?;
        let health = self.health.clone();
        Ok(Arc::new(SampleQueue { health, jobs }))
    }

    fn allocate(&self, bytes: usize, _: &SampleQueue) -> Result<Arc<Block>> {
        let (device, operation) = (self.health.id(), "allocate");
        let out_of_memory = || Error::OutOfMemory {
            device,
            operation,
            bytes,
        };
        let layout = Layout::from_size_align(bytes, 64).map_err(|_| out_of_memory())?;
        // SAFETY: the engine asks for more than 0 bytes. The memory is zeroed, because the host may read memory of a host-readable device
        // before anything has written it.
        let base = unsafe { alloc_zeroed(layout) };
        let block = || Arc::new(Block(DevicePtr::new(base.cast()), layout));
        (!base.is_null()).then(block).ok_or_else(out_of_memory)
    }

    fn base(&self, memory: &Arc<Block>) -> DevicePtr {
        memory.0
    }

    unsafe fn copy(&self, stream: &SampleQueue, copies: &[CopyOp], _: &mut bool) -> Result<()> {
        let copies = copies.to_vec();
        stream.push(move || {
            for copy in copies {
                let (from, to) = (copy.src.as_ptr(), copy.dst.as_ptr());
                // SAFETY: the caller guarantees that both are valid for `bytes` bytes until the copy has completed, and do not overlap.
                unsafe { from.copy_to_nonoverlapping(to.cast(), copy.bytes) }
            }
        })
    }

    unsafe fn fill(
        &self,
        stream: &SampleQueue,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller guarantees that the memory is valid for `bytes` bytes until it is filled.
        stream.push(move || unsafe { dst.as_ptr().write_bytes(byte, bytes) })
    }

    fn record(&self, stream: &SampleQueue) -> Result<Arc<AtomicBool>> {
        let event = Arc::new(AtomicBool::new(false));
        let done = event.clone();
        stream.push(move || done.store(true, Ordering::Release))?;
        Ok(event)
    }

    fn pointer(&self, event: &Arc<AtomicBool>) -> *mut c_void {
        Arc::as_ptr(event).cast_mut().cast()
    }

    unsafe fn foreign_event(&self, _: EventPtr) -> Result<Arc<AtomicBool>> {
        Err(self.error("event", 4, "the event is of no device of this crate"))
    }

    fn is_done(&self, event: &Arc<AtomicBool>) -> Result<bool> {
        Ok(event.load(Ordering::Acquire))
    }

    fn wait(&self, stream: &SampleQueue, event: &Arc<AtomicBool>, _: bool) -> Result<bool> {
        let event = event.clone();
        stream.push(move || {
            while !event.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        })?;
        Ok(true)
    }
}
