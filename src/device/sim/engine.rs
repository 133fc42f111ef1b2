//! The engine: what all handles of a device share, and how queued work runs.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::event::{Events, Point};
use super::fault::{Faults, failed};
use super::kernel;
use super::memory::{Allocator, Mapping};
use super::queue::{HostBlocks, Op, QueueState};
use super::{INVALID_ACCESS, MISUSE, SimConfig, SimMode, copy};
use crate::device::{DeviceId, device_error};
use crate::error::{Error, Result};

/// Locks, whatever happened to earlier holders: no critical section here leaves a half-made state.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

thread_local! {
    /// Whether this thread is running queued work, and so must not wait for any.
    static ON_ENGINE: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as running queued work.
pub(super) struct EngineMark(bool);

impl EngineMark {
    pub(super) fn set() -> Self {
        Self(ON_ENGINE.replace(true))
    }
}

impl Drop for EngineMark {
    fn drop(&mut self) {
        ON_ENGINE.set(self.0);
    }
}

/// What a device, its queues and its worker share.
///
/// Locks are taken in this order: `engine`, `state`. Wakers are called and closures dropped with
/// neither held.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) id: DeviceId,
    pub(super) config: SimConfig,
    pub(super) mapping: Mapping,
    pub(super) faults: Faults,
    state: Mutex<State>,
    /// Held by whoever runs work when there is no worker.
    engine: Mutex<()>,
    /// There is work, or the device is closing.
    work: Condvar,
    /// Work has run.
    done: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) memory: Allocator,
    pub(super) events: Events,
    pub(super) queues: BTreeMap<u64, QueueState>,
    pub(super) next_queue: u64,
    pub(super) host: HostBlocks,
    pub(super) violations: Vec<String>,
    /// What ended this device. Nothing runs or is queued any more.
    pub(super) error: Option<Error>,
    worker: Option<JoinHandle<()>>,
    closing: bool,
}

impl State {
    /// Refuses if the device has failed.
    pub(super) fn alive(&self) -> Result<()> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Whether a queue has come this far. Queues are forgotten only when all of their work is done.
    pub(super) fn reached(&self, point: Point) -> bool {
        let queue = self.queues.get(&point.queue);
        queue.is_none_or(|queue| queue.completed >= point.position)
    }

    /// Takes note that the first operation of a queue has run.
    fn complete(&mut self, id: u64, after: &mut After) {
        let Some(queue) = self.queues.get_mut(&id) else {
            return;
        };
        if let Some(op) = queue.pending.pop_front() {
            self.host.let_go(&op);
            after.garbage.push(op);
        }
        queue.completed += 1;
        queue.due.set(None);
        after.wakers.extend(queue.wakers.extract(queue.completed));
        if queue.dropped && queue.pending.is_empty() {
            self.queues.remove(&id);
        }
    }

    /// Ends the device: frees what was to be freed, drops all other work, wakes everybody.
    fn fail(&mut self, mapping: &Mapping, error: Error, after: &mut After) {
        self.error.get_or_insert(error);
        let ids: Vec<u64> = self.queues.keys().copied().collect();
        for id in ids {
            while let Some(op) = self.queues.get(&id).and_then(|q| q.pending.front()) {
                if let Op::Free(offset) = *op {
                    self.finish_free(mapping, offset);
                }
                self.complete(id, after);
            }
        }
    }

    /// Runs a free.
    pub(super) fn finish_free(&mut self, mapping: &Mapping, offset: usize) {
        if !self.memory.finish_free(mapping, offset) {
            let address = mapping.device(offset);
            self.violations
                .push(format!("red zone damaged around {address:p}"));
        }
    }

    /// The queue whose first operation can run, if any, after `last` first; else when to look again.
    fn pick(&self, last: u64, rate: Option<u64>) -> Pick {
        let mut again: Option<Instant> = None;
        let later = self.queues.range(last.saturating_add(1)..);
        for (id, queue) in later.chain(self.queues.range(..=last)) {
            match (queue.pending.front(), rate) {
                (None, _) => {}
                (Some(Op::Wait(point)), _) => {
                    if self.reached(*point) {
                        return Pick::Run(*id);
                    }
                }
                (Some(Op::Copy { copies, .. }), Some(rate)) => {
                    let now = Instant::now();
                    let due = queue.due.get().unwrap_or_else(|| {
                        let bytes: u128 = copies.iter().map(|copy| copy.bytes as u128).sum();
                        let nanos = bytes * 1_000_000_000 / u128::from(rate.max(1));
                        let time = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
                        now.checked_add(time).unwrap_or(now)
                    });
                    queue.due.set(Some(due));
                    if due <= now {
                        return Pick::Run(*id);
                    }
                    again = Some(again.map_or(due, |other| other.min(due)));
                }
                _ => return Pick::Run(*id),
            }
        }
        Pick::Later(again)
    }
}

enum Pick {
    Run(u64),
    Later(Option<Instant>),
}

/// What is left to do after work has run, without locks.
#[derive(Default)]
struct After {
    wakers: Vec<Waker>,
    garbage: Vec<Op>,
}

