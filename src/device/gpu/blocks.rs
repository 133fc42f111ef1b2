//! Reuse of memory that a library allocates slowly and frees only after waiting for the device:
//! page-locked and managed memory, and device memory where there are no pools.

use super::context::{Context, EventCell};
use super::entry::Current;
use super::runtime::Memory;
use crate::device::backend::DevicePtr;
use crate::device::parts::{Block, Pool, Ranges};
use crate::error::Result;

/// From this multiple of the pool's limits on, a new block is allocated only after a wait for the
/// device.
const FAR: usize = 4;

/// Allocates memory of one kind, without a retry.
pub(super) fn allocate(
    context: &Context,
    memory: Memory,
    bytes: usize,
    current: &Current<'_>,
) -> Result<DevicePtr> {
    context.check_memory(current.allocate(memory, bytes), bytes)
}

/// Blocks of one kind of memory.
pub(crate) struct Blocks {
    memory: Memory,
    /// Those in use.
    live: Ranges<()>,
    pool: Pool<Box<EventCell>>,
}

impl Blocks {
    pub(super) fn new(memory: Memory) -> Self {
        Self {
            memory,
            live: Ranges::new(),
            pool: Pool::new(),
        }
    }

    /// Returns the number of bytes that are allocated for `bytes` bytes.
    fn round(&self, context: &Context, bytes: usize) -> Result<usize> {
        let rounded = Pool::<Box<EventCell>>::rounded(bytes);
        rounded.ok_or_else(|| context.out_of_memory(context.api().allocate(self.memory), bytes))
    }

    /// Returns an idle block of at least `bytes` bytes, for work on `queue` from now on, if one
    /// fits.
    pub(super) fn reuse(
        &self,
        context: &Context,
        queue: u64,
        bytes: usize,
        current: &Current<'_>,
    ) -> Result<Option<DevicePtr>> {
        let bytes = self.round(context, bytes)?;
        let taken = self
            .pool
            .take(queue, bytes, |after| is_done(current, after));
        Ok(taken.map(
            |Block {
                 base, bytes, after, ..
             }| {
                self.live.insert(base, bytes, ());
                context.recycle(after);
                base
            },
        ))
    }

    /// Allocates a block of at least `bytes` bytes.
    pub(super) fn allocate(
        &self,
        context: &Context,
        bytes: usize,
        current: &Current<'_>,
    ) -> Result<DevicePtr> {
        let bytes = self.round(context, bytes)?;
        let base = allocate(context, self.memory, bytes, current)?;
        self.live.insert(base, bytes, ());
        Ok(base)
    }

    /// Takes a block back after all work of a queue so far, which `after` stands for.
    pub(super) fn give_back(
        &self,
        base: DevicePtr,
        bytes: usize,
        queue: u64,
        after: Box<EventCell>,
    ) {
        // Adopted memory is not in the table.
        let bytes = self.live.remove(base).map_or(bytes, |(bytes, ())| bytes);
        self.pool.give(Block {
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

    /// Whether there are no idle blocks.
    pub(super) fn is_empty(&self) -> bool {
        self.pool.is_empty()
    }

    /// Whether there are more idle blocks than are kept for reuse.
    pub(super) fn is_over(&self) -> bool {
        self.pool.is_over(1)
    }

    /// Whether there are so many idle blocks that the device is waited for to free some.
    pub(super) fn is_far_over(&self) -> bool {
        self.pool.is_over(FAR)
    }

    /// Frees idle blocks that nothing uses any more: the oldest, until the rest is within the
    /// limits; or all.
    pub(super) fn free_idle(&self, context: &Context, all: bool) {
        let Ok(current) = context.enter_even_if_failed() else {
            return;
        };
        let done = self.pool.take_done(all, |after| {
            // Of a failed device nothing runs any more.
            context.has_failed() || is_done(&current, after)
        });
        for block in done {
            // SAFETY: the block is from `allocate` for this kind of memory, was taken out of the
            // pool, and its event has completed.
            if unsafe { current.try_free(self.memory, block.base) } {
                context.recycle(block.after);
            } else {
                self.pool.give(block);
            }
        }
    }
}

/// Whether one of our own events has completed.
fn is_done(current: &Current<'_>, event: &EventCell) -> bool {
    // SAFETY: the cell owns its event, which is live while the cell is.
    unsafe { current.query(event.raw()) == Ok(true) }
}
