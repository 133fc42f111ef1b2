//! Host memory for copies, and the pool that keeps what is idle.

use std::alloc::{self, Layout};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Mutex;

use crate::abi::DeviceId;
use crate::device::backend::{Backend, DevicePtr};
use crate::device::cpu::ALIGNMENT;
use crate::device::lock;
use crate::error::{Error, Result};

/// The default limit, in bytes, of the idle blocks of a pool.
const IDLE_LIMIT: usize = 1 << 30;
/// The limit of the number of idle blocks.
const IDLE_BLOCKS: usize = 1024;
/// Blocks of at least this many bytes are rounded up to a multiple of it, so that they can be
/// reused more often.
const GRAIN: usize = 64 << 10;

/// Initialised host memory, aligned to 64 bytes. It has no drop: its holder frees it.
#[derive(Debug)]
pub(crate) struct Block {
    ptr: NonNull<u8>,
    /// Bytes.
    capacity: usize,
    kind: Kind,
}

/// Where a block was allocated.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// The global allocator.
    Heap,
    /// [`Backend::allocate_host`].
    Locked,
}

// SAFETY: the block is plain memory that only its holder accesses, and any thread may free it.
unsafe impl Send for Block {}
// SAFETY: a shared reference only allows reading the address and capacity.
unsafe impl Sync for Block {}

/// Returns the capacity, in bytes, of a block for `bytes` bytes; never 0.
pub(crate) fn round(bytes: usize) -> Option<usize> {
    let grain = if bytes >= GRAIN { GRAIN } else { ALIGNMENT };
    bytes.max(1).checked_next_multiple_of(grain)
}

fn layout(capacity: usize) -> Option<Layout> {
    Layout::from_size_align(capacity, ALIGNMENT).ok()
}

impl Block {
    /// Allocates ordinary memory, all zero, of at least `capacity` bytes, which come from [`round`]. Returns
    /// `None` if there is not enough memory.
    pub(crate) fn ordinary(capacity: usize) -> Option<Self> {
        let layout = layout(capacity)?;
        // SAFETY: the size is not 0, because `round` never returns 0.
        let ptr = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?;
        Some(Self {
            ptr,
            capacity,
            kind: Kind::Heap,
        })
    }

    /// Allocates memory from which `backend` copies fastest; `None` if it has no such memory.
    pub(crate) fn locked(backend: &dyn Backend, capacity: usize) -> Result<Option<Self>> {
        let Some(ptr) = backend.allocate_host(capacity)? else {
            return Ok(None);
        };
        let ptr = NonNull::new(ptr.as_ptr().cast::<u8>()).ok_or_else(|| {
            let device = backend.capabilities().id;
            out_of_memory(device, capacity)
        })?;
        // Initialised once, so that safe code may view it as bytes.
        // SAFETY: `Backend::allocate_host` returns writable memory of this size.
        unsafe { ptr.as_ptr().write_bytes(0, capacity) };
        Ok(Some(Self {
            ptr,
            capacity,
            kind: Kind::Locked,
        }))
    }

    pub(crate) fn is_locked(&self) -> bool {
        matches!(self.kind, Kind::Locked)
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns a copy of the block, for a holder that is being dropped.
    pub(crate) fn take(&mut self) -> Self {
        Self { ..*self }
    }

    /// Frees the block. `backend` is the one that allocated it, if one did.
    pub(crate) fn free(self, backend: Option<&dyn Backend>) {
        match self.kind {
            Kind::Heap => {
                if let Some(layout) = layout(self.capacity) {
                    // SAFETY: `ordinary` allocated the block with this layout, and its holder does
                    // not use it any more.
                    unsafe { alloc::dealloc(self.ptr.as_ptr(), layout) }
                }
            }
            Kind::Locked => {
                if let Some(backend) = backend {
                    // SAFETY: `locked` allocated the block from this backend with this size. Its
                    // holder does not use it any more, and holders outlive the copies that use it
                    // (`Queue::keep_until_done`, `Reading`).
                    unsafe {
                        backend.free_host(DevicePtr::new(self.ptr.as_ptr().cast()), self.capacity)
                    }
                }
            }
        }
    }
}

pub(crate) fn out_of_memory(device: DeviceId, bytes: usize) -> Error {
    Error::OutOfMemory {
        device,
        operation: "host slab",
        bytes,
    }
}

/// The idle blocks of one device, which are reused. Beyond a limit, those that have been idle for
/// longest are freed.
pub(crate) struct HostPool {
    idle: Mutex<Idle>,
    /// The limit of the bytes that are idle.
    limit: usize,
}

#[derive(Default)]
struct Idle {
    /// In the order of their return.
    blocks: VecDeque<Block>,
    /// The sum of the capacities.
    bytes: usize,
}

impl Default for HostPool {
    fn default() -> Self {
        Self::with_limit(IDLE_LIMIT)
    }
}

impl HostPool {
    fn with_limit(limit: usize) -> Self {
        Self {
            idle: Mutex::default(),
            limit,
        }
    }

    /// Returns an idle block of at least `capacity` bytes, and at most twice that unless it is
    /// small. Of the smallest such blocks it is the one that was used last, whose memory may still
    /// be cached.
    pub(crate) fn take(&self, capacity: usize) -> Option<Block> {
        let fits = capacity..=capacity.saturating_mul(2).max(GRAIN);
        let mut idle = lock(&self.idle);
        let newest_first = || idle.blocks.iter().enumerate().rev();
        let exact = newest_first().find(|(_, block)| block.capacity == capacity);
        let (i, _) = exact.or_else(|| {
            let fitting = newest_first().filter(|(_, block)| fits.contains(&block.capacity));
            fitting.min_by_key(|(_, block)| block.capacity)
        })?;
        let block = idle.blocks.remove(i)?;
        idle.bytes -= block.capacity;
        Some(block)
    }

