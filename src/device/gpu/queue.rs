//! Queues: streams, our own and those of others.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::api::{NOT_CAPTURED, RawStream, code};
use super::context::{Context, Current};
use super::kept::{EventCell, event_of};
use super::runtime::{Memory, PointerKind, Runtime, not_ours, to_ptr};
use crate::device::Queue;
use crate::device::backend::{CopyKind, CopyOp, DevicePtr, EventPtr, RawQueue};
use crate::device::parts::queue_number;
use crate::error::{Error, Result};

/// From this many copies on, the library is given the list in one call. On an H200, 100 copies of
/// 4 KiB to page-locked memory take 57 us so, and 176 us one by one.
const LIST: usize = 8;
/// A copy of this many bytes goes by itself: next to its own time that of a call is nothing.
const LARGE: usize = 1 << 20;

/// A queue of a GPU: a stream.
pub(crate) struct GpuQueue<R: Runtime> {
    context: Arc<Context<R>>,
    stream: RawStream,
    /// Whether the stream is our own, and not one that was given.
    is_own: bool,
    /// What keeps a stream that was given, or by what others use our own.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // it only lives there
    given: OnceLock<R::Given>,
    /// Whether others have the stream, and may capture it into a graph.
    lent: AtomicBool,
    /// Unlike a stream's handle, this is never used again.
    id: u64,
}

impl<R: Runtime> GpuQueue<R> {
    /// Makes a queue of a new stream, which does not wait for the legacy default stream.
    pub(super) fn new(context: Arc<Context<R>>) -> Result<Self> {
        const NON_BLOCKING: u32 = 1;
        let current = context.enter()?;
        let mut stream = RawStream::LEGACY;
        // SAFETY: `stream` is valid for the write of a handle.
        let made = unsafe { current.calls().create_stream(&raw mut stream, NON_BLOCKING) };
        context.check(made)?;
        drop(current);
        Ok(Self::with(context, stream, None))
    }

    fn with(context: Arc<Context<R>>, stream: RawStream, given: Option<R::Given>) -> Self {
        Self {
            context,
            stream,
            is_own: given.is_none(),
            lent: AtomicBool::new(given.is_some()),
            given: given.map_or_else(OnceLock::new, OnceLock::from),
            id: queue_number(),
        }
    }

    /// Returns a queue of a device of this vendor's.
    pub(crate) fn of(queue: &Queue) -> Result<&Self> {
        let raw = queue.raw().downcast_ref();
        raw.ok_or_else(|| not_ours::<R::Library>(queue.device()))
    }

    /// Makes a queue of a stream that was given, which `given` keeps alive.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a stream of another context, for a per-thread default
    /// stream, and for one that is being captured. The legacy default stream is not checked.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream, for as long as `given` lives.
    pub(crate) unsafe fn given(
        context: Arc<Context<R>>,
        stream: RawStream,
        given: R::Given,
    ) -> Result<Self> {
        if stream.is_per_thread() {
            let why =
                "a per-thread default stream is another one on each thread; use an ordinary stream";
            return Err(Error::argument(format!("{}: {why}", context.id)));
        }
        // SAFETY: the caller guarantees that the stream is live or a default stream (see
        // `# Safety`).
        unsafe { context.enter()?.check_stream(stream) }?;
        Ok(Self::with(context, stream, Some(given)))
    }

    /// Returns the stream, which others may capture from now on.
    pub(crate) fn lend(&self) -> RawStream {
        self.lent.store(true, Ordering::Relaxed);
        self.stream
    }

    /// Returns what keeps a stream that was given, or else what the first call has made for our own.
    #[cfg(feature = "cuda")]
    pub(crate) fn given_or(
        &self,
        make: impl FnOnce(RawStream) -> Result<R::Given>,
    ) -> Result<&R::Given> {
        if let Some(given) = self.given.get() {
            return Ok(given);
        }
        let made = make(self.lend())?;
        Ok(self.given.get_or_init(|| made))
    }

