//! Queues: streams, our own and those of others.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::api::RawStream;
use super::context::Context;
use super::copy;
use super::entry::Current;
use super::event::{EventCell, event_of};
use crate::device::backend::{CopyOp, DevicePtr, EventPtr, RawQueue};
use crate::device::parts::queue_number;
use crate::error::{Error, Result};

/// A queue of a GPU: a stream.
pub(crate) struct GpuQueue {
    context: Arc<Context>,
    stream: RawStream,
    /// Whether it is our own stream.
    is_own: bool,
    /// Whether others have the stream, and may capture it into a graph.
    lent: Arc<AtomicBool>,
    /// Unlike a stream's handle, this is never used again.
    id: u64,
    /// What [`RawQueue::as_any`] returns: the vendor's type of queue, which owns a stream that was
    /// given.
    vendor: Box<dyn Any + Send + Sync>,
}

impl GpuQueue {
    /// Makes a queue of a new stream, which does not wait for the legacy default stream.
    pub(super) fn new(context: Arc<Context>) -> Result<Self> {
        let stream = context.check(context.enter()?.new_stream())?;
        let lent = Arc::new(AtomicBool::new(false));
        let vendor = context.runtime.queue(stream, lent.clone());
        Ok(Self {
            context,
            stream,
            is_own: true,
            lent,
            id: queue_number(),
            vendor,
        })
    }

    /// Makes a queue of a stream that was given, which `vendor` keeps alive.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a stream of another context, for a per-thread default
    /// stream, and for one that is being captured. The legacy default stream is not checked.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream, for as long as `vendor` lives.
    pub(crate) unsafe fn given(
        context: Arc<Context>,
        stream: RawStream,
        vendor: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if stream.is_per_thread() {
            let why =
                "a per-thread default stream is another one on each thread; use an ordinary stream";
            return Err(Error::argument(format!("{}: {why}", context.id)));
        }
        // SAFETY: the caller guarantees that the stream is live or a default stream (see
        // `# Safety`).
        unsafe { check_stream(&context, &context.enter()?, stream) }?;
        Ok(Self {
            context,
            stream,
            is_own: false,
            lent: Arc::new(AtomicBool::new(true)),
            id: queue_number(),
            vendor,
        })
    }

    /// Makes later work of somebody else's stream, or of a default stream of the context, wait for
    /// an event.
    ///
    /// # Safety
    /// `stream` is a live stream, or stands for a default stream; the event is live.
    pub(super) unsafe fn wait_on_stream(
        context: &Context,
        stream: RawStream,
        event: EventPtr,
    ) -> Result<()> {
        let current = context.enter()?;
        // SAFETY: the caller guarantees that the stream is live or a default stream (see
        // `# Safety`).
        unsafe { check_stream(context, &current, stream) }?;
        // SAFETY: the caller guarantees that stream and event are live (see `# Safety`). The event
        // may be of any context.
        context.check(unsafe { current.api().wait(stream, event_of(event), 0) })
    }

    /// Makes the context current, to give work to the stream. Refuses that while the stream is being
    /// captured.
    fn enter(&self) -> Result<Current<'_>> {
        let current = self.context.enter()?;
        if self.lent.load(Ordering::Relaxed) && !self.stream.is_default() {
            // SAFETY: the queue keeps its stream alive, which is no default stream.
            unsafe { check_capture(&self.context, &current, self.stream) }?;
        }
        Ok(current)
    }

    /// Allocates memory if there is enough now.
    fn try_allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let context = &*self.context;
        let current = self.enter()?;
        match context.pool {
            Some(pool) => {
                // SAFETY: the queue keeps its stream and its context, which has the pool.
                let answer = unsafe { current.allocate_from(pool, bytes, self.stream) };
                context.check_memory(answer, bytes)
            }
            None => context.allocate_block(&context.blocks, self.id, bytes, &current),
        }
    }

    /// As [`RawQueue::free`], but an error leaves the memory to the caller.
    ///
    /// # Safety
    /// As there.
    unsafe fn free_in_order(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let context = &self.context;
        let current = self.enter()?;
        if context.pool.is_some() {
            // SAFETY: with a pool, `allocate` allocates in stream order; the caller guarantees
            // that the memory is from it, is freed once, and that the queue waited for its uses
            // (see `# Safety`). The queue keeps its stream alive.
            return context
                .check(unsafe { context.api().free_in_order(base.as_ptr(), self.stream) });
        }
        let after = self.record_event(&current)?;
        context.blocks.give_back(base, bytes, self.id, Some(after));
        Ok(())
    }

    /// Records one of our own events after all work so far.
    fn record_event(&self, current: &Current<'_>) -> Result<Box<EventCell>> {
        let context = &self.context;
        let event = context.event(current)?;
        // SAFETY: the event is from this context; the queue keeps its stream alive, which is of
        // this context.
        match context.check(unsafe { current.api().record(event.raw(), self.stream) }) {
            Ok(()) => Ok(event),
            Err(e) => {
                context.recycle(event);
                Err(e)
            }
        }
    }
}

