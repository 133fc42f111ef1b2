//! [`Gpu`], the provider of a device, with its streams.

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::api::{Answer, Calls, NOT_CAPTURED, RawEvent, RawStream, code};
use super::context::{Context, Current, Event, Origin};
use super::memory::Block;
use super::vendor::{Kind, Library, PointerKind, Vendor, to_ptr};
use crate::device::backend::{
    AddressClass, Capabilities, CopyOp, DevicePtr, EventPtr, PointerInfo, Relation,
};
use crate::device::engine::{Engine, Health, Memories, Runtime};
use crate::device::{Device, DeviceId};
use crate::error::{Error, Result};

/// Most bytes of freed memory that a device without a pool keeps.
const IDLE_BYTES: usize = 256 << 20;

/// A GPU, driven through its vendor's library.
pub(crate) struct Gpu<V: Vendor> {
    pub(crate) context: Arc<Context<V>>,
    memories: Memories<Arc<Block<V>>>,
}

/// A stream.
pub(crate) struct Stream<V: Vendor> {
    context: Arc<Context<V>>,
    raw: RawStream,
    /// Whether the stream is our own, and not one that was given.
    is_own: bool,
    /// What keeps a stream that was given, or by what others use our own.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // it only lives there
    given: OnceLock<V::Given>,
    /// Whether others have the stream, and may capture it into a graph.
    lent: AtomicBool,
}

impl<V: Vendor> Stream<V> {
    fn new(
        context: &Arc<Context<V>>,
        raw: RawStream,
        is_own: bool,
        given: OnceLock<V::Given>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            raw,
            is_own,
            given,
            lent: AtomicBool::new(!is_own),
        })
    }

    /// Adopts a stream that was given, which `given` keeps alive.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a stream of another context, for a per-thread default stream, and for one that is being
    /// captured. The legacy default stream is not checked.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream, for as long as `given` lives.
    pub(crate) unsafe fn given(
        context: &Arc<Context<V>>,
        raw: RawStream,
        given: V::Given,
    ) -> Result<Arc<Self>> {
        let _inside = context.health.enter()?;
        if raw == RawStream::PER_THREAD {
            let why =
                "a per-thread default stream is another one on each thread; use an ordinary stream";
            return Err(Error::argument(format!("{}: {why}", context.health.id())));
        }
        // SAFETY: the caller guarantees that the stream is live or a default stream (see `# Safety`).
        unsafe { context.check_stream(raw) }?;
        let stream = Self::new(context, raw, false, OnceLock::from(given));
        stream.enter()?;
        Ok(stream)
    }

    /// Returns the stream, which others may capture from now on.
    pub(crate) fn lend(&self) -> RawStream {
        self.lent.store(true, Ordering::Relaxed);
        self.raw
    }

    /// Returns what keeps a stream that was given, or else what the first call has made for our own.
    #[cfg(feature = "cuda")]
    pub(crate) fn given_or(
        &self,
        make: impl FnOnce(RawStream) -> Result<V::Given>,
    ) -> Result<&V::Given> {
        if let Some(given) = self.given.get() {
            return Ok(given);
        }
        let made = make(self.lend())?;
        Ok(self.given.get_or_init(|| made))
    }

    /// Makes the context current, to give work to the stream. Refuses that while the stream is being captured.
    fn enter(&self) -> Result<Current<'_, V>> {
        self.context.health.check()?;
        let current = self.context.enter()?;
        let mut status = NOT_CAPTURED;
        if self.lent.load(Ordering::Relaxed) && !self.raw.is_default() {
            // SAFETY: the stream is live while this is, and no default stream; `status` is valid for the write of an int.
            let asked = unsafe {
                current
                    .context
                    .calls
                    .is_capturing(self.raw, &raw mut status)
            };
            self.context.check(asked)?;
        }
        match status {
            NOT_CAPTURED => Ok(current),
            _ => Err(Error::argument(format!(
                "{}: the stream is being captured into a graph, which would run the work later, when its memory may be gone; end the \
                 capture first",
                self.context.health.id()
            ))),
        }
    }

    /// Makes a call that gives work to the stream.
    fn call(&self, call: impl FnOnce(&Calls) -> Answer) -> Result<()> {
        let current = self.enter()?;
        self.context.check(call(current.context.calls))
    }
}

impl<V: Vendor> Drop for Stream<V> {
    fn drop(&mut self) {
        if self.is_own {
            let raw = self.raw;
            // SAFETY: created in `new`; nothing uses it any more.
            let _ = self
                .context
                .call(|calls| unsafe { calls.destroy_stream(raw) });
        }
    }
}

