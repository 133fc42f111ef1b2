//! [`DevicePools`]: what device memory is reserved in; and whose turn it is on a device.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use arrow_device::Device;
use arrow_device::device::WeakDevice;
use datafusion_execution::TaskContext;
use datafusion_execution::memory_pool::{MemoryPool, UnboundedMemoryPool};

use super::options::DeviceOptions;
use super::timer::{unpoisoned, wake};

/// The pools in which a session's nodes reserve memory of devices, and page-locked memory for them: apart from the session's own pool, so
/// that what is under way to or from a device makes no node on the host spill or fail.
///
/// A session brings its own as an extension of its configuration, for a pool that tracks its consumers, say. All other sessions of a process
/// share one for each device, in which each is refused what would exceed its [`DeviceOptions::memory`].
#[derive(Clone)]
pub struct DevicePools(pub(super) Arc<Of>);

type Of = dyn Fn(&Device) -> Arc<dyn MemoryPool> + Send + Sync;

impl DevicePools {
    /// Makes the pools of a function that returns that of a device: the same one at each call.
    pub fn new(of: impl Fn(&Device) -> Arc<dyn MemoryPool> + Send + Sync + 'static) -> Self {
        Self(Arc::new(of))
    }
}

impl fmt::Debug for DevicePools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DevicePools")
    }
}

/// What all sessions of the process share of a device.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) pool: Arc<dyn MemoryPool>,
    /// Not the lock of the turns, one of which a session's own pool may end.
    pub(super) growing: Mutex<()>,
    turns: Mutex<Turns>,
}

#[derive(Default, Debug)]
struct Turns {
    /// Those of queries, which begin with their first stream.
    running: Vec<(Weak<TaskContext>, Weak<Turn>)>,
    waiting: Vec<Waker>,
}

/// A query's turn, which all its streams share. Its end wakes those that wait.
#[derive(Debug)]
pub(super) struct Turn {
    shared: Arc<Shared>,
    /// When one of them was polled last.
    last: AtomicU64,
}

impl Turn {
    pub(super) fn goes_on(&self) {
        self.last.store(now(), Relaxed);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let waiting = std::mem::take(&mut unpoisoned(&self.shared.turns).waiting);
        waiting.into_iter().for_each(wake);
    }
}

impl Shared {
    pub(super) fn of(device: &Device) -> Arc<Self> {
        static ALL: Mutex<Vec<(WeakDevice, Arc<Shared>)>> = Mutex::new(Vec::new());
        let (mut all, own) = (unpoisoned(&ALL), device.downgrade());
        if let Some((_, shared)) = all.iter().find(|(device, _)| *device == own) {
            return shared.clone();
        }
        all.retain(|(device, _)| device.upgrade().is_some());
        let shared = Arc::new(Self {
            pool: Arc::new(UnboundedMemoryPool::default()),
            growing: Mutex::default(),
            turns: Mutex::default(),
        });
        all.push((own, shared.clone()));
        shared
    }

    /// The turn that a query has, or one that is free. If there is none, wakes the task when one of the other queries ends, and returns when the
    /// first of them will not count any more if it is not polled.
    pub(super) fn turn(
        self: &Arc<Self>,
        query: &Weak<TaskContext>,
        options: &DeviceOptions,
        waker: &Waker,
    ) -> Result<Arc<Turn>, Option<Instant>> {
        let waker = waker.clone();
        // Dropped after the lock, which the end of a turn takes.
        let running: Vec<Arc<Turn>>;
        let mut turns = unpoisoned(&self.turns);
        turns.running.retain(|(_, turn)| turn.strong_count() > 0);
        let mut own = turns.running.iter().filter(|(of, _)| of.ptr_eq(query));
        if let Some(own) = own.find_map(|(_, turn)| turn.upgrade()) {
            return Ok(own);
        }
        let all = turns.running.iter();
        running = all.filter_map(|(_, turn)| turn.upgrade()).collect();
        let ago = |turn: &Arc<Turn>| now().saturating_sub(turn.last.load(Relaxed));
        let left = |turn| options.idle_ms.saturating_sub(ago(turn));
        let left = running.iter().map(left).filter(|left| *left > 0);
        let left: Vec<_> = left.collect();
        if let Some(first) = left.iter().min().filter(|_| left.len() >= options.queries) {
            if !turns.waiting.iter().any(|one| one.will_wake(&waker)) {
                turns.waiting.push(waker);
            }
            return Err(Instant::now().checked_add(Duration::from_millis(*first)));
        }
        let turn = Arc::new(Turn {
            shared: self.clone(),
            last: AtomicU64::new(now()),
        });
        let of = (query.clone(), Arc::downgrade(&turn));
        turns.running.push(of);
        Ok(turn)
    }
}

/// Milliseconds since some time.
fn now() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}
