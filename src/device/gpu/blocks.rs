//! Reuse of memory that a library allocates slowly and frees only after waiting for the device:
//! page-locked and managed memory, and device memory where there are no pools.
//!
//! Such a free may wait for the device with a lock of the library held, so that a host function that
//! waits for another thread's call of the library never returns (reported for `cuMemFree` and
//! `cuMemFreeHost`). So nothing is freed when it is dropped, but where the device is waited for
//! anyway ([`Context::synchronize`]).

use super::context::{Context, EventCell};
use super::entry::Current;
use super::runtime::Memory;
use crate::device::backend::{AddressClass, DevicePtr};
use crate::device::parts::{Block, Pool, Ranges};
use crate::error::Result;

/// From this multiple of the pool's limits on, a new block is allocated only after a wait for the
/// device.
const FAR: usize = 4;

/// Blocks of one kind of memory.
pub(crate) struct Blocks {
    pub(super) memory: Memory,
    /// Most bytes, of those in use and idle ones together.
    limit: usize,
    /// Those in use.
    live: Ranges<()>,
    /// Idle ones, with an event after their last use, unless that was waited for.
    idle: Pool<Option<Box<EventCell>>>,
}

impl Blocks {
    pub(super) fn new(memory: Memory, limit: usize) -> Self {
        Self {
            memory,
            limit,
            live: Ranges::new(),
            idle: Pool::new(),
        }
    }

    /// Returns a block of at least `bytes` bytes, for work on `queue` from now on.
    pub(super) fn allocate(
        &self,
        context: &Context,
        queue: u64,
        bytes: usize,
        current: &Current<'_>,
    ) -> Result<DevicePtr> {
        let call = current.allocation_call(self.memory);
        let rounded = Pool::<Option<Box<EventCell>>>::rounded(bytes);
        let rounded = rounded.ok_or_else(|| context.out_of_memory(call, bytes))?;
        let is_done = |after: &_| is_done(current, after);
        if let Some(block) = self.idle.take(queue, rounded, is_done) {
            self.live.insert(block.base, block.bytes, ());
            context.recycle(block.after);
            return Ok(block.base);
        }
        let is_full = || {
            let held = self.live.bytes().saturating_add(self.idle.idle_bytes());
            held.saturating_add(rounded) > self.limit
        };
        if self.idle.is_over(FAR) || (is_full() && !self.idle.is_empty()) {
            context.synchronize()?;
        }
        if is_full() {
            return Err(context.out_of_memory(call, bytes));
        }
        let base = context.check_memory(current.allocate(self.memory, rounded), bytes)?;
        self.live.insert(base, rounded, ());
        Ok(base)
    }

    /// Takes a block back; `after` stands for all work of a queue so far.
    pub(super) fn give_back(
        &self,
        base: DevicePtr,
        bytes: usize,
        queue: u64,
        after: Option<Box<EventCell>>,
    ) {
        // Adopted memory is not in the table.
        let bytes = self.live.remove(base).map_or(bytes, |(bytes, ())| bytes);
        self.idle.give(Block {
            base,
            bytes,
            queue,
            after,
        });
    }

    /// Forgets a block that does not belong to the device any more.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.live.remove(base);
    }

    /// Whether all of these bytes are of one block in use.
    pub(super) fn has(&self, address: DevicePtr, bytes: usize) -> bool {
        let class = AddressClass::HostAccessible;
        self.live.classify(address, bytes, class) == Some(class)
    }

    /// Whether there are no idle blocks.
    pub(super) fn is_empty(&self) -> bool {
        self.idle.is_empty()
    }

    /// Frees idle blocks that nothing uses any more: the oldest, until the rest is within the
    /// pool's limits; or all.
    pub(super) fn free_idle(&self, context: &Context, all: bool, current: &Current<'_>) {
        // Of a failed device nothing runs any more.
        let is_done = |after: &_| context.has_failed() || is_done(current, after);
        for block in self.idle.take_done(all, is_done) {
            // SAFETY: the block is from `allocate` for this kind of memory, or of that kind and
            // adopted; it was taken out of the pool, and its event has completed.
            unsafe { current.free(self.memory, block.base) };
            context.recycle(block.after);
        }
    }
}

/// Whether one of our own events has completed.
fn is_done(current: &Current<'_>, event: &Option<Box<EventCell>>) -> bool {
    // SAFETY: the cell owns its event, which is live while the cell is.
    let query = |event: &EventCell| unsafe { current.api().query_event(event.raw()) };
    event.as_deref().is_none_or(|event| query(event).is_ok())
}
