//! What a device shares with its streams, events and memory: its context, through which all calls go, with its errors; and events.

use std::any::Any;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use super::api::{
    Answer, Calls, Code, Failed, PoolProps, RELAXED, RELEASE_THRESHOLD, RawEvent, RawPool,
    RawStream, code,
};
use super::vendor::{Kind, Library, Vendor};
use crate::device::backend::device_error;
use crate::device::engine::Health;
use crate::device::{DeviceId, absent, lock};
use crate::error::{Error, Result};

/// A device's context. All calls go through [`Context::enter`], which makes it current and leaves the caller's current context, or
/// device, as it was.
pub(crate) struct Context<V: Vendor> {
    pub(crate) vendor: V,
    library: &'static V::Library,
    pub(crate) calls: &'static Calls,
    pub(crate) health: Health,
    /// Which memory the device allocates.
    pub(super) kind: Kind,
    /// Whether the host may read managed memory while the device works.
    pub(super) reads_managed: bool,
    /// `None` if the device has no pools, or other memory than its own.
    pub(super) pool: Option<RawPool>,
    /// Events of our own that nobody uses.
    events: Mutex<Vec<RawEvent>>,
}

impl<V: Vendor> Context<V> {
    /// Makes the context of a device, with a pool of its own if the device allocates its own memory and has pools.
    pub(super) fn new(id: DeviceId, vendor: V, pools: bool, reads_managed: bool) -> Result<Self> {
        let library = V::Library::get().map_err(|why| absent(id, why))?;
        let mut context = Self {
            library,
            calls: library.calls(),
            health: Health::new(id),
            kind: Kind::of(id.device_type),
            reads_managed,
            vendor,
            pool: None,
            events: Mutex::default(),
        };
        if context.kind == Kind::Device && pools {
            let pool = context.enter()?.new_pool();
            // That memory is short may have changed when the device is opened again.
            let is_short = pool.is_err_and(|failed| failed.code == code::OUT_OF_MEMORY);
            context.pool = match context.check(pool) {
                Err(e) if is_short || context.health.is_over() => return Err(e),
                // Some drivers refuse a pool although they say that there are pools.
                pool => pool.ok(),
            };
        }
        Ok(context)
    }

    /// The device's number in the library.
    pub(super) fn ordinal(&self) -> c_int {
        self.health.id().id as c_int // of the devices that there are, as `find` has checked
    }

    /// Makes the context current for as long as the returned guard lives. Foreign code must not run meanwhile: it would find the context
    /// current. What allocates memory for a program is told that it does ([`Device::with_memory`](crate::Device::with_memory)).
    ///
    /// # Errors
    /// The context itself was refused.
    pub(crate) fn enter(&self) -> Result<Current<'_, V>> {
        Current::new(self).map_err(|failed| self.error(failed, || true))
    }

    /// Makes a call in the context.
    pub(super) fn call<T>(&self, call: impl FnOnce(&Calls) -> Answer<T>) -> Result<T> {
        let current = self.enter()?;
        self.check(call(current.context.calls))
    }

    /// Makes an error of a call's failure. If this context is lost, the device is from now on.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|failed| self.error(failed, || self.is_lost()))
    }

    fn error(&self, Failed { call, code }: Failed, is_own: impl FnOnce() -> bool) -> Error {
        let text = self.library.text(code);
        let e = device_error(self.health.id(), call, code, text);
        match is_final::<V>(code) && is_own() {
            // SAFETY: the runtime says that this context is lost, which runs nothing any more.
            true => unsafe { self.health.lose(e) },
            false => e,
        }
    }

    /// Asks this context itself whether it is lost: the code may be that of another context, whose event or memory was named.
    fn is_lost(&self) -> bool {
        let asked = Current::new(self).and_then(|current| {
            // SAFETY: the legacy default stream always exists.
            unsafe { current.context.calls.query_stream(RawStream::LEGACY) }
        });
        asked.is_err_and(|failed| is_final::<V>(failed.code))
    }

    /// Refuses a stream of another context. Default streams belong to whichever context is current.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream.
    pub(super) unsafe fn check_stream(&self, stream: RawStream) -> Result<()> {
        if stream.is_default() {
            return Ok(());
        }
        // SAFETY: the caller guarantees that the stream is live (see `# Safety`); it is no default stream.
        match self.check(unsafe { self.enter()?.foreign(stream) })? {
            None => Ok(()),
            Some(why) => Err(Error::argument(format!("{}: {why}", self.health.id()))),
        }
    }
}

/// Whether a code says that a context, this one or another that the call named, is lost, or that the library has shut down: nothing that
/// was queued runs any more, and every later call fails. A library that was not initialised has shut down: a device was opened before.
fn is_final<V: Vendor>(code: Code) -> bool {
    matches!(code, code::DEINITIALIZED | code::NOT_INITIALIZED) || V::Library::is_lost(code)
}

