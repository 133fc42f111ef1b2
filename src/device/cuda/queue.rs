//! Queues: CUDA streams, ours and those that are given.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUstream, CUstreamCaptureStatus};

use super::CudaMemory;
use super::blocks::{self, Blocks, to_ptr};
use super::context::{Context, Current, EventCell, event_of, memory_call};
use super::copy;
use crate::device::backend::{CopyOp, DevicePtr, EventPtr, RawQueue};
use crate::error::{Error, Result};

/// The handle that stands for the calling thread's own stream.
fn per_thread() -> CUstream {
    std::ptr::without_provenance_mut(2)
}

/// What a queue needs of its device.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) context: Arc<Context>,
    pub(super) memory: CudaMemory,
    pub(super) blocks: Arc<Blocks>,
}

/// A queue of a [`CudaDevice`](super::CudaDevice): a CUDA stream. Found by downcasting
/// [`RawQueue::as_any`].
pub struct CudaQueue {
    shared: Shared,
    stream: Stream,
    /// Unlike a stream's handle, never used again.
    id: u64,
}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

enum Stream {
    /// Ours.
    Own(CUstream),
    /// cudarc's.
    Given(Arc<CudaStream>),
    /// The stream of whichever thread calls.
    PerThread(Arc<CudaStream>, Mutex<Hop>),
}

/// Where the work of a per-thread queue stands. The handle means another stream on each thread, so
/// each piece of work is followed by an event, for which the next thread's stream waits.
#[derive(Default)]
struct Hop {
    last: Option<(ThreadId, Box<EventCell>)>,
}

// SAFETY: streams may be used on any thread; the context is made current for each call.
unsafe impl Send for CudaQueue {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for CudaQueue {}

impl CudaQueue {
    /// A new stream, which does not wait for the legacy default stream.
    pub(super) fn new(shared: Shared) -> Result<Self> {
        const NON_BLOCKING: u32 = 1;
        let mut stream = std::ptr::null_mut();
        {
            let context = &shared.context;
            let _current = context.enter("cuStreamCreate")?;
            // SAFETY: `stream` is written; destroyed in `drop`.
            let code = unsafe { (context.driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING) };
            context.check("cuStreamCreate", code)?;
        }
        Ok(Self {
            shared,
            stream: Stream::Own(stream),
            id: next_id(),
        })
    }

    /// A stream of cudarc's, in the device's context.
    pub(super) fn from_stream(shared: Shared, stream: Arc<CudaStream>) -> Result<Self> {
        let own = stream.context().cu_ctx();
        // SAFETY: cudarc's stream is live.
        let checked = unsafe { Self::check_stream(&shared.context, stream.cu_stream(), own) };
        if let Err(e) = checked {
            let of = stream.context().clone();
            shared.context.driver.let_go(of, move || drop(stream));
            return Err(e);
        }
        let stream = match stream.cu_stream() {
            raw if raw == per_thread() => Stream::PerThread(stream, Mutex::default()),
            _ => Stream::Given(stream),
        };
        Ok(Self {
            shared,
            stream,
            id: next_id(),
        })
    }

    /// Refuses a stream of another context. The default streams are `own`'s.
    ///
    /// # Safety
    /// `stream` is a live stream, or stands for a default stream.
    unsafe fn check_stream(context: &Context, stream: CUstream, own: CUcontext) -> Result<()> {
        let mut of = own;
        // The default streams are of whichever context is current.
        if stream.addr() > 2 {
            let _current = context.enter("cuStreamGetCtx")?;
            // SAFETY: the caller's: the stream is live; `of` is written.
            let code = unsafe { (context.driver.cuStreamGetCtx)(stream, &raw mut of) };
            context.check("cuStreamGetCtx", code)?;
        }
        if of != context.raw() {
            return Err(Error::argument(format!(
                "a stream of another context for {}; open the device with that context \
                 (CudaConfig::with_context)",
                context.id
            )));
        }
        Ok(())
    }

