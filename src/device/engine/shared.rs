//! What a device and its queues share: its memory, and its streams, those of queues that were dropped too, until their work has ended.

use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use super::health::{Guarded, Health};
use super::pool::{Pool, queue_number};
use super::process::Inside;
use super::ranges::{Piece, Ranges};
use super::runtime::Runtime;
use super::worker::Worker;
use crate::device::lock;
use crate::error::Result;

/// A queue, and its stream. Queues that share a stream have an entry each.
pub(super) struct Entry<R: Runtime> {
    pub(super) stream: Guarded<Arc<R::Stream>>,
    /// Whether the stream is a program's, to which nothing is given only because the queue is dropped.
    pub(super) is_adopted: bool,
    /// For the pool: no other stream has it, or had it.
    pub(super) number: u64,
    /// Whether the queue was dropped.
    is_dropped: AtomicBool,
    /// Whether it was given work since `last`.
    pub(super) is_used: AtomicBool,
    /// Its last work could not be marked, and it may be a program's that is gone: the work has ended after a wait for the device.
    pub(super) is_unmarked: AtomicBool,
    /// After the work of a queue that was dropped.
    last: Mutex<Option<Guarded<R::Event>>>,
}

/// What the pool keeps.
pub(super) struct Idle<R: Runtime> {
    pub(super) memory: Guarded<R::Memory>,
    pub(super) after: Guarded<R::Event>,
}

/// What a device and its queues share.
pub(super) struct Shared<R: Runtime> {
    pub(super) health: Health,
    pub(super) pool: Pool<Idle<R>>,
    /// Memory that could not be freed in the order of a stream: freed once all work has ended.
    pub(super) given_up: Mutex<Vec<Guarded<R::Memory>>>,
    /// Bytes of host memory, in use or not.
    pub(super) staging: AtomicUsize,
    /// Host memory that nobody uses: freed where the device is waited for.
    pub(super) idle_staging: Mutex<Vec<Piece<R::Memory>>>,
    /// Of all queues; those of dropped ones until their work has ended.
    streams: Mutex<Vec<Arc<Entry<R>>>>,
    /// Read while a stream is given work.
    pub(super) giving: RwLock<()>,
    /// Opens gates.
    pub(super) worker: Worker,
    /// Last, so that all above is released before.
    pub(super) runtime: Guarded<R>,
}

impl<R: Runtime> Shared<R> {
    pub(super) fn new(runtime: R, idle_bytes: usize) -> Self {
        let health = runtime.health().clone();
        Self {
            pool: Pool::new(idle_bytes),
            given_up: Mutex::default(),
            staging: AtomicUsize::new(0),
            idle_staging: Mutex::default(),
            streams: Mutex::default(),
            giving: RwLock::default(),
            worker: Worker::new("arrow-device events"),
            runtime: Guarded::new(runtime, &health),
            health,
        }
    }

    pub(super) fn live(&self) -> &Ranges<Piece<R::Memory>> {
        &self.runtime.memories().live
    }

    pub(super) fn host(&self) -> &Ranges<Piece<R::Memory>> {
        &self.runtime.memories().host
    }

    pub(super) fn streams(&self) -> Vec<Arc<Entry<R>>> {
        lock(&self.streams).clone()
    }

    /// Makes the entry of a new queue.
    pub(super) fn entry(&self, stream: Arc<R::Stream>, is_adopted: bool) -> Arc<Entry<R>> {
        self.sweep();
        let mut streams = lock(&self.streams);
        let same = streams
            .iter()
            .find(|other| Arc::ptr_eq(&other.stream, &stream));
        let entry = Arc::new(Entry {
            number: same.map_or_else(queue_number, |other| other.number),
            stream: Guarded::new(stream, &self.health),
            is_adopted,
            is_dropped: AtomicBool::new(false),
            is_used: AtomicBool::new(false),
            is_unmarked: AtomicBool::new(false),
            last: Mutex::default(),
        });
        streams.push(entry.clone());
        entry
    }

    /// Lets this thread give work to a stream, unless the device has failed.
    pub(super) fn give(&self) -> Result<(Inside, RwLockReadGuard<'_, ()>)> {
        let inside = self.health.enter()?;
        let giving = self.giving.read().unwrap_or_else(PoisonError::into_inner);
        // Again, so that `synchronize` knows whom it has to wait for.
        self.health.check()?;
        Ok((inside, giving))
    }

    /// The queue is dropped.
    pub(super) fn leave(&self, entry: &Entry<R>) {
        // Before another thread finds it among the dropped ones: after this a program's stream may be gone.
        let has_ended = self.has_ended(entry);
        if !has_ended && entry.is_adopted && entry.is_used.swap(false, Ordering::AcqRel) {
            entry.is_unmarked.store(true, Ordering::Release);
        }
        entry.is_dropped.store(true, Ordering::Release);
        self.sweep();
    }

