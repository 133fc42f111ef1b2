//! [`DevicePools`]: what device memory is reserved in; and whose turn it is on a device.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use arrow_device::Device;
use arrow_device::device::WeakDevice;
use datafusion_common::{Result, resources_datafusion_err};
use datafusion_execution::TaskContext;
use datafusion_execution::memory_pool::{MemoryPool, MemoryReservation, UnboundedMemoryPool};

use super::options::DeviceOptions;
use super::timer::{wake, wake_at};

/// The pools in which a session's nodes reserve memory of devices, and page-locked memory for them: apart from the session's own pool, so
/// that what is under way to or from a device makes no node on the host spill or fail.
///
/// A session brings its own as an extension of its configuration, for a pool that tracks its consumers, say. All other sessions of a process
/// share one for each device, in which each is refused what would exceed its [`DeviceOptions::memory`].
#[derive(Clone)]
pub struct DevicePools(Arc<Of>);

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

/// What a query may have of a device.
pub(super) struct Budget {
    pub(super) pool: Arc<dyn MemoryPool>,
    limit: Option<usize>,
    shared: Arc<Shared>,
    /// Its task context, which one query's partitions share. Weak, so that no other context has the same address.
    query: Weak<TaskContext>,
    options: DeviceOptions,
    /// `None` while it waits.
    turn: Mutex<Option<Arc<Turn>>>,
}

impl Budget {
    pub(super) fn new(context: &Arc<TaskContext>, device: &Device) -> Self {
        let (options, shared) = (DeviceOptions::of_task(context), Shared::of(device));
        let own = context.session_config().get_extension::<DevicePools>();
        Self {
            pool: own.map_or_else(|| shared.pool.clone(), |own| (own.0)(device)),
            limit: options.memory.of(device),
            shared,
            query: Arc::downgrade(context),
            options,
            turn: Mutex::default(),
        }
    }

    /// Reserves more within the limit.
    pub(super) fn grow(&self, reservation: &MemoryReservation, bytes: usize) -> Result<()> {
        let Some(limit) = self.limit else {
            return reservation.try_grow(bytes);
        };
        // Nobody else reserves meanwhile. Not the lock of the turns, one of which a session's own pool may end.
        let _growing = unpoisoned(&self.shared.growing);
        let reserved = self.pool.reserved();
        if reserved.saturating_add(bytes) > limit {
            return Err(resources_datafusion_err!(
                "{reserved} of the {limit} bytes of device.memory are reserved"
            ));
        }
        reservation.try_grow(bytes)
    }

    /// Is pending while as many other queries as may run at once on a device with a limit do so. One that has not been polled for a
    /// while does not count: it may be waiting for this one.
    pub(super) fn poll_turn(&self, cx: &Context<'_>) -> Poll<()> {
        if self.limit.is_none() || self.options.queries == 0 {
            return Poll::Ready(());
        }
        if let Some(turn) = &*unpoisoned(&self.turn) {
            turn.last.store(now(), Relaxed);
            return Poll::Ready(());
        }
        // No lock is held where a waker is called, or a turn ends.
        match self.shared.turn(&self.query, &self.options, cx.waker()) {
            Ok(turn) => {
                turn.last.store(now(), Relaxed);
                let before = unpoisoned(&self.turn).replace(turn);
                drop(before);
                Poll::Ready(())
            }
            Err(free) => {
                free.into_iter().for_each(|free| wake_at(free, cx.waker()));
                Poll::Pending
            }
        }
    }
}

/// What all sessions of the process share of a device.
struct Shared {
    pool: Arc<dyn MemoryPool>,
    growing: Mutex<()>,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    /// Those of queries, which begin with their first stream.
    running: Vec<(Weak<TaskContext>, Weak<Turn>)>,
    /// Tasks, each with the time at which the timer wakes it.
    waiting: Vec<(Waker, Option<Instant>)>,
}

/// A query's turn, which all its streams share. Its end wakes those that wait.
struct Turn {
    shared: Arc<Shared>,
    /// When one of them was polled last.
    last: AtomicU64,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let waiting = std::mem::take(&mut unpoisoned(&self.shared.turns).waiting);
        waiting.into_iter().for_each(|(waker, _)| wake(waker));
    }
}

impl Shared {
    fn of(device: &Device) -> Arc<Self> {
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
    /// first of them will not count any more if it is not polled, unless the timer wakes the task before.
    fn turn(
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
        let polled = running
            .iter()
            .map(|turn| now().saturating_sub(turn.last.load(Relaxed)));
        let left = polled.filter_map(|ago| options.idle().checked_sub(Duration::from_millis(ago)));
        let left: Vec<_> = left.filter(|left| !left.is_zero()).collect();
        if let Some(first) = left.iter().min().filter(|_| left.len() >= options.queries) {
            let now = Instant::now();
            let free = now.checked_add(*first);
            let mut waiting = turns.waiting.iter_mut();
            match waiting.find(|(one, _)| one.will_wake(&waker)) {
                Some((_, Some(due))) if *due > now => return Err(None),
                Some((_, due)) => *due = free,
                None => turns.waiting.push((waker, free)),
            }
            return Err(free);
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

/// A panic while a lock is held leaves nothing half done.
pub(super) fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