/// Refuses a stream of another context, and one that is being captured. Default streams belong to
/// whichever context is current.
///
/// # Safety
/// The stream is live, or stands for a default stream.
unsafe fn check_stream(context: &Context, current: &Current<'_>, stream: RawStream) -> Result<()> {
    if stream.is_default() {
        return Ok(());
    }
    // SAFETY: the caller guarantees that the stream is live (see `# Safety`); it is no default
    // stream.
    match context.check(unsafe { current.foreign(stream) })? {
        // SAFETY: the caller guarantees a live stream (see `# Safety`), which is no default stream.
        None => unsafe { check_capture(context, current, stream) },
        Some(why) => Err(Error::argument(format!("{}: {why}", context.id))),
    }
}

/// Refuses a stream that is being captured.
///
/// # Safety
/// The stream is live, and no default stream.
unsafe fn check_capture(context: &Context, current: &Current<'_>, stream: RawStream) -> Result<()> {
    // SAFETY: the caller guarantees a live stream (see `# Safety`).
    match context.check(unsafe { current.is_captured(stream) })? {
        false => Ok(()),
        true => Err(Error::argument(format!(
            "{}: the stream is being captured into a graph, which would run the work later, when its \
             memory may be gone; end the capture first",
            context.id
        ))),
    }
}

// SAFETY: the library aligns allocations to 64 bytes and more, and gives them to nobody else
// (contract of `Runtime`); blocks are used again only in the order of their stream or after an
// event; a stream runs its work in order, waits included, and an event completes after all work
// before it.
unsafe impl RawQueue for GpuQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        // Libraries differ: HIP returns success and null.
        if bytes == 0 {
            return Err(Error::argument("allocation of 0 bytes"));
        }
        match self.try_allocate(bytes) {
            // What is idle, or what pending work frees, may be enough.
            Err(Error::OutOfMemory { .. }) => {
                self.context.trim();
                self.try_allocate(bytes)
            }
            done => done,
        }
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees what `RawQueue::free` asks for.
        let freed = unsafe { self.free_in_order(base, bytes) };
        if freed.is_err() {
            if self.context.is_gone() {
                return Ok(());
            }
            self.context.give_up(base);
        }
        match freed {
            // A stream that is captured gives the free no order: it comes with the next wait for the device.
            Err(Error::InvalidArgument(_)) => Ok(()),
            freed => freed,
        }
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let current = self.enter()?;
        // SAFETY: the queue's stream is live; the caller of `RawQueue::copy` guarantees that all
        // memory is valid for its bytes and lives, unchanged, until the copies have completed.
        unsafe { copy::run(&self.context, self.stream, copies, &current) }
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let current = self.enter()?;
        // SAFETY: the caller of `RawQueue::fill` guarantees that `bytes` bytes at `dst` are valid
        // until the fill has completed; the queue's stream is live.
        let filled = unsafe { current.api().fill(dst.as_ptr(), byte, bytes, self.stream) };
        self.context.check(filled)
    }

    fn record(&self) -> Result<EventPtr> {
        let event = self.record_event(&self.enter()?)?;
        event
            .into_ptr()
            .ok_or_else(|| Error::argument("a null event"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let current = self.enter()?;
        // SAFETY: the caller of `RawQueue::wait` guarantees that the event is live; it may be of
        // any context. The queue's stream is live.
        let waited = unsafe { current.api().wait(self.stream, event_of(event), 0) };
        self.context.check(waited)
    }

    fn stream_handle(&self) -> Option<usize> {
        Some(self.stream.0)
    }

    fn as_any(&self) -> &dyn Any {
        &*self.vendor
    }
}

impl Drop for GpuQueue {
    fn drop(&mut self) {
        if self.is_own {
            self.context.drop_stream(self.stream);
        }
    }
}

impl fmt::Debug for GpuQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({} {:#x})", self.context.id, self.stream.0)
    }
}