    /// Makes the context current, to give work to the stream. Refuses that while the stream is being
    /// captured.
    fn enter(&self) -> Result<Current<'_, R>> {
        let current = self.context.enter()?;
        if self.lent.load(Ordering::Relaxed) && !self.stream.is_default() {
            // SAFETY: the queue keeps its stream alive, which is no default stream.
            unsafe { current.check_capture(self.stream) }?;
        }
        Ok(current)
    }

    /// Allocates memory if there is enough now.
    fn try_allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let (current, mut address) = (self.enter()?, 0);
        let Some(pool) = self.context.pool else {
            return current.allocate_block(self.id, bytes);
        };
        let calls = current.calls();
        // SAFETY: `address` is valid for the write of an address. The queue keeps its stream and its
        // context, which has the pool.
        let made = unsafe { calls.allocate_in_order(&raw mut address, bytes, pool, self.stream) };
        // HIP 5.2 reports success for a pool that is full.
        let made = made.and_then(|()| match address {
            0 => calls.allocate_in_order.check(code::OUT_OF_MEMORY),
            _ => Ok(()),
        });
        self.context.check_memory(made, bytes)?;
        Ok(to_ptr(address))
    }

    /// As [`RawQueue::free`], but an error leaves the memory to the caller.
    ///
    /// # Safety
    /// As there.
    unsafe fn free_in_order(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let (context, current) = (&self.context, self.enter()?);
        if context.pool.is_some() {
            // SAFETY: with a pool, `allocate` allocates in stream order; the caller guarantees
            // that the memory is from it, is freed once, and that the queue waited for its uses
            // (see `# Safety`). The queue keeps its stream alive.
            let freed = unsafe { current.calls().free_in_order(base.as_ptr(), self.stream) };
            return context.check(freed);
        }
        let after = self.record_event(&current)?;
        context.heap.give_back(base, bytes, self.id, after);
        Ok(())
    }

    /// Records one of our own events after all work so far.
    fn record_event(&self, current: &Current<'_, R>) -> Result<Box<EventCell>> {
        let event = self.context.event(current)?;
        // SAFETY: the event is from this context; the queue keeps its stream alive, which is of
        // this context.
        let recorded = unsafe { current.calls().record(event.raw, self.stream) };
        match self.context.check(recorded) {
            Ok(()) => Ok(event),
            Err(e) => {
                self.context.recycle(event);
                Err(e)
            }
        }
    }

    /// Queues a copy, or a list of them.
    ///
    /// # Safety
    /// As [`RawQueue::copy`].
    unsafe fn queue_copies(&self, copies: &[CopyOp], current: &Current<'_, R>) -> Result<()> {
        let peers = current.peers(copies)?;
        let fits = |(copy, peer): &(&CopyOp, Option<usize>)| copy.bytes < LARGE && peer.is_none();
        let (mut small, mut alone): (Vec<_>, Vec<_>) = copies.iter().zip(peers).partition(fits);
        let mut is_queued = false;
        if small.len() >= LIST && !self.stream.is_default() {
            let list: Vec<&CopyOp> = small.iter().map(|(copy, _)| *copy).collect();
            // SAFETY: the caller guarantees that the memory is live until the copies have completed
            // (see `# Safety`); the queue keeps its stream alive, which is no default stream.
            let taken = unsafe { current.copy_list(&list, self.stream) };
            is_queued = taken.is_some();
            if taken == Some(Ok(())) {
                small.clear();
            }
        }
        // A list that the library does not take goes one by one. To queue a copy again changes nothing.
        alone.append(&mut small);
        let queued = alone.into_iter().try_for_each(|(copy, from)| {
            // SAFETY: the caller guarantees that the memory is live until the copies have completed
            // (see `# Safety`); `from` is what `peer_of` returned for the source; the queue keeps its
            // stream alive.
            let answer = unsafe { current.copy(copy, from, self.stream) };
            self.context.check(answer)?;
            is_queued = true;
            Ok(())
        });
        if queued.is_err() && is_queued {
            // The caller may free what half of the copies use, so they must be done.
            // SAFETY: the queue keeps its stream alive.
            let done = unsafe { current.calls().synchronize_stream(self.stream) };
            if self.context.check(done).is_err() {
                // An error of this is final: nothing runs any more.
                let _ = self.context.settle();
            }
        }
        queued
    }
}

