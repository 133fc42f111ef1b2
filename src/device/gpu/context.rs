//! A context, through which all work of a device goes: its events, its pool and its errors.

use std::any::Any;
use std::ffi::c_int;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::api::{Answer, Api, Code, Failed, RawEvent, RawPool, RawStream, code};
use super::entry::{Current, Scope};
use super::jobs::{self, FailureCode, Job};
use super::leftovers::{Leftover, Leftovers};
use super::runtime::{Meaning, Runtime};
use crate::device::backend::{EventPtr, device_error};
use crate::device::parts::FINAL;
use crate::device::{DeviceId, lock};
use crate::error::{Error, Result};

/// More idle events than this are destroyed.
const IDLE_EVENTS: usize = 4096;
/// A context whose calls fail for this long is taken for lost.
const LOST: Duration = Duration::from_secs(5);

/// A device's context. All calls go through [`Context::enter`], which makes it current and leaves the
/// caller's current context, or device, as it was.
pub(crate) struct Context {
    runtime: Arc<dyn Runtime>,
    /// `None` if the device has no pools, or other memory than its own.
    pub(super) pool: Option<RawPool>,
    pub(super) reads_managed: bool,
    /// For errors.
    pub(crate) id: DeviceId,
    failure: FailureCode,
    /// Whether the library has refused a list of copies.
    pub(super) no_lists: AtomicBool,
    pub(super) leftovers: Leftovers,
    /// Boxed: `sync_event` holds a cell's address.
    #[allow(clippy::vec_box)]
    events: Mutex<Vec<Box<EventCell>>>,
}

/// An event in a place to which `sync_event` can point.
#[repr(C)]
pub(crate) struct EventCell {
    raw: RawEvent,
    /// The owner of an event that was given; `None` if it is our own.
    given: Option<Box<dyn Any + Send>>,
}

impl EventCell {
    /// Makes a cell for an event that was given. `owner` is dropped when the event is needed no
    /// more.
    pub(crate) fn given(raw: RawEvent, owner: Box<dyn Any + Send>) -> Box<Self> {
        let given = Some(owner);
        Box::new(Self { raw, given })
    }

    pub(super) fn raw(&self) -> RawEvent {
        self.raw
    }

    pub(crate) fn into_ptr(self: Box<Self>) -> Option<EventPtr> {
        // The handle is the first member.
        EventPtr::new(Box::into_raw(self).cast())
    }

    /// # Safety
    /// `event` is from [`into_ptr`](Self::into_ptr), and is taken back once.
    pub(super) unsafe fn from_ptr(event: EventPtr) -> Box<Self> {
        // SAFETY: the caller guarantees a pointer that `into_ptr` made from a box, taken back once
        // (see `# Safety`).
        unsafe { Box::from_raw(event.as_ptr().cast::<Self>()) }
    }
}

/// Returns the event that `sync_event` points to.
///
/// # Safety
/// `event` points to an event handle.
pub(crate) unsafe fn event_of(event: EventPtr) -> RawEvent {
    // SAFETY: the caller guarantees that a handle may be read there (see `# Safety`); any bits are
    // a `RawEvent`.
    unsafe { event.as_ptr().cast::<RawEvent>().read() }
}

impl Context {
    /// Makes the context of a device, with a pool of its own if `with_pool` is true and the device
    /// has pools.
    pub(super) fn new(id: DeviceId, runtime: Arc<dyn Runtime>, with_pool: bool) -> Result<Self> {
        let mut context = Self {
            reads_managed: runtime.reads_managed(),
            pool: None,
            runtime,
            id,
            failure: FailureCode::default(),
            no_lists: AtomicBool::new(false),
            leftovers: Leftovers::default(),
            events: Mutex::new(Vec::new()),
        };
        if with_pool && context.runtime.supports_pools() {
            let pool = {
                let current = context.enter(context.api().create_pool.name)?;
                current.create_pool()
            };
            // That memory is short may have changed when the device is opened again.
            let is_short = |failed: &Failed| context.meaning(failed.code) == Meaning::OutOfMemory;
            let is_short = pool.as_ref().is_err_and(is_short);
            context.pool = match context.check(pool) {
                Err(e) if is_short || context.has_failed() => return Err(e),
                // Some drivers refuse a pool although they say that there are pools: blocks of
                // memory are used again without one.
                pool => pool.ok(),
            };
        }
        Ok(context)
    }

    pub(crate) fn api(&self) -> &Api {
        self.runtime.library().api()
    }

    /// Returns the device's number in the library.
    pub(crate) fn ordinal(&self) -> c_int {
        self.runtime.ordinal()
    }

    pub(super) fn runtime(&self) -> &(dyn Runtime + 'static) {
        &*self.runtime
    }