impl<V: Vendor> Drop for Context<V> {
    fn drop(&mut self) {
        for event in std::mem::take(&mut *lock(&self.events)) {
            // SAFETY: the event is our own, and nothing has it any more.
            let _ = self.call(|calls| unsafe { calls.destroy_event(event) });
        }
        if let Some(pool) = self.pool {
            // SAFETY: created in `new`; nothing allocates from it any more.
            let _ = self.call(|calls| unsafe { calls.destroy_pool(pool) });
        }
    }
}

/// An event.
pub(crate) struct Event<V: Vendor> {
    pub(super) raw: RawEvent,
    context: Arc<Context<V>>,
    origin: Origin,
}

/// Whose an event is.
pub(crate) enum Origin {
    /// Our own, which is used again.
    Own,
    /// One that was given, and is destroyed.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code))]
    Given,
    /// Somebody else's, which this keeps alive.
    Kept(#[allow(dead_code)] Box<dyn Any + Send + Sync>),
}

impl<V: Vendor> Event<V> {
    pub(crate) fn new(context: &Arc<Context<V>>, raw: RawEvent, origin: Origin) -> Self {
        Self {
            raw,
            context: context.clone(),
            origin,
        }
    }

    /// Returns an event of our own, to be recorded.
    pub(super) fn own(context: &Arc<Context<V>>) -> Result<Self> {
        let (idle, mut raw) = (lock(&context.events).pop(), RawEvent(0));
        let flags = V::Library::EVENT_FLAGS;
        if idle.is_none() {
            // SAFETY: `raw` is valid for the write of a handle.
            context.call(|calls| unsafe { calls.create_event(&raw mut raw, flags) })?;
        }
        Ok(Self::new(context, idle.unwrap_or(raw), Origin::Own))
    }
}

impl<V: Vendor> Drop for Event<V> {
    fn drop(&mut self) {
        let (context, raw) = (&self.context, self.raw);
        match self.origin {
            Origin::Own => lock(&context.events).push(raw),
            // SAFETY: the event was given to this crate, and nothing uses it any more.
            Origin::Given => drop(context.call(|calls| unsafe { calls.destroy_event(raw) })),
            Origin::Kept(_) => {}
        }
    }
}

/// While it lives, the context is current on this thread, and the library's calls may be made. Not `Send`.
///
/// An entry costs 50 ns on an H200, next to 2 us and more of the calls that are made within it: so each function enters by itself.
pub(crate) struct Current<'a, V: Vendor> {
    pub(super) context: &'a Context<V>,
    /// What the library had before.
    before: V::Before,
    /// The thread's own capture mode, if it was exchanged.
    capture_mode: Option<c_int>,
    not_send: PhantomData<*const ()>,
}

impl<'a, V: Vendor> Current<'a, V> {
    fn new(context: &'a Context<V>) -> Answer<Self> {
        let before = context.vendor.enter()?;
        // Other libraries' stream captures stay as they are: the streams of this crate are not captured, and it touches no others'.
        let mut mode = RELAXED;
        // SAFETY: the mode is valid for the exchange of an int.
        let exchanged = unsafe { context.calls.exchange_capture_mode(&raw mut mode) };
        Ok(Self {
            context,
            before,
            capture_mode: exchanged.is_ok().then_some(mode),
            not_send: PhantomData,
        })
    }

    /// Creates a pool that keeps freed memory until it is trimmed. The device's default pool is shared with other libraries, and CUDA's
    /// frees its idle memory at every synchronisation.
    fn new_pool(&self) -> Answer<RawPool> {
        let (calls, mut pool, mut keep) = (self.context.calls, RawPool(0), u64::MAX);
        let props = PoolProps::of_device(self.context.ordinal());
        // SAFETY: `pool` is valid for the write of a handle, and `props` has the layout of both libraries' headers; the attribute is a
        // 64-bit number of bytes. A pool without it is destroyed before anything else has its handle.
        unsafe {
            calls.create_pool(&raw mut pool, &raw const props)?;
            let set = calls.set_pool(pool, RELEASE_THRESHOLD, (&raw mut keep).cast());
            if set.is_err() {
                let _ = calls.destroy_pool(pool);
            }
            set.map(|()| pool)
        }
    }
}

impl<V: Vendor> Drop for Current<'_, V> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.capture_mode {
            // SAFETY: the mode is valid for the exchange of an int.
            let _ = unsafe { self.context.calls.exchange_capture_mode(&raw mut mode) };
        }
        self.context.vendor.leave(self.before);
    }
}

impl<V: Vendor> Deref for Current<'_, V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.context.vendor
    }
}
