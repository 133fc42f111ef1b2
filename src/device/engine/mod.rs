//! The engine under all devices: what a device of whatever runtime needs, over a [`Runtime`] that a crate provides.
//!
//! A crate that adds a device implements [`Runtime`] for the calls of its runtime, and opens a device by [`Engine::open`]. The engine does the
//! rest, once for all:
//!
//! | what | how |
//! | --- | --- |
//! | memory | is kept for its next use, by the same stream at once and by others after an event; an allocation that finds too little waits for the device's work, frees what is idle and tries again |
//! | events | are found by what `sync_event` points to, so that a queue knows its own from those of other devices and of foreign producers |
//! | dropped queues | still count: the device waits for their work, and releases their streams after it |
//! | failures | the first one is remembered, and every later operation reports it |
//! | a `fork`, and the end of the process | nothing calls the runtime, takes a lock that another thread may have held, or frees |
//! | a program's own memory and streams | become buffers and queues ([`DeviceBuffer::wrap`](crate::DeviceBuffer::wrap), [`Engine::adopt`]) |
//!
//! Besides the thread of [`Device`] that runs releases, a device has one thread, and only while it opens gates
//! ([`Runtime::gate`]); one more waits for what still runs when the device is dropped, and ends with it.

mod event;
mod health;
pub(crate) mod pool;
mod process;
mod queue;
pub(crate) mod ranges;
mod reserved;
mod runtime;
mod shared;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::event::EngineEvent;
use self::health::Guarded;
pub use self::health::Health;
pub use self::process::Inside;
pub(crate) use self::process::{FORKED, Process};
use self::queue::EngineQueue;
pub use self::ranges::Memories;
pub use self::reserved::Reserved;
pub use self::runtime::Runtime;
use self::shared::{End, Shared};
pub(crate) use self::worker::Worker;
use crate::device::backend::{
    AddressClass, Backend, Capabilities, DevicePtr, EventPtr, PointerInfo, RawQueue, Relation,
    not_supported,
};
use crate::device::{Device, Queue, SyncEvent, lock};
use crate::error::{Error, Result};

/// The most bytes of host memory that a device takes for staging and for downloads. Beyond them, and where the runtime refuses it, ordinary
/// memory serves, which is slower.
const STAGING_LIMIT: usize = 2 << 30;

/// The backend of a device over a [`Runtime`].
pub struct Engine<R: Runtime> {
    shared: Arc<Shared<R>>,
    queue: Arc<EngineQueue<R>>,
    end: Arc<End<R>>,
}

impl<R: Runtime> Engine<R> {
    /// Makes a device, whose default queue has this stream. It keeps at most about `idle_bytes` bytes of freed memory for its next use.
    ///
    /// # Errors
    /// None of its own.
    ///
    /// # Safety
    /// The stream is one of `runtime`.
    pub unsafe fn open(runtime: R, stream: Arc<R::Stream>, idle_bytes: usize) -> Result<Device> {
        process::watch();
        let shared = Arc::new(Shared::new(runtime, idle_bytes));
        let end = Arc::new(End(shared.clone()));
        Device::new(Arc::new(Self {
            queue: Arc::new(EngineQueue::new(&end, stream, false)),
            end,
            shared,
        }))
    }

    /// Returns the engine of a device.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if it is not a device of this runtime.
    pub fn of(device: &Device) -> Result<&Self> {
        let found = device.backend().downcast_ref();
        found.ok_or_else(|| not_ours::<R>(device))
    }

    /// Returns the stream of a queue.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if its device is not one of this runtime.
    pub fn stream(queue: &Queue) -> Result<&Arc<R::Stream>> {
        let found = queue.raw().downcast_ref::<EngineQueue<R>>();
        let found = found.ok_or_else(|| not_ours::<R>(queue.device()))?;
        Ok(&found.entry.stream)
    }

    /// Makes a queue of a device of a stream of its runtime.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if it is not a device of this runtime.
    ///
    /// # Safety
    /// The stream can be given memory and events of this device: it is not one of another device or context.
    pub unsafe fn adopt(device: &Device, stream: Arc<R::Stream>) -> Result<Queue> {
        let engine = Self::of(device)?;
        let _inside = engine.shared.health.enter()?;
        let queue = EngineQueue::new(&engine.end, stream, true);
        Ok(Queue::new(device.clone(), Arc::new(queue)))
    }

    /// Returns the runtime.
    pub fn runtime(&self) -> &R {
        &self.shared.runtime
    }

    /// Returns whether a queue of this device has recorded an event, and has not released it.
    pub fn has_recorded(&self, event: EventPtr) -> bool {
        // In a child of the process another thread may have had the lock.
        self.shared.health.is_here()
            && EngineEvent::<R>::find(event).is_some_and(|event| event.is_of(&self.shared))
    }