impl<R: Runtime> Current<'_, R> {
    /// Refuses a stream of another context, and one that is being captured. Default streams belong to
    /// whichever context is current.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream.
    pub(super) unsafe fn check_stream(&self, stream: RawStream) -> Result<()> {
        if stream.is_default() {
            return Ok(());
        }
        // SAFETY: the caller guarantees that the stream is live (see `# Safety`); it is no default
        // stream.
        match self.context.check(unsafe { self.foreign(stream) })? {
            // SAFETY: the stream is live, as the caller guarantees, and no default stream (checked at the start).
            None => unsafe { self.check_capture(stream) },
            Some(why) => Err(Error::argument(format!("{}: {why}", self.context.id))),
        }
    }

    /// Refuses a stream that is being captured.
    ///
    /// # Safety
    /// The stream is live, and no default stream.
    unsafe fn check_capture(&self, stream: RawStream) -> Result<()> {
        let mut status = NOT_CAPTURED;
        // SAFETY: the caller guarantees a live stream (see `# Safety`); `status` is valid for the
        // write of an int.
        let asked = unsafe { self.calls().is_capturing(stream, &raw mut status) };
        self.context.check(asked)?;
        if status == NOT_CAPTURED {
            return Ok(());
        }
        Err(Error::argument(format!(
            "{}: the stream is being captured into a graph, which would run the work later, when its \
             memory may be gone; end the capture first",
            self.context.id
        )))
    }

    /// Looks up the source of each copy between devices: imported arrays may mix kinds of memory, so
    /// another context of this device must be named, and so must another device, since the library
    /// does not find memory of its pools by the address.
    fn peers(&self, copies: &[CopyOp]) -> Result<Vec<Option<usize>>> {
        let context = self.context;
        // Most sources lie in one allocation.
        let mut last: Option<(PointerKind, Range<usize>)> = None;
        let peer = |copy: &CopyOp| {
            if copy.kind != CopyKind::DeviceToDevice || context.memory != Memory::Device {
                return Ok(None);
            }
            let src = copy.src.address();
            if !last.as_ref().is_some_and(|(_, range)| range.contains(&src)) {
                last = context.check(self.allocation_of(copy.src, 1))?;
            }
            match &last {
                Some((kind, _)) => context.check(self.peer_of(*kind)),
                None => Ok(None),
            }
        };
        copies.iter().map(peer).collect()
    }
}

// SAFETY: the library aligns allocations to 64 bytes and more, and gives them to nobody else
// (contract of `Runtime`); blocks are used again only in the order of their stream or after an
// event; a stream runs its work in order, waits included, and an event completes after all work
// before it.
unsafe impl<R: Runtime> RawQueue for GpuQueue<R> {
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
            self.context.heap.give_up(base);
        }
        match freed {
            // A stream that is captured gives the free no order: it comes with the next wait for the device.
            Err(Error::InvalidArgument(_)) => Ok(()),
            freed => freed,
        }
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let is_bad = |copy: &CopyOp| copy.bytes == 0 || copy.src.is_null() || copy.dst.is_null();
        if copies.iter().any(is_bad) {
            return Err(Error::argument("an empty copy, or one from or to null"));
        }
        let current = self.enter()?;
        // SAFETY: the caller guarantees what `RawQueue::copy` asks for.
        unsafe { self.queue_copies(copies, &current) }
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let current = self.enter()?;
        // SAFETY: the caller of `RawQueue::fill` guarantees that `bytes` bytes at `dst` are valid
        // until the fill has completed; the queue's stream is live.
        let filled = unsafe { current.calls().fill(dst.as_ptr(), byte, bytes, self.stream) };
        self.context.check(filled)
    }

    fn record(&self) -> Result<EventPtr> {
        let event = self.record_event(&self.enter()?)?.into_ptr();
        event.ok_or_else(|| Error::argument("a null event"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let current = self.enter()?;
        // SAFETY: the caller of `RawQueue::wait` guarantees that the event is live; it may be of
        // any context. The queue's stream is live.
        let waited = unsafe { current.calls().wait(self.stream, event_of(event), 0) };
        self.context.check(waited)
    }

    fn stream_handle(&self) -> Option<usize> {
        Some(self.stream.0)
    }
}

impl<R: Runtime> Drop for GpuQueue<R> {
    fn drop(&mut self) {
        if self.is_own {
            self.context.drop_stream(self.stream);
        }
    }
}

impl<R: Runtime> fmt::Debug for GpuQueue<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({} {:#x})", self.context.id, self.stream.0)
    }
}
