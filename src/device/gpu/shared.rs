//! What a device shares with its queues, and when it frees memory that no stream frees in its order.
//!
//! Such a free may wait for the device with a lock of the library held, so that a host function
//! that waits for another thread's call of the library never returns (reported for `cuMemFree` and
//! `cuMemFreeHost`). So nothing is freed when it is dropped, nor by a thread that watches: idle
//! memory is kept until the device has no work, and is then freed by a synchronisation, by `trim`,
//! by an allocation that needs the memory, or after the device was dropped.

use std::sync::Arc;
use std::time::Duration;

use super::blocks::Blocks;
use super::context::Context;
use super::leftovers::Leftover;
use super::page_locked::PageLocked;
use super::runtime::Memory;
use crate::device::backend::DevicePtr;
use crate::device::parts::Worker;
use crate::error::Result;

/// What a queue needs of its device.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    pub(crate) memory: Memory,
    pub(crate) blocks: Arc<Blocks>,
    pub(super) page_locked: Arc<PageLocked>,
}

impl Shared {
    /// Frees memory that queued work may still use, once all work of the device has ended.
    pub(crate) fn give_up(&self, base: DevicePtr) {
        self.blocks.forget(base);
        let leftover = Leftover::Memory(self.memory, base);
        self.context.leftovers.add(leftover);
    }

    /// Waits with `wait` for all work of the device, and frees what this allows.
    pub(super) fn synchronize(&self, wait: impl FnOnce(&Context) -> Result<()>) -> Result<()> {
        let (context, leftovers) = (&self.context, &self.context.leftovers);
        // Other threads of the parent process may have held the locks.
        context.check_process()?;
        let left = leftovers.take();
        let done = wait(context);
        let settled = done.is_ok() || context.has_failed();
        let something = !left.is_empty()
            || !leftovers.is_empty()
            || self.blocks.is_over()
            || self.page_locked.has_idle();
        // Other threads may have queued work since.
        let quiet = settled && something && context.is_quiet();
        context.free_leftovers(left, quiet);
        if quiet {
            self.blocks.free_idle(context, false);
            self.page_locked.free_idle(context);
        }
        done
    }

    /// Waits for the work of the device's queues, and frees all that is idle. Nothing but the
    /// pool's memory is freed while a queue's stream is being captured.
    pub(super) fn trim(&self) {
        let (context, leftovers) = (&self.context, &self.context.leftovers);
        let left = leftovers.take();
        let waited = context.wait_for_queues();
        let of_unknown = |left: &Leftover| matches!(left, Leftover::Memory(..));
        // Of this memory not only the device's own queues are waited for.
        let settled = waited
            && left.iter().any(of_unknown)
            && (context.synchronize().is_ok() || context.has_failed());
        context.free_leftovers(left, settled);
        if waited {
            self.blocks.free_idle(context, true);
            self.page_locked.free_idle(context);
        }
        self.page_locked.ask_again();
        let _ = context.trim_pool();
    }

    /// Frees idle memory for an allocation that found too little, if the device has no work, or,
    /// with `wait`, once its work has ended. Returns false if the work cannot be waited for.
    pub(super) fn make_room(&self, wait: bool) -> bool {
        let context = &self.context;
        if wait && !context.wait_for_queues() {
            return false;
        }
        context.retry_leftovers();
        // After a wait, work that other threads have queued since is no reason to keep what was
        // idle before it: each block has its event.
        if !self.blocks.is_empty() && (wait || context.is_quiet()) {
            self.blocks.free_idle(context, true);
        }
        let _ = context.trim_pool();
        true
    }

    /// Frees idle blocks beyond the limit before another block is allocated, if the device has no
    /// work. Far beyond the limit its work is waited for.
    pub(super) fn shrink(&self) {
        let (context, blocks) = (&self.context, &self.blocks);
        let waited = blocks.is_far_over() && context.wait_for_queues();
        if blocks.is_over() && (waited || context.is_quiet()) {
            blocks.free_idle(context, false);
        }
    }

    fn is_clear(&self) -> bool {
        self.blocks.is_empty() && !self.page_locked.has_idle() && self.context.leftovers.is_empty()
    }

    /// Waits until all work has ended, and frees everything.
    fn free_all(&self) {
        let (context, mut pause) = (&self.context, Duration::from_millis(1));
        loop {
            let left = context.leftovers.take();
            let waited = context.wait_for_queues();
            // Of this memory not only the device's own queues are waited for. Otherwise the context
            // is left alone: waiting for it would end other libraries' captures.
            let of_unknown = left.iter().any(|left| matches!(left, Leftover::Memory(..)));
            if of_unknown {
                // Even after an error nothing runs any more.
                let _ = context.settle();
            }
            context.free_leftovers(left, of_unknown);
            if waited {
                self.blocks.free_idle(context, true);
                self.page_locked.free_idle(context);
            }
            if self.is_clear() || context.is_shut_down() {
                return;
            }
            // What a capture forbids.
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }
}

/// The end of a device: frees what it has kept.
pub(super) struct End(pub(super) Shared);

impl Drop for End {
    fn drop(&mut self) {
        if self.0.context.is_forked() || self.0.is_clear() {
            return;
        }
        // The drop of a device waits for nothing, unless the system starts no thread.
        let shared = self.0.clone();
        Worker::new("arrow-device gpu free").push(move || shared.free_all());
    }
}