    /// Makes an event of one that was given to the runtime.
    #[cfg_attr(not(any(feature = "cuda", feature = "rocm")), allow(dead_code))]
    pub(crate) fn give_event(&self, device: &Device, event: R::Event) -> Result<SyncEvent> {
        let _inside = self.shared.health.enter()?;
        let event = EngineEvent::publish(&self.shared, event)?;
        // SAFETY: the device's backend made the pointer for its own `release_event`, and nothing else has it.
        Ok(unsafe { SyncEvent::from_recorded(device.clone(), event) })
    }

    /// Takes memory that the engine has allocated, and that a buffer gave up ([`DeviceBuffer::into_raw`](crate::DeviceBuffer::into_raw)): it is
    /// the caller's. Returns `None` if the address is not the first one of such memory.
    ///
    /// # Safety
    /// The memory is not freed otherwise, and work that was given before and uses it ends, or is ordered, before the result is dropped.
    pub unsafe fn take(&self, base: DevicePtr) -> Option<R::Memory> {
        let _inside = self.shared.health.enter_even_if_failed().ok()?;
        let (memory, _) = self.shared.live().remove(base)?;
        Some(R::Memory::clone(&memory))
    }

    /// Adds memory of a program's, which the device frees as if it had allocated it. Returns its first address.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for memory without an address, for 0 bytes, and for memory of which the device knows some already.
    pub(crate) fn insert(&self, memory: R::Memory, bytes: usize) -> Result<DevicePtr> {
        let _inside = self.shared.health.enter()?;
        let (id, base) = (self.shared.health.id(), self.shared.runtime.base(&memory));
        if base.is_null() || bytes == 0 {
            return Err(Error::argument("memory without an address, or of 0 bytes"));
        }
        let piece = (Guarded::new(memory, &self.shared.health), bytes);
        match self.shared.live().insert_apart(base, bytes, piece) {
            true => Ok(base),
            false => Err(Error::argument(format!(
                "{bytes} bytes at {base:?} overlap memory that {id} knows already; wrap it once"
            ))),
        }
    }

    /// Returns what forgets memory, and drops it, when it is dropped.
    pub(crate) fn forget_later(&self, base: DevicePtr) -> impl Send + Sync + 'static {
        Wrapped(self.shared.clone(), base)
    }

    /// Frees memory once all work of the device has ended, because no stream's order is known in which it may be freed.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn give_up(&self, base: DevicePtr) {
        let memory = self.shared.live().remove(base).map(|piece| piece.0);
        lock(&self.shared.given_up).extend(memory);
    }

    /// Returns how many pieces of device memory, of host memory, and events are in use, for tests of leaks.
    #[doc(hidden)]
    pub fn in_use(&self) -> (usize, usize, usize) {
        let memories = self.shared.runtime.memories();
        let events = event::count(&self.shared);
        (memories.live.len(), memories.host.len(), events)
    }
}

fn not_ours<R: Runtime>(device: &Device) -> Error {
    let name = std::any::type_name::<R>().trim_end_matches('>');
    let name = name.rsplit("::").next().unwrap_or_default();
    let reason = format!("it is no device of the runtime {name}");
    not_supported(device.id(), "access to native handles", reason)
}

/// Keeps a program's memory.
struct Wrapped<R: Runtime>(Arc<Shared<R>>, DevicePtr);

impl<R: Runtime> Drop for Wrapped<R> {
    fn drop(&mut self) {
        if let Ok(_inside) = self.0.health.enter_even_if_failed() {
            drop(self.0.live().remove(self.1));
        }
    }
}

// SAFETY: what `Runtime` promises, and:
// - memory counts as the device's while it is in use;
// - an event has completed once the runtime says so and the device has not failed;
// - the device is over when its runtime has waited for all work, or has lost it.
unsafe impl<R: Runtime> Backend for Engine<R> {
    fn capabilities(&self) -> Capabilities {
        self.shared.runtime.capabilities()
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let _inside = self.shared.health.enter()?;
        let stream = self.shared.runtime.new_stream()?;
        Ok(Arc::new(EngineQueue::new(&self.end, stream, false)))
    }

