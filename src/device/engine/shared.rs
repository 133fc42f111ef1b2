//! What a device and its queues share, and its streams: those of queues that were dropped too, until their work has ended.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use super::health::{Guarded, Health};
use super::pool::{Pool, queue_number};
use super::process::Inside;
use super::ranges::Piece;
use super::runtime::Runtime;
use super::worker::Worker;
use crate::device::lock;
use crate::error::Result;

/// A stream of a device.
pub(super) struct Entry<R: Runtime> {
    pub(super) stream: Guarded<Arc<R::Stream>>,
    /// Whether the stream is a program's, to which nothing is given only because the queue is dropped.
    pub(super) is_adopted: bool,
    /// For the pool: no other stream has it, or had it.
    pub(super) number: u64,
    /// How many queues have it.
    queues: AtomicUsize,
    /// How often a queue got it.
    times: AtomicUsize,
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

/// Host memory that nobody uses.
pub(super) struct Staging<M> {
    /// Of all host memory, in use or not.
    pub(super) bytes: usize,
    pub(super) idle: Vec<Piece<M>>,
}

impl<M> Default for Staging<M> {
    fn default() -> Self {
        Self {
            bytes: 0,
            idle: Vec::new(),
        }
    }
}

/// What a device and its queues share.
pub(super) struct Shared<R: Runtime> {
    pub(super) health: Health,
    pub(super) pool: Pool<Idle<R>>,
    /// Memory that could not be freed in the order of a stream: freed once all work has ended.
    pub(super) given_up: Mutex<Vec<Guarded<R::Memory>>>,
    pub(super) staging: Mutex<Staging<R::Memory>>,
    /// Of all queues, by the address of the stream; those of dropped ones until their work has ended.
    streams: Mutex<BTreeMap<usize, Arc<Entry<R>>>>,
    /// Those that no queue has any more.
    dropped: Mutex<Vec<Arc<Entry<R>>>>,
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
            staging: Mutex::default(),
            streams: Mutex::default(),
            dropped: Mutex::default(),
            giving: RwLock::default(),
            worker: Worker::new("arrow-device events"),
            runtime: Guarded::new(runtime, &health),
            health,
        }
    }

    pub(super) fn streams(&self) -> Vec<Arc<Entry<R>>> {
        lock(&self.streams).values().cloned().collect()
    }

    /// Returns the entry of a stream for a queue, which may be one that another queue has.
    pub(super) fn entry(&self, stream: Arc<R::Stream>, is_adopted: bool) -> Arc<Entry<R>> {
        self.sweep();
        let address = Arc::as_ptr(&stream).addr();
        let mut streams = lock(&self.streams);
        let entry = streams.entry(address).or_insert_with(|| {
            Arc::new(Entry {
                stream: Guarded::new(stream, &self.health),
                is_adopted,
                number: queue_number(),
                is_unmarked: AtomicBool::new(false),
                queues: AtomicUsize::new(0),
                times: AtomicUsize::new(0),
                is_used: AtomicBool::new(false),
                last: Mutex::default(),
            })
        });
        entry.queues.fetch_add(1, Ordering::AcqRel);
        entry.times.fetch_add(1, Ordering::AcqRel);
        entry.clone()
    }

    /// Lets this thread give work to a stream, unless the device has failed.
    pub(super) fn give(&self) -> Result<(Inside, RwLockReadGuard<'_, ()>)> {
        let inside = self.health.enter()?;
        let giving = self.giving.read().unwrap_or_else(PoisonError::into_inner);
        // Again, so that `synchronize` knows whom it has to wait for.
        self.health.check()?;
        Ok((inside, giving))
    }

    /// A queue of the stream is dropped.
    pub(super) fn leave(&self, entry: &Arc<Entry<R>>) {
        if entry.queues.fetch_sub(1, Ordering::AcqRel) == 1 {
            // Before another thread finds it among the dropped ones: after this a program's stream may be gone.
            let has_ended = self.has_ended(entry);
            if !has_ended && entry.is_adopted && entry.is_used.swap(false, Ordering::AcqRel) {
                entry.is_unmarked.store(true, Ordering::Release);
            }
            lock(&self.dropped).push(entry.clone());
            self.sweep();
        }
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
            match self.runtime.mark(&entry.stream) {
                Ok(mark) => *last = Some(Guarded::new(mark, &self.health)),
                Err(_) => {
                    entry.is_used.store(true, Ordering::Release);
                    return false;
                }
            }
        }
        let is_done = |last: &Guarded<R::Event>| matches!(self.runtime.is_done(last), Ok(true));
        last.as_ref().is_none_or(is_done)
    }

    /// Forgets streams whose queues were dropped and whose work has ended.
    pub(super) fn sweep(&self) {
        let Some(_inside) = self.health.enter_to_drop() else {
            return;
        };
        // The runtime is called without the locks: to ask, and to release the streams.
        let dropped = take(&mut *lock(&self.dropped));
        let (mut ended, mut others) = (Vec::new(), Vec::new());
        for entry in dropped {
            let times = entry.times.load(Ordering::Acquire);
            match self.has_ended(&entry) {
                true => ended.push((entry, times)),
                false => others.push(entry),
            }
        }
        lock(&self.dropped).extend(others);
        let mut streams = lock(&self.streams);
        for (entry, times) in &ended {
            // A new queue may have the stream meanwhile, or may have had it and given it work.
            let address = Arc::as_ptr(&entry.stream).addr();
            let is_listed = streams
                .get(&address)
                .is_some_and(|listed| Arc::ptr_eq(listed, entry));
            if is_listed
                && entry.queues.load(Ordering::Acquire) == 0
                && entry.times.load(Ordering::Acquire) == *times
            {
                streams.remove(&address);
            }
        }
        drop(streams);
    }
}

impl<R: Runtime> Drop for Shared<R> {
    fn drop(&mut self) {
        self.runtime.memories().clear();
    }
}

/// The end of a device, once its queues are dropped: waits for their work where that blocks nobody, and frees what was kept.
pub(super) struct End<R: Runtime>(pub(super) Arc<Shared<R>>);

impl<R: Runtime> Drop for End<R> {
    fn drop(&mut self) {
        let shared = self.0.clone();
        let Some(_inside) = shared.health.enter_to_drop() else {
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