    /// Refuses a stream that is being captured. The context is current.
    ///
    /// # Safety
    /// `stream` is a live stream, or stands for a default stream.
    unsafe fn check_capture(
        context: &Context,
        stream: CUstream,
        operation: &'static str,
    ) -> Result<()> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's; the driver writes one of the three values that there ever were.
        let code = unsafe { (context.driver.cuStreamIsCapturing)(stream, &raw mut status) };
        context.check("cuStreamIsCapturing", code)?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::NotSupported {
                device: context.id,
                operation,
                reason:
                    "the stream is being captured into a graph, which would run the work later, \
                         when its memory may be gone; end the capture first"
                        .into(),
            });
        }
        Ok(())
    }

    /// Makes later work of a stream that somebody else has, or of a default stream of the context, wait
    /// for an event.
    ///
    /// # Safety
    /// `stream` is a live stream, or stands for a default stream; the event is live.
    pub(super) unsafe fn wait_on_stream(
        context: &Context,
        stream: CUstream,
        event: EventPtr,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { Self::check_stream(context, stream, context.raw()) }?;
        let _current = context.enter("cuStreamWaitEvent")?;
        // SAFETY: the caller's.
        unsafe { Self::check_capture(context, stream, "cuStreamWaitEvent") }?;
        // SAFETY: the caller's: both are live. The event may be of any context.
        let raw = unsafe { event_of(event) };
        // SAFETY: as above.
        let code = unsafe { (context.driver.cuStreamWaitEvent)(stream, raw, 0) };
        context.check("cuStreamWaitEvent", code)
    }

    /// The stream. It is the queue's, or that of whoever gave it: do not destroy it. 2 stands for
    /// the calling thread's own stream.
    pub fn cu_stream(&self) -> CUstream {
        match &self.stream {
            Stream::Own(stream) => *stream,
            Stream::Given(stream) | Stream::PerThread(stream, _) => stream.cu_stream(),
        }
    }

    /// The stream that was given, if one was.
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        match &self.stream {
            Stream::Own(_) => None,
            Stream::Given(stream) | Stream::PerThread(stream, _) => Some(stream),
        }
    }

    /// Runs `work` with the context current, in the queue's order.
    fn run<T>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&Current<'_>, CUstream) -> Result<T>,
    ) -> Result<T> {
        let context = &self.shared.context;
        let current = context.enter(operation)?;
        // SAFETY: the queue's stream is live.
        unsafe { Self::check_capture(context, self.cu_stream(), operation) }?;
        let Stream::PerThread(_, hop) = &self.stream else {
            return work(&current, self.cu_stream());
        };
        let (driver, stream) = (context.driver, per_thread());
        let this = std::thread::current().id();
        let mut hop = hop.lock().unwrap_or_else(PoisonError::into_inner);
        match &hop.last {
            Some((thread, event)) if *thread != this => {
                // SAFETY: the event is live.
                let code = unsafe { (driver.cuStreamWaitEvent)(stream, event.raw(), 0) };
                context.check("cuStreamWaitEvent", code)?;
            }
            _ => {}
        }
        // Before the work: what was done is not undone by an error.
        let event = match hop.last.take() {
            Some((_, event)) => event,
            None => context.event(&current)?,
        };
        let done = work(&current, stream);
        // SAFETY: event and stream are live, and of the current context.
        let code = unsafe { (driver.cuEventRecord)(event.raw(), stream) };
        if context.check("cuEventRecord", code).is_err() {
            // Without the event only the work's end keeps the order. The event stands for earlier work.
            // SAFETY: as above.
            let code = unsafe { (driver.cuStreamSynchronize)(stream) };
            if context.check("cuStreamSynchronize", code).is_err() {
                let _ = context.settle();
            }
        }
        hop.last = Some((this, event));
        done
    }
}