    /// Keeps a block for reuse. Returns blocks beyond the limits, which the caller frees.
    #[must_use]
    pub(crate) fn give_back(&self, block: Block) -> Vec<Block> {
        if block.capacity > self.limit {
            return vec![block];
        }
        let mut idle = lock(&self.idle);
        idle.bytes += block.capacity;
        idle.blocks.push_back(block);
        let mut excess = Vec::new();
        while idle.blocks.len() > IDLE_BLOCKS || idle.bytes > self.limit {
            let Some(block) = idle.blocks.pop_front() else {
                break;
            };
            idle.bytes -= block.capacity;
            excess.push(block);
        }
        excess
    }

    /// Frees all idle blocks.
    pub(crate) fn clear(&self, backend: &dyn Backend) {
        let idle = std::mem::take(&mut *lock(&self.idle));
        for block in idle.blocks {
            block.free(Some(backend));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::device::Device;
    use crate::device::HostBackend;

    const KIB: usize = 1 << 10;

    fn free(blocks: Vec<Block>) -> Vec<usize> {
        let capacities = blocks.iter().map(|block| block.capacity).collect();
        blocks.into_iter().for_each(|block| block.free(None));
        capacities
    }

    /// Returns new blocks to the pool, and the capacities (KiB) of the blocks beyond the limits
    /// each time.
    fn fill(pool: &HostPool, capacities: &[usize]) -> Vec<Vec<usize>> {
        let give = |kib: &usize| {
            let block = Block::ordinary(round(kib * KIB).unwrap()).unwrap();
            let excess = free(pool.give_back(block));
            excess.into_iter().map(|bytes| bytes / KIB).collect()
        };
        capacities.iter().map(give).collect()
    }

    fn take(pool: &HostPool, kib: usize) -> Option<usize> {
        let block = pool.take(kib * KIB)?;
        Some(free(vec![block])[0] / KIB)
    }

    #[test]
    fn the_oldest_goes_when_there_is_too_much() {
        let pool = HostPool::with_limit(512 * KIB);
        let none = Vec::new;
        assert_eq!(
            fill(&pool, &[128, 256, 128, 192, 1024, 64]),
            [none(), none(), none(), vec![128, 256], vec![1024], none()]
        );
        // What was used last is freed last.
        let kept = pool.take(128 * KIB).unwrap();
        assert!(pool.give_back(kept).is_empty());
        assert_eq!(fill(&pool, &[384]), [[192, 64]]);
        pool.clear(&HostBackend::new(DeviceId::CPU));
    }

    #[test]
    fn the_oldest_goes_when_there_are_too_many() {
        let pool = HostPool::with_limit(1 << 30);
        fill(&pool, &vec![2; IDLE_BLOCKS]);
        assert_eq!(fill(&pool, &[1, 4]), [[2], [2]]);
        pool.clear(&HostBackend::new(DeviceId::CPU));
        assert_eq!(take(&pool, 1), None);
        assert_eq!(fill(&pool, &[1]), [[0; 0]]);
        pool.clear(&HostBackend::new(DeviceId::CPU));
    }

    #[test]
    fn the_smallest_that_fits_serves() {
        let pool = HostPool::with_limit(1 << 30);
        fill(&pool, &[512, 256, 128, 8, 4]);
        assert_eq!(take(&pool, 192), Some(256));
        assert_eq!(take(&pool, 192), None, "more than twice as large");
        assert_eq!(take(&pool, 2), Some(4));
        assert_eq!(take(&pool, 2), Some(8), "small ones may be any");
        // The last one of equals.
        let [a, b] = [0; 2].map(|_| Block::ordinary(round(KIB).unwrap()).unwrap());
        let last = b.ptr;
        for block in [a, b] {
            assert!(pool.give_back(block).is_empty());
        }
        let taken = pool.take(KIB).unwrap();
        assert_eq!(taken.ptr, last);
        taken.free(None);
        pool.clear(&HostBackend::new(DeviceId::CPU));
    }

    #[test]
    fn large_slabs_are_zero_and_serve_again() {
        let device = Device::new(Arc::new(HostBackend::new(DeviceId::CPU))).unwrap();
        // As if batches of this size were downloaded again and again.
        let bytes = if cfg!(miri) { 100_000 } else { 8 << 20 };
        let mut first = None;
        for _ in 0..3 {
            let mut slab = device.host_slab(bytes).unwrap();
            let place = slab.as_device_ptr();
            assert_eq!(*first.get_or_insert(place), place);
            assert_eq!(place.address() % ALIGNMENT, 0);
            slab[bytes - 1] = 7;
            slab[0] = 7;
        }
        assert_eq!(device.stats().host_allocations, 1);
        device.trim();
        for bytes in [bytes, bytes / 8] {
            let slab = device.host_slab(bytes).unwrap();
            assert!(
                slab[..64]
                    .iter()
                    .chain(&slab[bytes - 64..])
                    .all(|b| *b == 0)
            );
        }
        assert_eq!(device.stats().host_allocations, 3);
    }
}