impl After {
    fn finish(self) {
        for waker in self.wakers {
            // A waker that panics must not end the worker.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
        let _ = catch_unwind(AssertUnwindSafe(|| drop(self.garbage)));
    }
}

impl Core {
    pub(super) fn new(id: DeviceId, config: SimConfig, mapping: Mapping) -> Arc<Self> {
        let capacity_bytes = mapping.range().len();
        let core = Arc::new(Self {
            id,
            mapping,
            faults: Faults::default(),
            state: Mutex::new(State {
                memory: Allocator::new(capacity_bytes, config.quarantine_bytes),
                events: Events::default(),
                queues: BTreeMap::new(),
                next_queue: 0,
                host: HostBlocks::default(),
                violations: Vec::new(),
                error: None,
                worker: None,
                closing: false,
            }),
            config,
            engine: Mutex::new(()),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        copy::register(&core);
        core
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Appends work to a queue. `state` is the caller's lock.
    pub(super) fn enqueue(
        self: &Arc<Self>,
        state: &mut State,
        id: u64,
        mut op: Op,
    ) -> Result<Point> {
        if self.config.mode == SimMode::Async && state.worker.is_none() {
            let core = self.clone();
            let name = "arrow-device-sim".to_string();
            let worker = std::thread::Builder::new().name(name);
            let worker = worker.spawn(move || core.work()).map_err(|error| {
                device_error(self.id, "start worker", MISUSE, error.to_string())
            })?;
            state.worker = Some(worker);
        }
        let Some(queue) = state.queues.get_mut(&id) else {
            return Err(device_error(self.id, "enqueue", MISUSE, "no such queue"));
        };
        queue.submitted += 1;
        state.host.hold(&mut op);
        queue.pending.push_back(op);
        self.work.notify_one();
        Ok(Point {
            queue: id,
            position: queue.submitted,
        })
    }

    /// Waits until a queue has come to `point`; without a worker, by running what that needs.
    pub(super) fn wait(&self, point: Point, operation: &'static str) -> Result<()> {
        if ON_ENGINE.get() {
            let message = "waits for a device inside a kernel or on a worker";
            return Err(device_error(self.id, operation, MISUSE, message));
        }
        match self.config.mode {
            SimMode::Async => {
                let mut state = self.state();
                loop {
                    state.alive()?;
                    if state.reached(point) {
                        return Ok(());
                    }
                    state = self.done.wait(state).unwrap_or_else(|e| e.into_inner());
                }
            }
            SimMode::Deferred => self.run_until(point),
        }
    }

    /// Runs what `point` needs and no more.
    fn run_until(&self, point: Point) -> Result<()> {
        let mut needed = vec![point];
        while let Some(&next) = needed.last() {
            let engine = lock(&self.engine);
            let state = self.state();
            state.alive()?;
            if state.reached(next) {
                needed.pop();
                continue;
            }
            let queue = state.queues.get(&next.queue);
            match queue.and_then(|queue| queue.pending.front()) {
                Some(Op::Wait(point)) if !state.reached(*point) => needed.push(*point),
                _ => {
                    let after = self.run_first(state, next.queue);
                    drop(engine);
                    after.finish();
                }
            }
        }
        Ok(())
    }

    /// The worker. It ends when the device closes and all work is done.
    fn work(&self) {
        let _mark = EngineMark::set();
        let mut last = 0;
        let mut state = self.state();
        loop {
            let rate = self.config.bytes_per_second.filter(|_| !state.closing);
            state = match state.pick(last, rate) {
                Pick::Run(id) => {
                    last = id;
                    self.run_first(state, id).finish();
                    self.state()
                }
                Pick::Later(None) if state.closing => return,
                Pick::Later(None) => self.work.wait(state).unwrap_or_else(|e| e.into_inner()),
                Pick::Later(Some(due)) => {
                    let time = due.saturating_duration_since(Instant::now());
                    let woken = self.work.wait_timeout(state, time);
                    woken.unwrap_or_else(|e| e.into_inner()).0
                }
            };
        }
    }

    /// Runs the first operation of a queue. The caller is the engine: the worker, or the holder of
    /// `engine` where there is none; so only one operation of a device runs at a time.
    fn run_first(&self, mut state: MutexGuard<'_, State>, id: u64) -> After {
        let mut after = After::default();
        // It stays in the queue while it runs, for `free_host` to see.
        let first = state.queues.get_mut(&id);
        let op = first.and_then(|queue| queue.pending.front_mut().map(Op::start));
        drop(state);
        let result = match op {
            Some(Op::Copy { copies, .. }) => self.run_copies(&copies),
            Some(Op::Fill { dst, byte, bytes }) => self.run_fill(dst, byte, bytes),
            Some(Op::Kernel(Some(kernel))) => kernel::run(self, kernel),
            Some(Op::Free(offset)) => {
                self.state().finish_free(&self.mapping, offset);
                Ok(())
            }
            Some(Op::Kernel(None) | Op::Mark | Op::Wait(_)) | None => Ok(()),
        };
        let mut state = self.state();
        match result {
            Ok(()) => state.complete(id, &mut after),
            Err(error) => {
                if error.code == INVALID_ACCESS {
                    let text = format!("{}: {}", error.operation, error.message);
                    state.violations.push(text);
                }
                state.fail(&self.mapping, failed(self.id, error), &mut after);
            }
        }
        drop(state);
        self.done.notify_all();
        after
    }
}

/// What a device and its queues hold: the device closes when the last one goes.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Arc<Core>);

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.closing = true;
        let worker = state.worker.take();
        drop(state);
        self.0.work.notify_all();
        // On the worker itself (a kernel or waker held the last handle) it ends on its own.
        if let Some(worker) = worker.filter(|w| w.thread().id() != std::thread::current().id()) {
            let _ = worker.join();
        }
    }
}
