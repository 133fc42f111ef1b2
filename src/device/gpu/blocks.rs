//! Reuse of memory that a library allocates slowly and frees only after waiting for the device:
//! page-locked and managed memory, and device memory where there are no pools.
//!
//! Such a free may wait for the device with a lock of the library held, so that a host function that
//! waits for another thread's call of the library never returns (reported for `cuMemFree` and
//! `cuMemFreeHost`). So nothing is freed when it is dropped, but where the device is waited for
//! anyway ([`Backend::synchronize`](crate::device::Backend::synchronize)).

use std::sync::atomic::{AtomicUsize, Ordering};

use super::entry::Current;
use super::event::EventCell;
use super::runtime::Memory;
use crate::device::backend::{AddressClass, DevicePtr};
use crate::device::parts::{Block, Pool, Ranges};

/// From this multiple of the pool's limits on, a new block is allocated only after a wait for the
/// device.
const FAR: usize = 4;

/// A block with an event after its last use, unless that was waited for.
type Idle = Block<Option<Box<EventCell>>>;

/// Blocks of one kind of memory.
pub(crate) struct Blocks {
    pub(super) memory: Memory,
    /// Most bytes, of those in use and idle ones together, and how many there are.
    limit: usize,
    held: AtomicUsize,
    /// Those in use.
    live: Ranges<()>,
    /// Idle ones.
    idle: Pool<Option<Box<EventCell>>>,
}

impl Blocks {
    pub(super) fn new(memory: Memory, limit: usize) -> Self {
        Self {
            memory,
            limit,
            held: AtomicUsize::new(0),
            live: Ranges::new(),
            idle: Pool::new(),
        }
    }

    /// Returns the number of bytes that are allocated for `bytes` bytes.
    pub(super) fn rounded(bytes: usize) -> Option<usize> {
        Pool::<Option<Box<EventCell>>>::rounded(bytes)
    }

    /// Takes out an idle block of at least `bytes` bytes, for work on `queue` from now on.
    pub(super) fn reuse(&self, queue: u64, bytes: usize, current: &Current<'_>) -> Option<Idle> {
        let is_done = |after: &_| is_done(current, after);
        let block = self.idle.take(queue, bytes, is_done)?;
        self.live.insert(block.base, block.bytes, ());
        Some(block)
    }

    /// Whether another `bytes` bytes are too many beside all that there is.
    pub(super) fn is_full(&self, bytes: usize) -> bool {
        let held = self.held.load(Ordering::Relaxed);
        held.saturating_add(bytes) > self.limit
    }

    /// Whether so much is idle that the device is waited for to free some before another `bytes`
    /// bytes are allocated.
    pub(super) fn needs_wait(&self, bytes: usize) -> bool {
        self.idle.is_over(FAR) || (self.is_full(bytes) && !self.idle.is_empty())
    }

    /// Adds a block in use.
    pub(super) fn add(&self, base: DevicePtr, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        self.live.insert(base, bytes, ());
    }

    /// Takes a block back; `after` stands for all work of a queue so far.
    pub(super) fn give_back(
        &self,
        base: DevicePtr,
        bytes: usize,
        queue: u64,
        after: Option<Box<EventCell>>,
    ) {
        let known = self.live.remove(base);
        if known.is_none() {
            // Adopted memory is not in the table.
            self.held.fetch_add(bytes, Ordering::Relaxed);
        }
        let bytes = known.map_or(bytes, |(bytes, ())| bytes);
        self.idle.give(Block {
            base,
            bytes,
            queue,
            after,
        });
    }

    /// Forgets a block that does not belong to the device any more.
    pub(crate) fn forget(&self, base: DevicePtr) {
        if let Some((bytes, ())) = self.live.remove(base) {
            self.held.fetch_sub(bytes, Ordering::Relaxed);
        }
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

    /// Takes out idle blocks that nothing uses any more: the oldest, until the rest is within the
    /// pool's limits; or all. `failed`: nothing of the device runs any more.
    pub(super) fn take_done(&self, all: bool, failed: bool, current: &Current<'_>) -> Vec<Idle> {
        let is_done = |after: &_| failed || is_done(current, after);
        let done = self.idle.take_done(all, is_done);
        let bytes = done.iter().map(|block| block.bytes).sum();
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        done
    }
}

/// Whether one of our own events has completed.
fn is_done(current: &Current<'_>, event: &Option<Box<EventCell>>) -> bool {
    // SAFETY: the cell owns its event, which is live while the cell is.
    let query = |event: &EventCell| unsafe { current.api().query_event(event.raw()) };
    event.as_deref().is_none_or(|event| query(event).is_ok())
}
