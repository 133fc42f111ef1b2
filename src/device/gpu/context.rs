//! What a device shares with its queues: its context, through which all its work goes, with its
//! errors and events, and memory and streams that cannot be freed at once.

use std::fmt;
use std::mem::take;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::api::{Answer, Api, Failed, RawPool, RawStream, code, is_done};
use super::blocks::Blocks;
use super::entry::{Current, Scope};
use super::event::EventCell;
use super::runtime::{Memory, Runtime, is_shut_down};
use crate::device::backend::{DevicePtr, device_error};
use crate::device::parts::{Failure, Worker};
use crate::device::{DeviceId, lock};
use crate::error::{Error, Result};

/// Most bytes of page-locked memory that a device takes for staging and for downloads.
const PAGE_LOCKED_LIMIT: usize = 2 << 30;
/// A context whose calls fail for this long is taken for lost.
const LOST: Duration = Duration::from_secs(5);

/// A device's context. All calls go through [`Context::enter`], which makes it current and leaves the
/// caller's current context, or device, as it was.
pub(crate) struct Context {
    pub(super) runtime: Arc<dyn Runtime>,
    /// Which memory the device allocates.
    pub(super) memory: Memory,
    /// `None` if the device has no pools, or other memory than its own.
    pub(super) pool: Option<RawPool>,
    pub(super) reads_managed: bool,
    /// For errors.
    pub(crate) id: DeviceId,
    failure: Failure,
    /// Whether the library has refused a list of copies.
    pub(super) no_lists: AtomicBool,
    /// What the device allocates without a pool.
    pub(crate) blocks: Blocks,
    /// Page-locked memory for staging and downloads.
    pub(super) staging: Blocks,
    /// The device's memory that could not be freed in a queue's order: freed once all work has
    /// ended.
    given_up: Mutex<Vec<DevicePtr>>,
    /// Our own streams whose queues were dropped while they had work: HIP would wait for it to
    /// destroy them.
    dropped: Mutex<Vec<RawStream>>,
    /// Boxed: `sync_event` holds a cell's address.
    #[allow(clippy::vec_box)]
    events: Mutex<Vec<Box<EventCell>>>,
}

impl Context {
    /// Makes the context of a device, with a pool of its own if the device allocates its own memory
    /// and has pools.
    pub(super) fn new(id: DeviceId, runtime: Arc<dyn Runtime>, memory: Memory) -> Result<Self> {
        let mut context = Self {
            memory,
            reads_managed: runtime.reads_managed(),
            pool: None,
            runtime,
            id,
            failure: Failure::new(),
            no_lists: AtomicBool::new(false),
            blocks: Blocks::new(memory, usize::MAX),
            staging: Blocks::new(Memory::Host, PAGE_LOCKED_LIMIT),
            given_up: Mutex::default(),
            dropped: Mutex::default(),
            events: Mutex::default(),
        };
        if memory == Memory::Device && context.runtime.supports_pools() {
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

    pub(crate) fn api(&self) -> &Api {
        self.runtime.library().api()
    }

    /// Begins a scope: until it is dropped, entries of this thread share one. Foreign code must not
    /// run inside it: it would find this context current.
    pub(super) fn scope(&self) -> Scope<'_> {
        Scope::new(&*self.runtime, std::ptr::from_ref(self).addr())
    }

    /// Makes the context current for as long as the returned guard lives.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn enter(&self) -> Result<Current<'_>> {
        self.failure.check()?;
        self.enter_even_if_failed()
    }