impl<V: Vendor> Gpu<V> {
    /// Opens a device, with pools or without, whose managed memory the host may read while it works or may not.
    pub(crate) fn open(
        id: DeviceId,
        vendor: V,
        pools: bool,
        reads_managed: bool,
    ) -> Result<Device> {
        let context = Arc::new(Context::new(id, vendor, pools, reads_managed)?);
        let memories = Memories::default();
        let this = Self { context, memories };
        let stream = this.new_stream()?;
        // SAFETY: the stream was made of this context.
        unsafe { Engine::open(this, stream, IDLE_BYTES) }
    }
}

// SAFETY:
// - the library aligns allocations to 64 bytes and more, and gives them to nobody else (contract of `Vendor`); page-locked memory is host
//   memory, and so is managed memory where the host and the device may use it at once. Neither is written when it is allocated: both
//   vendors' systems hand pages out zeroed;
// - a stream runs its work in order, waits included, and an event completes after all work before it, which is visible to the host then;
// - a wait for the context waits for all of its streams, and a lost context runs nothing more;
// - the library vouches for the first and the last byte of what `classify` accepts, or for the range that it returns; memory that it does
//   not know is `Host`, which the caller of an import guarantees; where the library cannot tell, it is `Inaccessible`.
unsafe impl<V: Vendor> Runtime for Gpu<V> {
    type Stream = Stream<V>;
    type Event = Event<V>;
    type Memory = Arc<Block<V>>;

    fn health(&self) -> &Health {
        &self.context.health
    }

    fn memories(&self) -> &Memories<Self::Memory> {
        &self.memories
    }

    fn capabilities(&self) -> Capabilities {
        let (context, health) = (&self.context, &self.context.health);
        let mut this = Capabilities::new(health.id());
        // Where managed memory is not concurrent, the host must not touch any of it while the device works.
        this.host_readable = match context.kind {
            Kind::Managed => context.reads_managed,
            kind => kind == Kind::Host,
        };
        this
    }

    fn new_stream(&self) -> Result<Arc<Self::Stream>> {
        // It does not wait for the legacy default stream.
        const NON_BLOCKING: u32 = 1;
        let mut raw = RawStream::LEGACY;
        // SAFETY: `raw` is valid for the write of a handle.
        let made = |calls: &Calls| unsafe { calls.create_stream(&raw mut raw, NON_BLOCKING) };
        self.context.call(made)?;
        Ok(Stream::new(&self.context, raw, true, OnceLock::new()))
    }

    unsafe fn adopt_stream(&self, handle: usize) -> Result<Arc<Self::Stream>> {
        let raw = RawStream(handle);
        // SAFETY: the caller guarantees that the stream is live, or a default stream (contract of `adopt_stream`).
        unsafe { self.context.check_stream(raw) }?;
        Ok(Stream::new(&self.context, raw, false, OnceLock::new()))
    }

    fn stream_handle(&self, stream: &Self::Stream) -> Option<usize> {
        Some(stream.raw.0)
    }

