//! Queues: streams, our own and those of others.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

use super::api::RawStream;
use super::context::{Context, EventCell, event_of};
use super::copy;
use super::entry::Current;
use super::jobs::Job;
use super::leftovers::{Leftover, Work};
use super::runtime::{Meaning, Memory};
use super::shared::Shared;
use crate::device::backend::{CopyOp, DevicePtr, EventPtr, RawQueue};
use crate::device::lock;
use crate::device::parts::queue_number;
use crate::error::{Error, Result};

/// A queue of a GPU: a stream.
pub(crate) struct GpuQueue {
    shared: Shared,
    stream: RawStream,
    order: Order,
    /// Unlike a stream's handle, this is never used again.
    id: u64,
    /// What [`RawQueue::as_any`] returns: the vendor's type of queue, which owns a stream that was
    /// given.
    vendor: Box<dyn Any + Send + Sync>,
    me: Weak<Self>,
}

enum Order {
    /// Our own stream.
    Own,
    /// A stream that was given.
    Given,
    /// The stream of whichever thread calls.
    PerThread(Mutex<Hop>),
}

/// Orders the work of a per-thread queue. The handle means another stream on each thread, so each
/// piece of work is followed by an event, for which the next thread's stream waits.
#[derive(Default)]
struct Hop {
    last: Option<(ThreadId, Box<EventCell>)>,
}

impl GpuQueue {
    /// Makes a queue of a new stream, which does not wait for the legacy default stream.
    pub(super) fn new(shared: Shared) -> Result<Arc<Self>> {
        let context = &shared.context;
        let stream = {
            let current = context.enter(context.api().create_stream.name)?;
            context.check(current.create_stream())?
        };
        let vendor = context.runtime().queue(stream);
        Ok(Self::with(shared, stream, Order::Own, vendor))
    }

    fn with(
        shared: Shared,
        stream: RawStream,
        order: Order,
        vendor: Box<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        let queue = Arc::new_cyclic(|me| Self {
            shared,
            stream,
            order,
            id: queue_number(),
            vendor,
            me: me.clone(),
        });
        let work = queue.me.clone();
        queue.shared.context.leftovers.add_queue(work);
        queue
    }