    /// As [`enter`](Self::enter), to free what a failed device still has.
    pub(super) fn enter_even_if_failed(&self) -> Result<Current<'_>> {
        self.check_process()?;
        self.scope().enter().map_err(|failed| {
            let e = self.error(failed);
            match self.runtime.is_final(failed.code) {
                // The context itself was refused.
                true => self.fail(e),
                false => e,
            }
        })
    }

    /// Makes an error of a call's failure. If the context is lost, it has failed from now on.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|failed| {
            let e = self.error(failed);
            match self.runtime.is_final(failed.code) && self.is_lost() {
                true => self.fail(e),
                false => e,
            }
        })
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

    fn error(&self, Failed { call, code }: Failed) -> Error {
        device_error(self.id, call, code, self.runtime.library().text(code))
    }

    /// Asks this context itself whether it is lost: the code may be that of another context, whose
    /// event or memory was named.
    fn is_lost(&self) -> bool {
        match self.enter_even_if_failed() {
            // SAFETY: the legacy default stream always exists.
            Ok(current) => unsafe { current.api().query_stream(RawStream::LEGACY) }
                .is_err_and(|failed| self.runtime.is_final(failed.code)),
            Err(_) => self.has_failed(),
        }
    }

    /// Marks the context as failed, and returns the error with which it has failed first.
    fn fail(&self, e: Error) -> Error {
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
        !self.api().process.is_this()
    }

    /// Refuses to work in a child of the process that opened the device.
    pub(super) fn check_process(&self) -> Result<()> {
        self.api().process.check(self.id, code::NOT_INITIALIZED)
    }

    /// Returns an event to be recorded.
    pub(super) fn event(&self, current: &Current<'_>) -> Result<Box<EventCell>> {
        let idle = lock(&self.events).pop();
        if let Some(cell) = idle {
            return Ok(cell);
        }
        let raw = self.check(current.new_event())?;
        Ok(EventCell::own(raw))
    }

    /// Keeps an event for reuse.
    pub(super) fn recycle(&self, cell: impl Into<Option<Box<EventCell>>>) {
        let own = cell.into().filter(|cell| cell.is_own());
        if let Some(cell) = own.filter(|_| !self.is_forked()) {
            lock(&self.events).push(cell);
        }
    }

    /// Returns a block of at least `bytes` bytes, for work on `queue` from now on.
    pub(super) fn allocate_block(
        &self,
        blocks: &Blocks,
        queue: u64,
        bytes: usize,
        current: &Current<'_>,
    ) -> Result<DevicePtr> {
        let too_much = || self.out_of_memory(current.allocation_call(blocks.memory), bytes);
        let rounded = Blocks::rounded(bytes).ok_or_else(too_much)?;
        if let Some(block) = blocks.reuse(queue, rounded, current) {
            self.recycle(block.after);
            return Ok(block.base);
        }
        if blocks.needs_wait(rounded) {
            // An error, as while another library captures, frees nothing; there may be enough all the same.
            let _ = self.synchronize();
        }
        if blocks.is_full(rounded) {
            return Err(too_much());
        }
        let base = self.check_memory(current.allocate(blocks.memory, rounded), bytes)?;
        blocks.add(base, rounded);
        Ok(base)
    }

    /// Frees idle blocks that nothing uses any more: the oldest, until the rest is within the pool's
    /// limits; or all.
    fn free_idle(&self, blocks: &Blocks, all: bool, current: &Current<'_>) {
        // Of a failed device nothing runs any more.
        for block in blocks.take_done(all, self.has_failed(), current) {
            // SAFETY: the block is of this kind of memory, was taken out of the pool, and its event
            // has completed.
            unsafe { current.free(blocks.memory, block.base) };
            self.recycle(block.after);
        }
    }

    /// Allocates page-locked memory for staging. Returns `None` beyond the limit, or if the library
    /// refuses it, which drivers do for many reasons that are none of the device's: ordinary memory
    /// serves then, which is slower.
    pub(super) fn allocate_staging(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let current = self.enter()?;
        // Nothing uses idle staging memory, so that nobody has to wait.
        if self.staging.needs_wait(bytes) {
            self.free_idle(&self.staging, true, &current);
        }
        match self.allocate_block(&self.staging, 0, bytes, &current) {
            Err(e) if self.has_failed() => Err(e),
            done => Ok(done.ok()),
        }
    }

    /// Frees memory of the device's that could not be freed in a queue's order, and that queued work
    /// may still use, once all work has ended.
    pub(crate) fn give_up(&self, base: DevicePtr) {
        self.blocks.forget(base);
        lock(&self.given_up).push(base);
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
    fn sweep(&self, all: bool) {
        lock(&self.dropped).retain(|stream| {
            // SAFETY: the stream was created by its queue, whose drop handed it over.
            let query = || is_done(unsafe { self.api().query_stream(*stream) });
            let is_busy = !all && query() == Ok(false);
            if !is_busy {
                // SAFETY: the stream was created by its queue, whose drop handed it over: nothing
                // uses it any more.
                let _ = unsafe { self.api().destroy_stream(*stream) };
            }
            is_busy
        });
    }

    /// Makes this thread wait for all work of the context, even if it has failed, and frees what
    /// nothing uses any more and is not kept for reuse.
    pub(super) fn synchronize(&self) -> Result<()> {
        let current = self.enter_even_if_failed()?;
        let given_up = take(&mut *lock(&self.given_up));
        // SAFETY: the call has no arguments, and the context is current.
        let done = self.check(unsafe { self.api().synchronize() });
        let done = done.and_then(|()| self.failure.check());
        if done.is_err() && !self.has_failed() {
            lock(&self.given_up).extend(given_up);
            return done;
        }
        for base in given_up {
            // SAFETY: the memory is of the device's kind, its owner has given it up, and all work
            // that could use it has ended since.
            unsafe { current.free(self.memory, base) };
        }
        self.free_idle(&self.blocks, false, &current);
        self.free_idle(&self.staging, true, &current);
        self.sweep(false);
        done
    }

    /// As [`synchronize`](Self::synchronize), again and again until it succeeds or the context is
    /// lost: then nothing of it runs any more.
    pub(super) fn settle(&self) -> Result<()> {
        let start = Instant::now();
        loop {
            match self.synchronize() {
                Err(e) if !self.has_failed() => {
                    // What another library's stream capture forbids now can be done later. That a
                    // context is lost whose calls fail otherwise for so long is an assumption: no
                    // library says so.
                    let forbidden = matches!(
                        e,
                        Error::Device {
                            code: 900..=908,
                            ..
                        }
                    );
                    if !forbidden && start.elapsed() > LOST {
                        return Err(self.fail(e));
                    }
                }
                Err(_) if self.is_gone() => return Ok(()),
                done => return done,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for all work, and frees all memory that is idle.
    pub(super) fn trim(&self) {
        // Memory whose event has completed can be freed all the same.
        let _ = self.synchronize();
        let Ok(current) = self.enter_even_if_failed() else {
            return;
        };
        self.free_idle(&self.blocks, true, &current);
        self.free_idle(&self.staging, true, &current);
        if let Some(pool) = self.pool {
            // SAFETY: the pool was created in `new`, and is destroyed in `drop`.
            let _ = self.check(unsafe { self.api().trim(pool, 0) });
        }
    }

    /// Whether nothing is left to be freed that may have to be waited for.
    fn is_clear(&self) -> bool {
        self.blocks.is_empty()
            && self.staging.is_empty()
            && lock(&self.given_up).is_empty()
            && lock(&self.dropped).is_empty()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let Ok(_current) = self.enter_even_if_failed() else {
            return;
        };
        self.sweep(true);
        for cell in lock(&self.events).drain(..) {
            // SAFETY: the event is from `event`, and no other cell has it.
            let _ = unsafe { self.api().destroy_event(cell.raw()) };
        }
        if let Some(pool) = self.pool {
            // SAFETY: created in `new`; nothing allocates from it any more.
            let _ = unsafe { self.api().destroy_pool(pool) };
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({} {:?})", self.id, self.runtime)
    }
}

/// The end of a device: frees what it has kept.
pub(super) struct End(pub(super) Arc<Context>);

impl Drop for End {
    fn drop(&mut self) {
        if self.0.is_forked() || self.0.is_clear() {
            return;
        }
        // The drop of a device waits for nothing, unless the system starts no thread.
        let context = self.0.clone();
        Worker::new("arrow-device gpu free").push(move || {
            // Even after an error nothing runs any more.
            let _ = context.settle();
            context.trim();
        });
    }
}