    fn allocate(&self, bytes: usize, stream: &Self::Stream) -> Result<Self::Memory> {
        // SAFETY: the stream is live while it is borrowed.
        unsafe {
            Block::allocate(
                &self.context,
                stream.enter()?,
                self.context.kind,
                bytes,
                stream.raw,
            )
        }
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<Self::Memory>> {
        // Page-locked memory needs no staging.
        if self.context.kind == Kind::Host || isize::try_from(bytes).is_err() {
            return Ok(None);
        }
        let (current, stream) = (self.context.enter()?, RawStream::LEGACY);
        // SAFETY: the legacy default stream always exists.
        unsafe { Block::allocate(&self.context, current, Kind::Host, bytes, stream) }.map(Some)
    }

    fn base(&self, memory: &Self::Memory) -> DevicePtr {
        to_ptr(memory.address)
    }

    unsafe fn free_in_order(&self, memory: &Self::Memory, stream: &Self::Stream) -> Result<bool> {
        if self.context.pool.is_none() {
            return Ok(false);
        }
        let ptr = to_ptr(memory.address).as_ptr();
        // SAFETY: the memory is the device's own, which the library frees in any stream's order; it is freed once, since the drop does
        // nothing after `let_go`. The stream is live while it is borrowed.
        stream.call(|calls| unsafe { calls.free_in_order(ptr, stream.raw) })?;
        memory.let_go();
        Ok(true)
    }

    fn frees_wait(&self) -> bool {
        true
    }

    fn trim(&self) {
        if let Some(pool) = self.context.pool {
            // SAFETY: the context has the pool.
            let _ = self.context.call(|calls| unsafe { calls.trim(pool, 0) });
        }
    }

    unsafe fn copy(
        &self,
        stream: &Self::Stream,
        copies: &[CopyOp],
        under_way: &mut bool,
    ) -> Result<()> {
        let current = stream.enter()?;
        // SAFETY: the caller guarantees what `RawQueue::copy` asks for; the stream is live while it is borrowed.
        unsafe { current.copy_all(copies, stream.raw, under_way) }
    }

    unsafe fn fill(
        &self,
        stream: &Self::Stream,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Result<()> {
        let dst = dst.as_ptr();
        // SAFETY: the caller guarantees that `bytes` bytes at `dst` are valid until the fill has completed (contract of `RawQueue::fill`);
        // the stream is live while it is borrowed.
        stream.call(|calls| unsafe { calls.fill(dst, byte, bytes, stream.raw) })
    }

    fn record(&self, stream: &Self::Stream) -> Result<Self::Event> {
        let event = Event::own(&self.context)?;
        // SAFETY: event and stream are live, and of this context.
        stream.call(|calls| unsafe { calls.record(event.raw, stream.raw) })?;
        Ok(event)
    }

    fn pointer(&self, event: &Self::Event) -> *mut c_void {
        std::ptr::from_ref(&event.raw).cast_mut().cast()
    }

    unsafe fn foreign_event(&self, event: EventPtr) -> Result<Self::Event> {
        // SAFETY: the caller guarantees that the pointer is that of an event's handle, which is a number here.
        let raw = unsafe { event.as_ptr().cast::<RawEvent>().read() };
        Ok(Event::new(&self.context, raw, Origin::Kept(Box::new(()))))
    }

    fn is_done(&self, event: &Self::Event) -> Result<bool> {
        let (context, raw) = (&self.context, event.raw);
        // SAFETY: the event is live while it is borrowed.
        context.call(|calls| match unsafe { calls.query_event(raw) } {
            Err(failed) if failed.code == code::NOT_READY => Ok(false),
            answer => answer.map(|()| true),
        })
    }

    /// Asks again and again, which returns soonest.
    fn wait_host(&self, event: &Self::Event) -> Result<()> {
        // The end of the process does not wait for this: the library ends the call then.
        drop(self.context.health.enter()?);
        let (context, raw) = (&self.context, event.raw);
        // SAFETY: the event is live while it is borrowed.
        context.call(|calls| unsafe { calls.wait_event(raw) })
    }

    /// A stream can wait for events of any device and context of the library.
    fn wait(&self, stream: &Self::Stream, event: &Self::Event, _is_own: bool) -> Result<bool> {
        // SAFETY: stream and event are live while they are borrowed.
        stream.call(|calls| unsafe { calls.wait(stream.raw, event.raw, 0) })?;
        Ok(true)
    }

    fn synchronize(&self, _streams: &[Arc<Self::Stream>]) -> Result<()> {
        // As for `wait_host`.
        drop(self.context.health.enter_even_if_failed()?);
        // SAFETY: the call has no arguments, and the context is current.
        self.context.call(|calls| unsafe { calls.synchronize() })
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        // Memory that the library cannot identify must not be touched.
        let unknown = || PointerInfo::new(AddressClass::Inaccessible, address.range(bytes));
        let known = || {
            let current = self.context.enter()?;
            let found = self.context.check(current.allocation_of(address, bytes))?;
            Ok::<_, Error>(found.map(|(kind, range)| current.judge(kind, range)))
        };
        match known() {
            Ok(known) => known.unwrap_or_else(unknown),
            Err(e) => unknown().with_reason(e.to_string()),
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        // The library itself copies to page-locked memory with the host.
        if self.context.kind == Kind::Host {
            return true;
        }
        // A wrong answer costs only time: the library stages what is not page-locked by itself.
        let current = self.context.enter().ok();
        let found = current.and_then(|current| current.look_up(address.address()).ok());
        let fits = |range: Range<usize>| address.range(bytes).end <= range.end;
        found.is_some_and(|(kind, range)| {
            matches!(kind, PointerKind::Host { .. }) && range.is_none_or(fits)
        })
    }

    /// The library knows events of all its devices and contexts.
    fn accepts_events_of(&self, _: &Self) -> bool {
        true
    }

    fn relation(&self, other: &Self) -> Relation {
        let is_same = other.context.ordinal() == self.context.ordinal();
        Relation {
            // Devices of one library copy from each other without the host. Host memory takes copies only from its own device: no call
            // there names another's context.
            copies: self.context.kind == Kind::Device || is_same,
            waits: true,
        }
    }
}

impl<V: Vendor> fmt::Debug for Gpu<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Context { vendor, health, .. } = &*self.context;
        write!(f, "{}({} {vendor:?})", V::Library::VENDOR, health.id())
    }
}