    /// Whether all work that a stream was given has ended.
    pub(super) fn has_ended(&self, entry: &Entry<R>) -> bool {
        if self.health.is_over() {
            return true;
        }
        if entry.is_unmarked.load(Ordering::Acquire) {
            return false;
        }
        // Held while the stream is marked, so that nobody takes its work for ended meanwhile.
        let mut last = lock(&entry.last);
        if entry.is_used.swap(false, Ordering::AcqRel) {
            let Ok(mark) = self.runtime.mark(&entry.stream) else {
                entry.is_used.store(true, Ordering::Release);
                return false;
            };
            *last = Some(Guarded::new(mark, &self.health));
        }
        let is_done = |last: &Guarded<R::Event>| matches!(self.runtime.is_done(last), Ok(true));
        last.as_ref().is_none_or(is_done)
    }

    /// Forgets streams whose queues were dropped and whose work has ended.
    pub(super) fn sweep(&self) {
        let Ok(_inside) = self.health.enter_even_if_failed() else {
            return;
        };
        // The runtime is called without the lock: to ask, and to release the streams.
        let is_dropped = |entry: &&Arc<Entry<R>>| entry.is_dropped.load(Ordering::Acquire);
        let mut ended = Vec::from_iter(lock(&self.streams).iter().filter(is_dropped).cloned());
        ended.retain(|entry| self.has_ended(entry));
        let has_ended = |entry: &Arc<Entry<R>>| ended.iter().any(|ended| Arc::ptr_eq(ended, entry));
        lock(&self.streams).retain(|entry| !has_ended(entry));
    }

    pub(super) fn is_idle(&self, idle: &Idle<R>) -> bool {
        self.health.is_over() || matches!(self.runtime.is_done(&idle.after), Ok(true))
    }

    /// Frees memory that is idle: the oldest, until the rest is within the pool's limits, where a free does not wait.
    pub(super) fn free_idle(&self, waits: bool) {
        if (waits || !self.runtime.frees_wait()) && self.pool.is_over(1) {
            drop(self.pool.take_done(false, |idle| self.is_idle(idle)));
        }
    }

    /// Makes this thread wait for all work of the device, even if it has failed, and frees what nothing uses any more and is not kept for
    /// reuse.
    pub(super) fn synchronize(&self) -> Result<()> {
        drop(self.health.enter_even_if_failed()?);
        let had_failed = self.health.check().is_err();
        if had_failed {
            // Those that found no failure yet have given their work after this, and nobody gives any more.
            drop(self.giving.write().unwrap_or_else(PoisonError::into_inner));
        }
        let given_up = take(&mut *lock(&self.given_up));
        let entries = self.streams();
        let streams: Vec<_> = entries.iter().map(|e| (*e.stream).clone()).collect();
        let is_unmarked = |entry: &&Arc<Entry<R>>| entry.is_unmarked.load(Ordering::Acquire);
        let unmarked: Vec<_> = entries.iter().filter(is_unmarked).collect();
        match self.runtime.synchronize(&streams) {
            Ok(()) => {
                for entry in unmarked {
                    entry.is_unmarked.store(false, Ordering::Release);
                }
                // What was given while this waited runs on if the device has failed only since.
                if had_failed {
                    self.health.end();
                }
            }
            Err(e) if !self.health.is_over() => {
                lock(&self.given_up).extend(given_up);
                return Err(e);
            }
            Err(_) => {}
        }
        drop((given_up, streams, entries));
        let Ok(_inside) = self.health.enter_even_if_failed() else {
            return self.health.check();
        };
        self.free_idle(true);
        let idle = take(&mut *lock(&self.idle_staging));
        let bytes = idle.iter().map(|piece| piece.1).sum();
        drop(idle);
        self.staging.fetch_sub(bytes, Ordering::Relaxed);
        self.sweep();
        self.health.check()
    }

    /// As [`synchronize`](Self::synchronize), as long as it takes: nothing of the device runs afterwards.
    pub(super) fn settle(&self) {
        while self.synchronize().is_err() && !self.health.is_over() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Waits for all work, and frees all memory that is idle.
    pub(super) fn trim(&self) {
        // Memory whose event has completed can be freed all the same.
        let _ = self.synchronize();
        if let Ok(_inside) = self.health.enter_even_if_failed() {
            drop(self.pool.take_done(true, |idle| self.is_idle(idle)));
            self.runtime.trim();
        }
    }

    /// Whether nothing is left to be freed that may have to be waited for.
    pub(super) fn is_clear(&self) -> bool {
        self.pool.is_empty()
            && lock(&self.idle_staging).is_empty()
            && lock(&self.given_up).is_empty()
            && self.streams().iter().all(|entry| self.has_ended(entry))
    }
}

impl<R: Runtime> Drop for Shared<R> {
    fn drop(&mut self) {
        // What was never freed: memory may keep what has these tables.
        self.runtime.memories().live.clear();
        self.runtime.memories().host.clear();
    }
}

/// The end of a device, once its queues are dropped: waits for their work where that blocks nobody, and frees what was kept.
pub(super) struct End<R: Runtime>(pub(super) Arc<Shared<R>>);

impl<R: Runtime> Drop for End<R> {
    fn drop(&mut self) {
        let shared = self.0.clone();
        let Ok(_inside) = shared.health.enter_even_if_failed() else {
            return;
        };
        if !shared.is_clear() {
            // Dropping the worker does not wait.
            Worker::new("arrow-device end").push(move || {
                shared.settle();
                shared.trim();
            });
        }
    }
}