    /// Makes a queue of a stream that was given, which `vendor` keeps alive.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a stream of another context. Default streams are not
    /// checked.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream, for as long as `vendor` lives.
    pub(crate) unsafe fn given(
        shared: Shared,
        stream: RawStream,
        vendor: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>> {
        // SAFETY: the caller guarantees that the stream is live or a default stream (see
        // `# Safety`).
        unsafe { Self::check_stream(&shared.context, stream) }?;
        let order = match stream {
            RawStream::PER_THREAD => Order::PerThread(Mutex::default()),
            _ => Order::Given,
        };
        Ok(Self::with(shared, stream, order, vendor))
    }

    /// Refuses a stream of another context. The default streams belong to whichever context is
    /// current.
    ///
    /// # Safety
    /// `stream` is a live stream, or stands for a default stream.
    unsafe fn check_stream(context: &Context, stream: RawStream) -> Result<()> {
        if stream.is_default() {
            return Ok(());
        }
        let current = context.enter(context.api().stream_of)?;
        // SAFETY: the caller guarantees that the stream is live (see `# Safety`); default streams
        // were returned for above.
        match context.check(unsafe { current.foreign(stream) })? {
            None => Ok(()),
            Some(why) => Err(Error::argument(format!("{}: {why}", context.id))),
        }
    }

    /// Refuses a stream that is being captured.
    ///
    /// # Safety
    /// `stream` is a live stream, or stands for a default stream.
    unsafe fn check_capture(
        context: &Context,
        current: &Current<'_>,
        stream: RawStream,
        operation: &'static str,
    ) -> Result<()> {
        // SAFETY: the caller guarantees that the stream is live or a default stream (see
        // `# Safety`).
        if context.check(unsafe { current.is_captured(stream) })? {
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
        let operation = context.api().wait.name;
        // SAFETY: the caller guarantees that the stream is live or a default stream (see
        // `# Safety`).
        unsafe { Self::check_stream(context, stream) }?;
        let current = context.enter(operation)?;
        // SAFETY: the caller guarantees that the stream is live or a default stream (see
        // `# Safety`).
        unsafe { Self::check_capture(context, &current, stream, operation) }?;
        // SAFETY: the caller guarantees that the event is live (see `# Safety`). It may be of any
        // context.
        let raw = unsafe { event_of(event) };
        // SAFETY: the caller guarantees that stream and event are live (see `# Safety`).
        context.check(unsafe { current.wait(stream, raw) })
    }

    /// Runs `work` with the context current, in the queue's order.
    fn run<T>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&Current<'_>) -> Result<T>,
    ) -> Result<T> {
        let (context, stream) = (&self.shared.context, self.stream);
        let current = context.enter(operation)?;
        // Others may begin to capture a stream of theirs between two calls.
        let is_own = matches!(self.order, Order::Own);
        if !(is_own && current.is_uncaptured(stream)) {
            // SAFETY: the queue keeps its stream alive.
            unsafe { Self::check_capture(context, &current, stream, operation) }?;
            if is_own {
                current.keep_uncaptured(stream);
            }
        }
        let Order::PerThread(hop) = &self.order else {
            return work(&current);
        };
        let this = std::thread::current().id();
        let mut hop = lock(hop);
        match &hop.last {
            Some((thread, event)) if *thread != this => {
                // SAFETY: the queue keeps the event alive; the stream is this thread's default
                // stream.
                context.check(unsafe { current.wait(stream, event.raw()) })?;
            }
            _ => {}
        }
        // Made before the work, which an error afterwards would not undo.
        let event = match hop.last.take() {
            Some((_, event)) => event,
            None => context.event(&current)?,
        };
        let done = work(&current);
        // SAFETY: the event is from this context, and the stream is this thread's default stream in
        // it.
        let recorded = unsafe { current.record(event.raw(), stream) };
        if context.check(recorded).is_err() {
            // The event stands for earlier work only, so the work must end for the order to be
            // kept.
            // SAFETY: the stream is this thread's default stream.
            let ended = unsafe { current.synchronize_stream(stream) };
            if context.check(ended).is_err() {
                let _ = context.settle();
            }
        }
        hop.last = Some((this, event));
        done
    }

    /// Allocates memory if there is enough now.
    fn try_allocate(&self, bytes: usize) -> Result<DevicePtr> {
        let shared = &self.shared;
        let (context, blocks) = (&shared.context, &shared.blocks);
        if let Some(pool) = context.pool {
            return self.run(context.api().allocate_in_order.name, |current| {
                // SAFETY: the queue keeps its stream and its context, which has the pool.
                let answer = unsafe { current.allocate_in_order(bytes, pool, self.stream) };
                context.check_memory(answer, bytes)
            });
        }
        let operation = context.api().allocate(shared.memory);
        let reuse = |current: &Current<'_>| blocks.reuse(context, self.id, bytes, current);
        if let Some(idle) = self.run(operation, reuse)? {
            return Ok(idle);
        }
        if blocks.is_over() {
            shared.shrink();
        }
        self.run(operation, |current| {
            blocks.allocate(context, bytes, current)
        })
    }

    /// As [`RawQueue::free`], but an error leaves the memory to the caller.
    ///
    /// # Safety
    /// As there.
    unsafe fn free_in_order(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let (context, api) = (&self.shared.context, self.shared.context.api());
        if context.pool.is_some() {
            return self.run(api.free_in_order.name, |current| {
                // SAFETY: with a pool, `allocate` allocates in stream order; the caller guarantees
                // that the memory is from it, is freed once, and that the queue waited for its uses
                // (see `# Safety`). The queue keeps its stream alive.
                context.check(unsafe { current.free_in_order(base, self.stream) })
            });
        }
        let after = self.run(api.record.name, |current| self.record_event(current))?;
        self.shared.blocks.give_back(base, bytes, self.id, after);
        Ok(())
    }

    /// Whether an error only says that the stream is being captured.
    fn is_passing(&self, e: &Error) -> bool {
        match e {
            Error::NotSupported { .. } => true,
            Error::Device { code, .. } => self.shared.context.meaning(*code) == Meaning::Passing,
            _ => false,
        }
    }

    /// Records one of our own events after all work so far.
    fn record_event(&self, current: &Current<'_>) -> Result<Box<EventCell>> {
        let context = &self.shared.context;
        let event = context.event(current)?;
        // SAFETY: the event is from this context; the queue keeps its stream alive, which is of
        // this context.
        let recorded = unsafe { current.record(event.raw(), self.stream) };
        match context.check(recorded) {
            Ok(()) => Ok(event),
            Err(e) => {
                context.recycle(event);
                Err(e)
            }
        }
    }
}

impl Work for GpuQueue {
    fn id(&self) -> u64 {
        self.id
    }

    fn is_captured(&self, current: &Current<'_>) -> bool {
        // SAFETY: the queue keeps its stream alive.
        let captured = unsafe { current.is_captured(self.stream) };
        !matches!(self.shared.context.check(captured), Ok(false))
    }

    fn is_idle(&self, current: &Current<'_>) -> bool {
        let Order::PerThread(hop) = &self.order else {
            // SAFETY: the queue keeps its stream alive.
            return unsafe { current.is_idle(self.stream) } == Ok(true);
        };
        // A thread that holds the lock gives the queue work.
        let Ok(hop) = hop.try_lock() else {
            return false;
        };
        // SAFETY: the queue keeps the event alive.
        let done = |event: &EventCell| unsafe { current.query(event.raw()) } == Ok(true);
        hop.last.as_ref().is_none_or(|(_, event)| done(event))
    }

    fn wait(&self, current: &Current<'_>) -> bool {
        let waited = match &self.order {
            Order::PerThread(hop) => match &lock(hop).last {
                // SAFETY: the queue keeps the event alive.
                Some((_, event)) => unsafe { current.wait_event(event.raw()) },
                None => Ok(()),
            },
            // SAFETY: the queue keeps its stream alive.
            _ => unsafe { current.synchronize_stream(self.stream) },
        };
        self.shared.context.check(waited).is_ok()
    }

