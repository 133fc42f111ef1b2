//! What a device shares with its queues: its context, through which all its work goes, its errors,
//! its events, and the streams of queues that were dropped.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Mutex;

use super::api::{
    Answer, Calls, Failed, PoolProps, RELAXED, RELEASE_THRESHOLD, RawEvent, RawPool, RawStream,
    code, is_done,
};
use super::kept::EventCell;
use super::kept::Heap;
use super::runtime::{Library, Memory, Runtime, is_shut_down};
use crate::device::backend::device_error;
use crate::device::parts::Failure;
use crate::device::{DeviceId, lock};
use crate::error::{Error, Result};

/// A device's context. All calls go through [`Context::enter`], which makes it current and leaves the
/// caller's current context, or device, as it was.
pub(crate) struct Context<R: Runtime> {
    pub(crate) runtime: R,
    pub(crate) id: DeviceId,
    /// Which memory the device allocates.
    pub(super) memory: Memory,
    /// Whether the host may read managed memory while the device works.
    pub(super) reads_managed: bool,
    /// `None` if the device has no pools, or other memory than its own.
    pub(super) pool: Option<RawPool>,
    /// What the device allocates without a pool, and page-locked memory for staging.
    pub(crate) heap: Heap,
    pub(super) failure: Failure,
    /// Our own streams whose queues were dropped while they had work: HIP would wait for it to
    /// destroy them.
    dropped: Mutex<Vec<RawStream>>,
    /// Boxed: `sync_event` holds a cell's address.
    #[allow(clippy::vec_box)]
    events: Mutex<Vec<Box<EventCell>>>,
}

impl<R: Runtime> Context<R> {
    /// Makes the context of a device, with a pool of its own if the device allocates its own memory
    /// and has pools.
    pub(super) fn new(id: DeviceId, runtime: R) -> Result<Self> {
        let mut context = Self {
            id,
            memory: Memory::of(id.device_type),
            reads_managed: runtime.reads_managed(),
            runtime,
            pool: None,
            heap: Heap::default(),
            failure: Failure::default(),
            dropped: Mutex::default(),
            events: Mutex::default(),
        };
        if context.memory == Memory::Device && context.runtime.has_pools() {
            let pool = context.enter()?.new_pool();
            // That memory is short may have changed when the device is opened again.
            let is_short = pool.is_err_and(|failed| failed.code == code::OUT_OF_MEMORY);
            context.pool = match context.check(pool) {
                Err(e) if is_short || context.has_failed() => return Err(e),
                // Some drivers refuse a pool although they say that there are pools: blocks of
                // memory are used again without one.
                pool => pool.ok(),
            };
        }
        Ok(context)
    }

