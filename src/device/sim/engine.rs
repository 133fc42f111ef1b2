//! The engine: how queued work runs.

use std::cell::Cell;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use super::state::{Core, Op, Point, State, is_host, owner_of};
use super::{INVALID_ACCESS, MISUSE, SimMode};
use crate::abi::guard;
use crate::device::{CopyKind, CopyOp, DevicePtr, lock};
use crate::error::Result;

thread_local! {
    /// Whether this thread is running queued work, and so must not wait for any.
    static ON_ENGINE: Cell<bool> = const { Cell::new(false) };
}

impl Core {
    /// Appends work to a queue, which the worker runs soon in [`SimMode::Async`]. `state` is what the caller has locked.
    pub(super) fn enqueue(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        id: u64,
        op: Op,
    ) -> Result<Point> {
        let Some(queue) = state.queues.get_mut(&id) else {
            return Err(self.error("enqueue", MISUSE, "no such queue"));
        };
        queue.submitted += 1;
        queue.pending.push_back(op);
        let (position, is_first) = (queue.submitted, queue.pending.len() == 1);
        // The worker comes by itself to what is behind the first.
        if is_first && self.config.mode == SimMode::Async {
            drop(state);
            let core = self.clone();
            self.worker.push(move || core.run_all());
        }
        Ok(Point {
            queue: id,
            position,
        })
    }

    /// Waits until a queue has reached `point`; without a worker, by running what that needs.
    pub(super) fn wait(&self, point: Point, operation: &'static str) -> Result<()> {
        if ON_ENGINE.get() {
            let message = "waits for a device inside a kernel or on a worker";
            return Err(self.error(operation, MISUSE, message));
        }
        if self.config.mode == SimMode::Deferred {
            return self.run_until(point);
        }
        let mut state = self.alive()?;
        while !state.reached(point) {
            state = self.done.wait(state).unwrap_or_else(|e| e.into_inner());
            state.alive()?;
        }
        Ok(())
    }

    /// Runs what `point` needs and no more.
    fn run_until(&self, point: Point) -> Result<()> {
        self.check_process()?;
        let mut needed = vec![point];
        while let Some(&next) = needed.last() {
            let engine = lock(&self.engine);
            let state = self.alive()?;
            if state.reached(next) {
                needed.pop();
                continue;
            }
            let queue = state.queues.get(&next.queue);
            match queue.and_then(|queue| queue.pending.front()) {
                Some(Op::Wait(point)) if !state.reached(*point) => needed.push(*point),
                _ => self.run_first(engine, state, next.queue),
            }
        }
        Ok(())
    }

    /// Runs all that can run, on the worker: of each queue one operation, and so on.
    fn run_all(&self) {
        let before = ON_ENGINE.replace(true);
        let mut last = 0;
        loop {
            let (engine, state) = (lock(&self.engine), self.state());
            if let Some(next) = state.next_after(last) {
                last = next;
                self.run_first(engine, state, next);
            } else if state.queues.values().all(|q| q.pending.is_empty()) {
                break;
            } else {
                // At copies that are slowed down.
                drop((state, engine));
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        ON_ENGINE.set(before);
    }

    /// Runs the first operation of a queue. `engine` is held, so that only one operation of a device runs at a time.
    fn run_first(&self, engine: MutexGuard<'_, ()>, mut guard: MutexGuard<'_, State>, id: u64) {
        let state = &mut *guard;
        // It stays in the queue while it runs, and with it the host memory that it uses.
        let first = state.queues.get_mut(&id);
        let run = match first.and_then(|queue| queue.pending.front_mut()) {
            Some(Op::Work(work)) => work.run.take(),
            Some(Op::Free(address)) => {
                state.memory.finish_free(*address);
                None
            }
            Some(Op::Mark | Op::Wait(_)) | None => None,
        };
        drop(guard);
        let before = ON_ENGINE.replace(true);
        let result = run.map_or(Ok(()), |run| run(self));
        ON_ENGINE.set(before);
        let mut state = self.state();
        let dropped = match result {
            Ok(()) => {
                state.complete(id);
                Vec::new()
            }
            Err(error) => state.fail(error),
        };
        drop((state, engine));
        self.done.notify_all();
        let _ = guard::call_foreign("kernel", || drop(dropped));
    }

    pub(super) fn run_copy(&self, copy: &CopyOp) -> Result<()> {
        let CopyOp {
            src, dst, bytes, ..
        } = *copy;
        let host = |ptr: DevicePtr| match is_host(ptr, bytes) {
            true => Ok((None, ptr.as_ptr().cast())),
            false => Err(self.invalid(ptr, bytes, "not host memory")),
        };
        let device = |ptr, core: &Self| {
            let (memory, start) = core.locate(ptr, bytes)?;
            Ok((Some(memory), start))
        };
        let from = match copy.kind {
            CopyKind::HostToDevice => host(src),
            CopyKind::DeviceToDevice if self.config.peer_access => {
                device(src, owner_of(src).as_deref().unwrap_or(self))
            }
            CopyKind::DeviceToHost | CopyKind::DeviceToDevice => device(src, self),
        };
        let to = match copy.kind {
            CopyKind::DeviceToHost => host(dst),
            CopyKind::HostToDevice | CopyKind::DeviceToDevice => device(dst, self),
        };
        let both = from.and_then(|from| Ok((from, to?)));
        let ((_from, from), (_to, to)) =
            both.map_err(|message| self.error("copy", INVALID_ACCESS, message))?;
        // SAFETY: device addresses were just checked against live allocations, whose memory is kept. The caller of
        // `RawQueue::copy` guarantees that host memory lives unchanged until the copy has completed. `check_copy` has refused
        // ranges that overlap.
        unsafe { std::ptr::copy_nonoverlapping::<u8>(from, to, bytes) };
        Ok(())
    }

    pub(super) fn run_fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let located = self.locate(dst, bytes);
        let (_memory, start) =
            located.map_err(|message| self.error("fill", INVALID_ACCESS, message))?;
        // SAFETY: `locate` has checked the range against the live allocations, and its memory is kept.
        unsafe { start.write_bytes(byte, bytes) };
        Ok(())
    }
}