    unsafe fn try_free(&self, base: DevicePtr, bytes: usize) -> bool {
        // SAFETY: the caller guarantees what `RawQueue::free` asks for (see `# Safety`).
        match unsafe { self.free_in_order(base, bytes) } {
            Err(e) if self.is_passing(&e) => return false,
            Err(_) if !self.shared.context.is_shut_down() => self.shared.give_up(base),
            _ => {}
        }
        true
    }
}

// SAFETY: the library aligns allocations to 64 bytes and more, and gives them to nobody else
// (contract of `Runtime`); blocks are used again only in the order of their stream or after an
// event; a stream runs its work in order, waits included, and an event completes after all work
// before it. A per-thread stream is one queue by the events between its threads.
unsafe impl RawQueue for GpuQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        // Libraries differ: HIP returns success and null.
        if bytes == 0 {
            return Err(Error::argument("allocation of 0 bytes"));
        }
        let (context, api) = (&self.shared.context, self.shared.context.api());
        if isize::try_from(bytes).is_err() {
            return Err(context.out_of_memory(api.allocate(self.shared.memory), bytes));
        }
        context.retry_leftovers();
        // What is idle may be enough; if not, what pending work frees.
        let mut allocated = self.try_allocate(bytes);
        for wait in [false, true] {
            match allocated {
                Err(Error::OutOfMemory { .. }) if self.shared.make_room(wait) => {
                    allocated = self.try_allocate(bytes);
                }
                done => return done,
            }
        }
        allocated
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        let context = &self.shared.context;
        context.retry_leftovers();
        // SAFETY: the caller guarantees what `RawQueue::free` asks for; an error leaves the memory
        // to the arms below.
        let freed = unsafe { self.free_in_order(base, bytes) };
        match (freed, self.me.upgrade()) {
            (Ok(()), _) => Ok(()),
            // The library has taken all memory back.
            (Err(_), _) if context.is_shut_down() => Ok(()),
            // Waiting for the device instead would end other streams' captures as well.
            (Err(e), Some(queue)) if self.is_passing(&e) => {
                let leftover = Leftover::OfQueue { queue, base, bytes };
                context.leftovers.add(leftover);
                Ok(())
            }
            (Err(e), _) => {
                self.shared.give_up(base);
                Err(e)
            }
        }
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        // SAFETY: the queue's stream is live; the caller of `RawQueue::copy` guarantees that all
        // memory is valid for its bytes and lives, unchanged, until the copies have completed.
        let copy = |current: &Current<'_>| unsafe {
            copy::run(&self.shared, self.stream, copies, current)
        };
        self.run(self.shared.context.api().copy, copy)
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let context = &self.shared.context;
        self.run(context.api().fill.name, |current| {
            if self.shared.memory == Memory::Host {
                let job = Job::Fill { dst, byte, bytes };
                // SAFETY: the device's memory is page-locked host memory, and the caller of
                // `RawQueue::fill` guarantees that these bytes live until the fill has completed;
                // the queue's stream is live.
                return unsafe { context.queue_job(current, self.stream, job) };
            }
            // SAFETY: the caller of `RawQueue::fill` guarantees that `bytes` bytes at `dst` are
            // valid until the fill has completed; the queue's stream is live.
            context.check(unsafe { current.fill(dst, byte, bytes, self.stream) })
        })
    }

    fn is_one_stream(&self) -> bool {
        !matches!(self.order, Order::PerThread(..))
    }

    fn record(&self) -> Result<EventPtr> {
        let record = |current: &Current<'_>| self.record_event(current);
        let event = self.run(self.shared.context.api().record.name, record)?;
        event
            .into_ptr()
            .ok_or_else(|| Error::argument("a null event"))
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        let context = &self.shared.context;
        self.run(context.api().wait.name, |current| {
            // SAFETY: the caller of `RawQueue::wait` guarantees that the event is live; it may be
            // of any context. The queue's stream is live.
            context.check(unsafe { current.wait(self.stream, event_of(event)) })
        })
    }

    fn stream_handle(&self) -> Option<usize> {
        Some(self.stream.0.expose_provenance())
    }

    fn as_any(&self) -> &dyn Any {
        &*self.vendor
    }
}

impl Drop for GpuQueue {
    fn drop(&mut self) {
        let context = &self.shared.context;
        if context.is_forked() {
            return;
        }
        match &self.order {
            Order::Given => {}
            Order::PerThread(hop) => {
                if let Some((_, event)) = lock(hop).last.take() {
                    context.recycle(event);
                }
            }
            Order::Own => {
                let Ok(current) = context.enter_even_if_failed() else {
                    return;
                };
                context.leftovers.add_stream(self.stream, &current);
            }
        }
    }
}

impl fmt::Debug for GpuQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.shared.context.id;
        write!(f, "Queue({id} {:p})", self.stream.0)
    }
}