    pub(crate) fn calls(&self) -> &'static Calls {
        self.runtime.library().calls()
    }

    /// Makes the context current for as long as the returned guard lives. Foreign code must not run
    /// meanwhile: it would find the context current.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn enter(&self) -> Result<Current<'_, R>> {
        self.failure.check()?;
        self.enter_even_if_failed()
    }

    /// As [`enter`](Self::enter), to free what a failed device still has.
    pub(super) fn enter_even_if_failed(&self) -> Result<Current<'_, R>> {
        self.check_process()?;
        // The context itself was refused.
        Current::new(self).map_err(|failed| self.error(failed, || true))
    }

    /// Makes an error of a call's failure. If the context is lost, it has failed from now on.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|failed| self.error(failed, || self.is_lost()))
    }

    /// As [`check`](Self::check), for a call that allocates `bytes` bytes.
    pub(super) fn check_memory<T>(&self, answer: Answer<T>, bytes: usize) -> Result<T> {
        match answer {
            // Some drivers call a size invalid that no device has. All else about the call is in
            // order, so nothing but the size can be.
            Err(Failed {
                call,
                code: code::OUT_OF_MEMORY | code::INVALID_VALUE,
            }) => Err(self.out_of_memory(call, bytes)),
            answer => self.check(answer),
        }
    }

    pub(super) fn out_of_memory(&self, operation: &'static str, bytes: usize) -> Error {
        Error::OutOfMemory {
            device: self.id,
            operation,
            bytes,
        }
    }

    /// Makes an error of a call's failure. If the code is final, and that of this context, it has failed.
    fn error(&self, Failed { call, code }: Failed, is_own: impl FnOnce() -> bool) -> Error {
        let e = device_error(self.id, call, code, self.runtime.library().text(code));
        match self.is_final(code) && is_own() {
            true => self.fail(e),
            false => e,
        }
    }

    /// Whether a code says that a context, this one or another that the call named, is lost: nothing
    /// that was queued runs any more, and every later call fails.
    fn is_final(&self, code: i32) -> bool {
        is_shut_down(code) || R::Library::is_lost(code)
    }

    /// Asks this context itself whether it is lost: the code may be that of another context, whose
    /// event or memory was named.
    fn is_lost(&self) -> bool {
        match self.enter_even_if_failed() {
            // SAFETY: the legacy default stream always exists.
            Ok(current) => unsafe { current.calls().query_stream(RawStream::LEGACY) }
                .is_err_and(|failed| self.is_final(failed.code)),
            Err(_) => self.has_failed(),
        }
    }

    /// Marks the context as failed, and returns the error with which it has failed first.
    pub(super) fn fail(&self, e: Error) -> Error {
        self.failure.set(e.clone());
        self.failure.check().err().unwrap_or(e)
    }

    /// Whether nothing works any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_set() || self.is_forked()
    }

    /// Whether the library has shut down, at the end of the process, or is the parent process's: there
    /// is nothing to free or to wait for then.
    pub(super) fn is_gone(&self) -> bool {
        let gone = |e| matches!(e, Error::Device { code, .. } if is_shut_down(code));
        self.is_forked() || self.failure.check().is_err_and(gone)
    }

    /// Whether this process is a child of the one that opened the device. It has nothing to free
    /// then, and must take no lock that a thread of the parent may have held.
    pub(super) fn is_forked(&self) -> bool {
        !self.runtime.library().process().is_this()
    }

    /// Refuses to work in a child of the process that opened the device.
    pub(super) fn check_process(&self) -> Result<()> {
        let process = self.runtime.library().process();
        process.check(self.id, code::NOT_INITIALIZED)
    }

    /// Returns an event to be recorded.
    pub(super) fn event(&self, current: &Current<'_, R>) -> Result<Box<EventCell>> {
        let idle = lock(&self.events).pop();
        if let Some(cell) = idle {
            return Ok(cell);
        }
        let mut raw = RawEvent(0);
        // SAFETY: `raw` is valid for the write of a handle.
        self.check(unsafe {
            current
                .calls()
                .create_event(&raw mut raw, R::Library::EVENT_FLAGS)
        })?;
        Ok(EventCell::own(raw))
    }

    /// Keeps an event of our own for reuse, and drops or destroys one that was given.
    pub(super) fn recycle(&self, cell: Box<EventCell>) {
        if cell.is_own && !self.is_forked() {
            lock(&self.events).push(cell);
        } else if !cell.is_own && cell.owner.is_none() {
            if let Ok(current) = self.enter_even_if_failed() {
                // SAFETY: the event was given to this crate, and nothing uses it any more.
                let _ = unsafe { current.calls().destroy_event(cell.raw) };
            }
        }
    }

    /// Whether the work before one of our own events has completed.
    pub(super) fn has_completed(&self, event: &EventCell) -> bool {
        // SAFETY: the cell owns its event, which is live while the cell is.
        unsafe { self.calls().query_event(event.raw) }.is_ok()
    }

    /// Destroys a stream of our own once it has no work.
    pub(super) fn drop_stream(&self, stream: RawStream) {
        if let Ok(_current) = self.enter_even_if_failed() {
            lock(&self.dropped).push(stream);
            self.sweep(false);
        }
    }

    /// Destroys streams whose queues were dropped and that have no work any more, or all. The context
    /// is current.
    pub(super) fn sweep(&self, all: bool) {
        lock(&self.dropped).retain(|stream| {
            // SAFETY: the stream was created by its queue, whose drop handed it over.
            let query = || is_done(unsafe { self.calls().query_stream(*stream) });
            let is_busy = !all && query() == Ok(false);
            if !is_busy {
                // SAFETY: the stream was created by its queue, whose drop handed it over: nothing
                // uses it any more.
                let _ = unsafe { self.calls().destroy_stream(*stream) };
            }
            is_busy
        });
    }

    /// Whether nothing is left to be freed that may have to be waited for.
    pub(super) fn is_clear(&self) -> bool {
        self.heap.is_empty() && lock(&self.dropped).is_empty()
    }
}

