//! Device memory: what is live, and what was freed and waits for its next use.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

use arrow_device::device::parts::{Block, Pool, Ranges};
use arrow_device::device::{AddressClass, DevicePtr, PointerInfo};
use arrow_device::{DeviceId, Error, Result};

use super::event::Event;

/// Memory that was freed, and the event after its last use.
type Freed = Block<Arc<Event>>;

#[derive(Debug)]
pub(crate) struct Memory {
    id: DeviceId,
    /// The allocations that the program holds, each with the length of its block.
    live: Ranges<usize>,
    pool: Pool<Arc<Event>>,
}

impl Memory {
    pub(crate) fn new(id: DeviceId) -> Self {
        Self {
            id,
            live: Ranges::new(),
            pool: Pool::default(),
        }
    }

    /// Returns memory for the work of a queue from now on.
    pub(crate) fn allocate(&self, queue: u64, bytes: usize) -> Result<DevicePtr> {
        if bytes == 0 {
            return Err(Error::InvalidArgument("an allocation of 0 bytes".into()));
        }
        let out_of_memory = || Error::OutOfMemory {
            device: self.id,
            operation: "allocate",
            bytes,
        };
        let room = Pool::<Arc<Event>>::rounded(bytes).ok_or_else(out_of_memory)?;
        let (base, room) = match self.pool.take(queue, room, |after| after.is_done()) {
            Some(block) => (block.base, block.bytes),
            None => {
                self.free_idle(false);
                let again = || {
                    self.free_idle(true);
                    allocate_now(room)
                };
                let base = allocate_now(room).or_else(again);
                (base.ok_or_else(out_of_memory)?, room)
            }
        };
        self.live.insert(base, bytes, room);
        Ok(base)
    }

    /// Keeps memory for its next use, which comes after the queue's work so far.
    pub(crate) fn free(&self, base: DevicePtr, queue: u64, after: Arc<Event>) {
        if let Some((_, bytes)) = self.live.remove(base) {
            self.pool.give(Block {
                base,
                bytes,
                queue,
                after,
            });
        }
    }

    /// Frees memory whose last use is over: what is too much to keep, or all of it.
    pub(crate) fn free_idle(&self, all: bool) {
        let done = self.pool.take_done(all, |after| after.is_done());
        done.into_iter().for_each(free_now);
    }

    pub(crate) fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let ours = self.live.classify(address, bytes, AddressClass::Device);
        // Other memory of the host: nothing is known about its length.
        ours.unwrap_or_else(|| PointerInfo::new(AddressClass::Unknown, address.range(bytes)))
    }

    /// Returns how many allocations are live, and whether others are kept for their next use.
    pub(crate) fn usage(&self) -> (usize, bool) {
        (self.live.len(), !self.pool.is_empty())
    }
}

impl Drop for Memory {
    /// Never runs in a forked child: the threads that hold the device do not end there.
    fn drop(&mut self) {
        for block in self.pool.take_all() {
            block.after.wait();
            free_now(block);
        }
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, 64).ok()
}

/// Allocates as the runtime does.
fn allocate_now(bytes: usize) -> Option<DevicePtr> {
    let layout = layout(bytes).filter(|layout| layout.size() > 0)?;
    // SAFETY: the layout is not empty. The memory is zeroed, because the host may read memory of a
    // host-readable device before anything has written it.
    let memory = unsafe { alloc_zeroed(layout) };
    (!memory.is_null()).then(|| DevicePtr::new(memory.cast()))
}

/// Frees as the runtime does, after the last use. A runtime whose free waits for the device is
/// called on a thread of its own: see `parts::Worker`.
fn free_now(block: Freed) {
    if let Some(layout) = layout(block.bytes) {
        // SAFETY: `allocate_now` returned the block with this length. It is in no other place, since
        // it came out of the pool, and the event after its last use has completed.
        unsafe { dealloc(block.base.as_ptr().cast(), layout) }
    }
}