// SAFETY: the driver aligns allocations to 256 bytes and more, and gives them to nobody else; blocks
// are used again only in the order of their stream or after an event; a stream runs its work in order,
// waits included, and an event completes after all work before it. A per-thread stream is one queue by
// the events between its threads.
unsafe impl RawQueue for CudaQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let context = &self.shared.context;
        if isize::try_from(bytes).is_err() {
            return Err(context.out_of_memory(blocks::call(self.shared.memory), bytes));
        }
        let pool = context
            .pool
            .filter(|_| self.shared.memory == CudaMemory::Device);
        let Some(pool) = pool else {
            let take = |current: &Current<'_>, _| {
                self.shared.blocks.take(context, self.id, bytes, current)
            };
            return self.run(blocks::call(self.shared.memory), take);
        };
        self.run("cuMemAllocFromPoolAsync", |_, stream| {
            let allocate = || {
                let mut address: CUdeviceptr = 0;
                // SAFETY: `address` is written; pool and stream are live.
                let code = unsafe {
                    let function = context.driver.cuMemAllocFromPoolAsync;
                    function(&raw mut address, bytes, pool, stream)
                };
                context.check_memory(memory_call!("cuMemAllocFromPoolAsync"), code, bytes)?;
                Ok(to_ptr(address))
            };
            match allocate() {
                Err(Error::OutOfMemory { .. }) => {
                    // What the pool keeps may be in the way.
                    context.trim_pool()?;
                    allocate()
                }
                allocated => allocated,
            }
        })
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let context = &self.shared.context;
        let freed = if context.pool.is_some() && self.shared.memory == CudaMemory::Device {
            self.run("cuMemFreeAsync", |_, stream| {
                // SAFETY: the caller's: allocated in stream order, freed once.
                let code = unsafe {
                    (context.driver.cuMemFreeAsync)(base.address() as CUdeviceptr, stream)
                };
                context.check("cuMemFreeAsync", code)
            })
        } else {
            let after = self.run("cuEventRecord", |current, stream| {
                record(context, current, stream)
            });
            after.map(|event| {
                let blocks = &self.shared.blocks;
                blocks.give_back(context, base, bytes, event, self.id);
            })
        };
        match freed {
            // The driver has taken all memory back.
            Err(_) if context.is_shut_down() => Ok(()),
            Err(e) => {
                self.shared.blocks.give_up(context, base);
                Err(e)
            }
            Ok(()) => Ok(()),
        }
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        // SAFETY: the caller's.
        let copy = |current: &Current<'_>, stream| unsafe {
            copy::run(&self.shared, stream, copies, current)
        };
        self.run("cuMemcpyAsync", copy)
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        self.run("cuMemsetD8Async", |_, stream| {
            if self.shared.memory == CudaMemory::Host {
                // SAFETY: the caller's.
                return unsafe { copy::fill_host(&self.shared.context, stream, dst, byte, bytes) };
            }
            let context = &self.shared.context;
            // SAFETY: the caller's.
            let code = unsafe {
                let address = dst.address() as CUdeviceptr;
                (context.driver.cuMemsetD8Async)(address, byte, bytes, stream)
            };
            context.check("cuMemsetD8Async", code)
        })
    }

    fn is_one_stream(&self) -> bool {
        !matches!(self.stream, Stream::PerThread(..))
    }

    fn record(&self) -> Result<EventPtr> {
        let context = &self.shared.context;
        let event = self.run("cuEventRecord", |current, stream| {
            record(context, current, stream)
        })?;
        event
            .into_ptr()
            .ok_or_else(|| Error::argument("a null event"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let context = &self.shared.context;
        self.run("cuStreamWaitEvent", |_, stream| {
            // SAFETY: the caller's: the event is live; it may be of any context.
            let code = unsafe { (context.driver.cuStreamWaitEvent)(stream, event_of(event), 0) };
            context.check("cuStreamWaitEvent", code)
        })
    }

    fn stream_handle(&self) -> Option<usize> {
        Some(self.cu_stream().expose_provenance())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An event of ours after all work of a stream so far.
fn record(context: &Context, current: &Current<'_>, stream: CUstream) -> Result<Box<EventCell>> {
    let event = context.event(current)?;
    // SAFETY: event and stream are live, and of the current context.
    let code = unsafe { (context.driver.cuEventRecord)(event.raw(), stream) };
    if let Err(e) = context.check("cuEventRecord", code) {
        context.recycle(event);
        return Err(e);
    }
    Ok(event)
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        let context = &self.shared.context;
        match std::mem::replace(&mut self.stream, Stream::Own(std::ptr::null_mut())) {
            Stream::Own(stream) => {
                if let Ok(_current) = context.enter_even_if_failed() {
                    // SAFETY: created in `new`. Work that it was given runs on.
                    unsafe { (context.driver.cuStreamDestroy_v2)(stream) };
                }
            }
            Stream::Given(stream) => {
                let of = stream.context().clone();
                context.driver.let_go(of, move || drop(stream));
            }
            Stream::PerThread(stream, hop) => {
                let hop = hop.into_inner().unwrap_or_else(PoisonError::into_inner);
                if let Some((_, event)) = hop.last {
                    context.recycle(event);
                }
                let of = stream.context().clone();
                context.driver.let_go(of, move || drop(stream));
            }
        }
    }
}

impl fmt::Debug for CudaQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.shared.context.id;
        write!(f, "CudaQueue({id} {:p})", self.cu_stream())
    }
}