impl<R: Runtime> Drop for Context<R> {
    fn drop(&mut self) {
        let Ok(_current) = self.enter_even_if_failed() else {
            return;
        };
        self.sweep(true);
        for cell in lock(&self.events).drain(..) {
            // SAFETY: the event is from `event`, and no other cell has it.
            let _ = unsafe { self.calls().destroy_event(cell.raw) };
        }
        if let Some(pool) = self.pool {
            // SAFETY: created in `new`; nothing allocates from it any more.
            let _ = unsafe { self.calls().destroy_pool(pool) };
        }
    }
}

impl<R: Runtime> fmt::Debug for Context<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({} {:?})", self.id, self.runtime)
    }
}

/// While it lives, the context is current on this thread, and the library's calls may be made. Not
/// `Send`.
///
/// An entry costs 50 ns on an H200, next to 2 us and more of the calls that are made within it: so
/// each function enters by itself.
pub(crate) struct Current<'a, R: Runtime> {
    pub(super) context: &'a Context<R>,
    /// What the library had before.
    before: R::Before,
    /// The thread's own capture mode, if it was exchanged.
    capture_mode: Option<c_int>,
    not_send: PhantomData<*const ()>,
}

impl<'a, R: Runtime> Current<'a, R> {
    fn new(context: &'a Context<R>) -> Answer<Self> {
        let before = context.runtime.enter()?;
        // Other libraries' stream captures stay as they are: the streams of this crate are not
        // captured, and it touches no others'.
        let mut mode = RELAXED;
        // SAFETY: the mode is valid for the exchange of an int.
        let exchanged = unsafe { context.calls().exchange_capture_mode(&raw mut mode) };
        Ok(Self {
            context,
            before,
            capture_mode: exchanged.is_ok().then_some(mode),
            not_send: PhantomData,
        })
    }

    pub(super) fn calls(&self) -> &'static Calls {
        self.context.calls()
    }

    /// Creates a pool that keeps freed memory until it is trimmed. The device's default pool is
    /// shared with other libraries, and CUDA's frees its idle memory at every synchronisation.
    fn new_pool(&self) -> Answer<RawPool> {
        let (calls, mut pool, mut keep) = (self.calls(), RawPool(0), u64::MAX);
        let props = PoolProps::of_device(self.ordinal());
        // SAFETY: `pool` is valid for the write of a handle, and `props` has the layout of both
        // libraries' headers; the attribute is a 64-bit number of bytes. A pool without it is
        // destroyed before anything else has its handle.
        unsafe {
            calls.create_pool(&raw mut pool, &raw const props)?;
            let set = calls.set_pool(pool, RELEASE_THRESHOLD, (&raw mut keep).cast());
            if set.is_err() {
                let _ = calls.destroy_pool(pool);
            }
            set?;
        }
        Ok(pool)
    }
}

impl<R: Runtime> Drop for Current<'_, R> {
    fn drop(&mut self) {
        if let Some(mut mode) = self.capture_mode {
            // SAFETY: the mode is valid for the exchange of an int.
            let _ = unsafe { self.calls().exchange_capture_mode(&raw mut mode) };
        }
        self.context.runtime.leave(self.before);
    }
}

impl<R: Runtime> Deref for Current<'_, R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.context.runtime
    }
}
