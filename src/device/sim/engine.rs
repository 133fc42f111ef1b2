//! The engine: how queued work runs.

use std::cell::Cell;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use super::event::Point;
use super::state::{After, Core, Op, Pick, State};
use super::{INVALID_ACCESS, MISUSE, SimMode};
use crate::device::{device_error, lock};
use crate::error::Result;

thread_local! {
    /// Whether this thread is running queued work, and so must not wait for any.
    static ON_ENGINE: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as running queued work.
struct EngineMark(bool);

impl EngineMark {
    fn set() -> Self {
        Self(ON_ENGINE.replace(true))
    }
}

impl Drop for EngineMark {
    fn drop(&mut self) {
        ON_ENGINE.set(self.0);
    }
}

impl Core {
    /// Appends work to a queue. `state` is what the caller has locked.
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
        let position = queue.submitted;
        state.busy.insert(id);
        self.work.notify_one();
        Ok(Point {
            queue: id,
            position,
        })
    }

    /// Waits until a queue has reached `point`; without a worker, by running what that needs.
    pub(super) fn wait(&self, point: Point, operation: &'static str) -> Result<()> {
        if ON_ENGINE.get() {
            let message = "waits for a device inside a kernel or on a worker";
            return Err(device_error(self.id, operation, MISUSE, message));
        }
        self.check_process()?;
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
            Some(Op::Copy { copies, .. }) => self.clock.copying(|| self.run_copies(&copies)),
            Some(Op::Fill { dst, byte, bytes }) => self.run_fill(dst, byte, bytes),
            Some(Op::Kernel(Some(kernel))) => {
                let _mark = EngineMark::set();
                kernel(self)
            }
            Some(Op::Free(offset)) => {
                let freed = self.state().finish_free(&self.mapping, offset);
                self.retire(freed);
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
                let error = device_error(self.id, error.operation, error.code, error.message);
                state.fail(&self.mapping, error, &mut after);
            }
        }
        drop(state);
        self.done.notify_all();
        after
    }
}

/// What a device and its queues hold: the device closes when the last one is dropped.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Arc<Core>);

impl Drop for Handle {
    fn drop(&mut self) {
        if self.0.is_forked() {
            return;
        }
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