    /// Begins a scope: until it is dropped, entries of this thread share one. Foreign code must not
    /// run inside it: it would find this context current.
    pub(super) fn scope(&self) -> Scope<'_> {
        Scope::shared(self.runtime(), self.address())
    }

    /// Makes the context current for as long as the returned guard lives.
    pub(crate) fn enter(&self, operation: &'static str) -> Result<Current<'_>> {
        match self.failure() {
            0 => self.enter_even_if_failed(),
            code => Err(self.error(operation, code)),
        }
    }

    /// As [`enter`](Self::enter), to free what a failed device still has.
    pub(super) fn enter_even_if_failed(&self) -> Result<Current<'_>> {
        self.enter_by(self.scope())
    }

    /// As [`enter`](Self::enter), around calls of another library, which may leave another context
    /// current: this entry is shared with no other one, and undoes that.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn enter_apart(&self, operation: &'static str) -> Result<Current<'_>> {
        match self.failure() {
            0 => self.enter_by(Scope::apart(self.runtime())),
            code => Err(self.error(operation, code)),
        }
    }

    fn enter_by<'a>(&self, scope: Scope<'a>) -> Result<Current<'a>> {
        self.check_process()?;
        scope.enter().map_err(|Failed { call, code, .. }| {
            // The context itself was refused.
            self.mark(code);
            self.error(call, code)
        })
    }

    /// Makes an error of a call's failure. If the context is lost, it has failed from now on.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|Failed { call, code, .. }| {
            if self.is_final(code) {
                self.confirm();
            }
            self.error(call, code)
        })
    }

    /// As [`check`](Self::check), for a call that allocates `bytes` bytes.
    pub(super) fn check_memory<T>(&self, answer: Answer<T>, bytes: usize) -> Result<T> {
        match answer {
            Err(failed) if self.meaning(failed.code) == Meaning::OutOfMemory => {
                Err(self.out_of_memory(failed.out_of_memory, bytes))
            }
            // Some drivers answer so for sizes that no device has. All else about the call is in
            // order, so nothing but the size can be invalid.
            Err(Failed { call, code, .. }) if code == code::INVALID_VALUE => {
                Err(self.out_of_memory(call, bytes))
            }
            answer => self.check(answer),
        }
    }

    pub(super) fn meaning(&self, code: Code) -> Meaning {
        self.runtime.meaning(code)
    }

    fn is_final(&self, code: Code) -> bool {
        matches!(self.meaning(code), Meaning::Lost | Meaning::ShutDown)
    }

    /// Asks this context itself whether it is lost: the code may be that of another context, whose
    /// event or memory was named.
    fn confirm(&self) {
        if let Ok(current) = self.enter_even_if_failed() {
            // SAFETY: the legacy default stream always exists.
            if let Err(failed) = unsafe { current.is_idle(RawStream::LEGACY) } {
                self.mark(failed.code);
            }
        }
    }

    /// Marks the context as failed if a code of its own says so.
    pub(super) fn mark(&self, code: Code) {
        if self.is_final(code) {
            self.failure.set(code);
        }
    }

    pub(super) fn out_of_memory(&self, operation: &'static str, bytes: usize) -> Error {
        Error::OutOfMemory {
            device: self.id,
            operation,
            bytes,
        }
    }

    pub(super) fn error(&self, operation: &'static str, code: Code) -> Error {
        let mut text = self.runtime.library().text(code);
        if self.has_failed() {
            text.push_str(FINAL);
        }
        device_error(self.id, operation, code, text)
    }

    /// Whether nothing works any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failure() != 0 || self.is_forked()
    }

    /// Returns the code of the failure after which nothing works any more; 0 before.
    pub(super) fn failure(&self) -> Code {
        self.failure.code()
    }

    /// Whether the library has shut down, and so taken everything back.
    pub(super) fn is_shut_down(&self) -> bool {
        self.meaning(self.failure()) == Meaning::ShutDown || self.is_forked()
    }

    /// Whether this process is a child of the one that opened the device. It has nothing to free
    /// then, and must take no lock that a thread of the parent may have held.
    pub(super) fn is_forked(&self) -> bool {
        !self.api().process.is_this()
    }

    /// Refuses to work in a child of the process that opened the device.
    pub(super) fn check_process(&self) -> Result<()> {
        self.api().process.check(self.id, code::NOT_INITIALIZED)
    }

    /// Gives idle memory of the pool back to the library.
    pub(super) fn trim_pool(&self) -> Result<()> {
        let Some(pool) = self.pool else {
            return Ok(());
        };
        let current = self.enter(self.api().trim.name)?;
        // SAFETY: the pool was created in `new`, and is destroyed in `drop`.
        self.check(unsafe { current.trim(pool) })
    }

    /// Returns an event to be recorded.
    pub(super) fn event(&self, current: &Current<'_>) -> Result<Box<EventCell>> {
        let idle = lock(&self.events).pop();
        if let Some(cell) = idle {
            return Ok(cell);
        }
        let raw = self.check(current.create_event())?;
        Ok(Box::new(EventCell { raw, given: None }))
    }

    /// Keeps an event for reuse.
    pub(super) fn recycle(&self, cell: Box<EventCell>) {
        if cell.given.is_some() || self.is_forked() {
            return;
        }
        let mut idle = lock(&self.events);
        if idle.len() < IDLE_EVENTS {
            idle.push(cell);
            return;
        }
        drop(idle);
        self.destroy_event(&cell);
    }

    fn destroy_event(&self, cell: &EventCell) {
        if let Ok(current) = self.enter_even_if_failed() {
            // SAFETY: the event is from `event`, and no cell but this one has it. Queued waits for
            // it stay.
            unsafe { current.destroy_event(cell.raw) };
        }
    }

    /// Identifies this context while it lives. Several of these may share one of the library's.
    pub(super) fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Gives a stream work that the host does in its order.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream. The job's memory is host memory, and
    /// valid until the stream has run it; a copy's ranges do not overlap.
    pub(super) unsafe fn queue_job(
        &self,
        current: &Current<'_>,
        stream: RawStream,
        job: Job,
    ) -> Result<()> {
        let number = jobs::add(&self.failure, job);
        // SAFETY: the number is the job's, whose memory is valid until the stream has run it (see
        // `# Safety`).
        let launched = unsafe { current.launch_host(stream, number) };
        self.check(launched).inspect_err(|_| jobs::forget(number))
    }

    /// Frees what may be freed of what was taken out of the leftovers, and keeps the rest.
    /// `settled`: all work has ended since it was taken out.
    pub(super) fn free_leftovers(&self, memory: Vec<Leftover>, settled: bool) {
        if !memory.is_empty() {
            let current = self.enter_even_if_failed().ok();
            self.leftovers.free(memory, settled, current.as_ref());
        }
    }

    /// Tries again what a capture forbade. Called before work that allocates or frees.
    pub(super) fn retry_leftovers(&self) {
        // Another thread of the parent process may have held the lock.
        if !self.is_forked() {
            self.free_leftovers(self.leftovers.take(), false);
        }
    }

    /// Whether all queues of this device, and its jobs, are known to have no work. Calls that might
    /// wait for the device can be made then.
    pub(super) fn is_quiet(&self) -> bool {
        if self.is_forked() {
            return false;
        }
        if self.has_failed() {
            jobs::stop(&self.failure);
            return true;
        }
        if jobs::are_under_way(&self.failure) {
            return false;
        }
        let current = self.enter_even_if_failed();
        current.is_ok_and(|current| self.leftovers.are_idle(&current))
    }

    /// Waits for the work of all queues of this device. Returns false if it cannot be waited for,
    /// because a stream is being captured, for example. Work of a failed device has ended.
    pub(super) fn wait_for_queues(&self) -> bool {
        if self.is_forked() {
            return false;
        }
        let current = self.enter_even_if_failed();
        let waited = current.is_ok_and(|current| self.leftovers.wait(&current));
        if self.has_failed() {
            jobs::stop(&self.failure);
            return true;
        }
        waited
    }

    /// Makes this thread wait for all work of the context. Asks the library even if the context has
    /// failed.
    pub(super) fn synchronize(&self) -> Result<()> {
        let answer = self.enter_even_if_failed()?.synchronize();
        self.check(answer)?;
        match self.failure() {
            0 => Ok(()),
            code => Err(self.error(self.api().synchronize.name, code)),
        }
    }

    /// As [`synchronize`](Self::synchronize), again and again until it succeeds or the context is
    /// lost: then nothing of it runs any more.
    pub(super) fn settle(&self) -> Result<()> {
        self.check_process()?;
        let start = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let done = self.synchronize();
            let e = match done {
                Err(e) if !self.has_failed() => e,
                done => {
                    if done.is_err() {
                        jobs::stop(&self.failure);
                    }
                    return done;
                }
            };
            // A call that is refused for now (a stream is being captured) can be made later. That a
            // context is lost whose calls fail otherwise for so long is an assumption: no library
            // says so.
            if let Error::Device { code, .. } = e {
                if self.meaning(code) != Meaning::Passing && start.elapsed() > LOST {
                    self.failure.set(code);
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        if jobs::are_under_way(&self.failure) {
            // Nothing has waited for them.
            let _ = self.settle();
        }
        jobs::stop(&self.failure);
        if let Ok(current) = self.enter_even_if_failed() {
            self.leftovers.destroy_streams(&current);
        }
        let events = std::mem::take(&mut *lock(&self.events));
        for cell in &events {
            self.destroy_event(cell);
        }
        if let (Some(pool), Ok(current)) = (self.pool, self.enter_even_if_failed()) {
            // SAFETY: created in `new`; nothing allocates from it any more.
            unsafe { current.destroy_pool(pool) };
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({} {:?})", self.id, self.runtime)
    }
}