    unsafe fn adopt_queue(&self, handle: usize) -> Result<Arc<dyn RawQueue>> {
        let _inside = self.shared.health.enter()?;
        // SAFETY: the caller guarantees a live stream (contract of `Backend::adopt_queue`).
        let stream = unsafe { self.shared.runtime.adopt_stream(handle) }?;
        Ok(Arc::new(EngineQueue::new(&self.end, stream, true)))
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        drop(self.shared.health.enter_even_if_failed()?);
        let (shared, id) = (&self.shared, self.shared.health.id());
        if let Some(event::Entry { device: other, .. }) = event::find(event) {
            let accepts = |event: Arc<EngineEvent<R>>| {
                event.is_of(shared) || shared.runtime.accepts_events_of(&event.shared.runtime)
            };
            return match EngineEvent::find(event).is_some_and(accepts) {
                true => Ok(()),
                false => Err(Error::argument(format!(
                    "the event is not of {id}, but of another device, {other}; import with a set of devices that has that device"
                ))),
            };
        }
        let words = event.as_ptr().cast::<usize>();
        if R::EVENT_WORDS == 0 || !words.is_aligned() {
            return Err(Error::argument(format!(
                "{words:p} is not the address of an event of {id}; wait for the producer's event before the import, and pass null"
            )));
        }
        // SAFETY: the pointer is aligned, so the caller guarantees that the event type's bytes may be read there (contract of
        // `check_event`), which has at least so many words.
        let is_null = (0..R::EVENT_WORDS).any(|i| unsafe { words.add(i).read() } == 0);
        match is_null {
            true => Err(Error::argument(format!("{id}: the event is a null handle"))),
            false => Ok(()),
        }
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let _inside = self.shared.health.enter()?;
        // SAFETY: the caller guarantees a live event of the device's type (contract of `query_event`).
        unsafe { EngineEvent::of(&self.shared, event) }?.is_done(&self.shared)
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let inside = self.shared.health.enter()?;
        // SAFETY: the caller guarantees a live event of the device's type (contract of `wait_event`).
        let event = unsafe { EngineEvent::of(&self.shared, event) }?;
        drop(inside);
        let waited = event.shared.runtime.wait_host(&event.event);
        event.check(&self.shared)?;
        waited
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if let Ok(_inside) = self.shared.health.enter_even_if_failed() {
            EngineEvent::<R>::release(event);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let shared = &self.shared;
        let Ok(_inside) = shared.health.enter_even_if_failed() else {
            return PointerInfo::new(AddressClass::Inaccessible, address.range(bytes));
        };
        let own = match shared.runtime.capabilities().host_readable {
            true => AddressClass::HostAccessible,
            false => AddressClass::Device,
        };
        let live = shared.live().classify(address, bytes, own);
        let host = AddressClass::HostAccessible;
        live.or_else(|| shared.host().classify(address, bytes, host))
            .unwrap_or_else(|| shared.runtime.classify(address, bytes))
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        if bytes == 0 {
            return Err(Error::argument("host allocation of 0 bytes"));
        }
        let shared = &self.shared;
        drop(shared.health.enter()?);
        let is_full =
            || shared.staging.load(Ordering::Relaxed).saturating_add(bytes) > STAGING_LIMIT;
        if is_full() && !lock(&shared.idle_staging).is_empty() {
            // It frees what is idle. After an error there is no more than before.
            let _ = shared.synchronize();
        }
        if is_full() {
            return Ok(None);
        }
        let _inside = shared.health.enter()?;
        let Ok(Some(memory)) = shared.runtime.allocate_host(bytes) else {
            return shared.health.check().map(|()| None);
        };
        shared.staging.fetch_add(bytes, Ordering::Relaxed);
        let base = shared.runtime.base(&memory);
        let piece = (Guarded::new(memory, &shared.health), bytes);
        shared.host().insert(base, bytes, piece);
        Ok(Some(base))
    }

    unsafe fn free_host(&self, address: DevicePtr, _bytes: usize) {
        let shared = &self.shared;
        let Ok(_inside) = shared.health.enter_even_if_failed() else {
            return;
        };
        if let Some(piece) = shared.host().remove(address) {
            lock(&shared.idle_staging).push(piece);
        }
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let shared = &self.shared;
        let Ok(_inside) = shared.health.enter() else {
            return false;
        };
        let own = || shared.host().classify(address, bytes, AddressClass::Host);
        !address.is_null()
            && (own().is_some_and(|own| own.class == AddressClass::Host)
                || shared.runtime.copies_directly_from(address, bytes))
    }

    fn relation(&self, other: &dyn Backend) -> Relation {
        let other = other.downcast_ref::<Self>();
        other.map_or_else(Relation::default, |other| {
            self.shared.runtime.relation(&other.shared.runtime)
        })
    }

    fn trim(&self) {
        self.shared.trim();
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.synchronize()
    }

    fn is_over(&self) -> bool {
        self.shared.health.is_over()
    }
}

impl<R: Runtime> fmt::Debug for Engine<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.runtime.fmt(f)
    }
}
