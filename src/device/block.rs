//! Pieces of host memory without an owner, and the pool that keeps idle ones.

use std::alloc::{self, Layout};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::DeviceId;
use crate::device::backend::{Backend, DevicePtr};
use crate::device::cpu::ALIGNMENT;
use crate::error::{Error, Result};

/// Most bytes of idle blocks that a pool keeps, unless it is told otherwise.
const IDLE_LIMIT: usize = 1 << 30;
/// Most idle blocks.
const IDLE_BLOCKS: usize = 1024;
/// Blocks of at least this many bytes are rounded up to a multiple of it, so that they fit again.
const GRAIN: usize = 64 << 10;

/// Initialised host memory, 64-byte aligned. Whoever has it frees it.
#[derive(Debug)]
pub(crate) struct Block {
    ptr: NonNull<u8>,
    /// Bytes.
    capacity: usize,
    kind: Kind,
}

/// Where a block comes from.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// The global allocator.
    Heap,
    /// A mapping of its own, with large pages if the system has some to spare.
    #[cfg(all(target_os = "linux", not(miri)))]
    Mapped,
    /// [`Backend::allocate_host`].
    Locked,
}

// SAFETY: the block is plain memory that only its holder reaches.
unsafe impl Send for Block {}
// SAFETY: a shared reference gives shared reads only.
unsafe impl Sync for Block {}

/// The capacity (bytes) of a block for `bytes` bytes.
pub(crate) fn round(bytes: usize) -> Option<usize> {
    let grain = if bytes >= GRAIN { GRAIN } else { ALIGNMENT };
    bytes.max(1).checked_next_multiple_of(grain)
}

fn layout(capacity: usize) -> Option<Layout> {
    Layout::from_size_align(capacity, ALIGNMENT).ok()
}

impl Block {
    /// Ordinary memory, all zero. `capacity` is of [`round`]; `None` if there is not enough.
    pub(crate) fn ordinary(capacity: usize) -> Option<Self> {
        let layout = layout(capacity)?;
        #[cfg(all(target_os = "linux", not(miri)))]
        if capacity >= large::LEAST {
            return Some(Self {
                ptr: large::map(capacity)?,
                capacity,
                kind: Kind::Mapped,
            });
        }
        // SAFETY: `round` gives no 0.
        let ptr = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?;
        Some(Self {
            ptr,
            capacity,
            kind: Kind::Heap,
        })
    }

    /// Memory that `backend` copies from fastest, if it has any.
    pub(crate) fn locked(backend: &dyn Backend, capacity: usize) -> Result<Option<Self>> {
        let Some(ptr) = backend.allocate_host(capacity)? else {
            return Ok(None);
        };
        let ptr = NonNull::new(ptr.as_ptr().cast::<u8>()).ok_or_else(|| {
            let device = backend.id();
            out_of_memory(device, capacity)
        })?;
        // SAFETY: the backend gave writable memory of this size. Written once, so that safe code may
        // view it as bytes.
        unsafe { ptr.as_ptr().write_bytes(0, capacity) };
        Ok(Some(Self {
            ptr,
            capacity,
            kind: Kind::Locked,
        }))
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// The same block once more, for a holder that is being dropped.
    pub(crate) fn take(&mut self) -> Self {
        Self { ..*self }
    }

    /// `backend` is the one that it came from, if it came from one.
    pub(crate) fn free(self, backend: Option<&dyn Backend>) {
        match self.kind {
            Kind::Heap => {
                if let Some(layout) = layout(self.capacity) {
                    // SAFETY: `ordinary` allocated it with this layout.
                    unsafe { alloc::dealloc(self.ptr.as_ptr(), layout) }
                }
            }
            #[cfg(all(target_os = "linux", not(miri)))]
            // SAFETY: `ordinary` mapped it with this length; its holder gave it up.
            Kind::Mapped => unsafe { large::unmap(self.ptr, self.capacity) },
            Kind::Locked => {
                if let Some(backend) = backend {
                    // SAFETY: the block came from this backend with this size; its holder gave it
                    // up, and holders outlive the copies that use it (`Queue::keep_until_done`, host
                    // wait).
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

/// Mappings in large pages: several times faster than small ones where memory is used first.
#[cfg(all(target_os = "linux", not(miri)))]
mod large {
    use std::ptr::{self, NonNull};

    /// Fewest bytes of a mapping.
    pub(crate) const LEAST: usize = 4 << 20;
    /// Bytes of a large page on most machines. Elsewhere a mapping is well aligned, and no more.
    const PAGE: usize = 2 << 20;

    /// `bytes` bytes, all zero, that nobody has touched yet. A multiple of the small page's size.
    pub(crate) fn map(bytes: usize) -> Option<NonNull<u8>> {
        let reserved = bytes.checked_add(PAGE)?;
        // SAFETY: a new mapping where the system likes.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        let before = start.addr().next_multiple_of(PAGE) - start.addr();
        let block = start.wrapping_byte_add(before);
        let end = block.wrapping_byte_add(bytes);
        // SAFETY: what lies before and behind the block is of the mapping above, and unused. Without
        // large pages the block is as good, but slower.
        unsafe {
            if before > 0 {
                libc::munmap(start, before);
            }
            if before < PAGE {
                libc::munmap(end, PAGE - before);
            }
            libc::madvise(block, bytes, libc::MADV_HUGEPAGE);
        }
        NonNull::new(block.cast())
    }

    /// # Safety
    /// From [`map`] with this length, not used any more.
    pub(crate) unsafe fn unmap(block: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's.
        unsafe { libc::munmap(block.as_ptr().cast(), bytes) };
    }
}

/// Idle blocks of one device.
///
/// What a program has used at once comes back here and serves again; when it is more than the limit,
/// what has not been used for longest goes.
pub(crate) struct SlabPool(Mutex<Idle>);

struct Idle {
    /// By capacity, equal ones in the order in which they came back.
    blocks: Vec<(Block, u64)>,
    /// How many blocks are out, which find room when they come back: that allocates nothing.
    out: usize,
    /// How many have come back: what a block's number counts.
    returns: u64,
    /// Of all blocks.
    bytes: usize,
    /// Most of them.
    limit: usize,
}

impl Default for SlabPool {
    fn default() -> Self {
        Self(Mutex::new(Idle {
            blocks: Vec::new(),
            out: 0,
            returns: 0,
            bytes: 0,
            limit: IDLE_LIMIT,
        }))
    }
}

impl Idle {
    /// How many blocks have less than `capacity` bytes.
    fn smaller(&self, capacity: usize) -> usize {
        let smaller = |(block, _): &(Block, u64)| block.capacity < capacity;
        self.blocks.partition_point(smaller)
    }

    fn remove(&mut self, i: usize) -> Block {
        let (block, _) = self.blocks.remove(i);
        self.bytes -= block.capacity;
        block
    }

    /// Takes out what is too much: of too many blocks the smallest, which are cheap to make, of too
    /// many bytes the oldest.
    fn excess(&mut self) -> Vec<Block> {
        let mut excess = Vec::new();
        loop {
            let ages = self.blocks.iter().map(|(_, age)| *age).enumerate();
            let i = if self.blocks.len() > IDLE_BLOCKS {
                0
            } else if self.bytes > self.limit {
                ages.min_by_key(|(_, age)| *age).map_or(0, |(i, _)| i)
            } else {
                return excess;
            };
            excess.push(self.remove(i));
        }
    }
}

impl SlabPool {
    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of the smallest idle blocks that fit the one used last, whose memory may still be cached: at most
    /// twice what is asked for, small ones apart.
    pub(crate) fn take(&self, capacity: usize) -> Option<Block> {
        let mut idle = self.lock();
        idle.out = (idle.out + 1).min(IDLE_BLOCKS + 1);
        let most = capacity.saturating_mul(2).max(GRAIN);
        let smallest = idle.blocks.get(idle.smaller(capacity));
        let smallest = smallest.map(|(block, _)| block.capacity);
        let Some(smallest) = smallest.filter(|smallest| *smallest <= most) else {
            let room = idle.out;
            idle.blocks.reserve(room);
            return None;
        };
        let last = idle.smaller(smallest + 1) - 1;
        Some(idle.remove(last))
    }

    /// Keeps a block for reuse. What is too much now is to be freed.
    #[must_use]
    pub(crate) fn give_back(&self, block: Block) -> Vec<Block> {
        let mut idle = self.lock();
        idle.out = idle.out.saturating_sub(1);
        if block.capacity > idle.limit {
            return vec![block];
        }
        idle.returns += 1;
        idle.bytes += block.capacity;
        let (at, age) = (idle.smaller(block.capacity + 1), idle.returns);
        idle.blocks.insert(at, (block, age));
        idle.excess()
    }

    /// Keeps at most `bytes` bytes from now on. What is too much is to be freed.
    #[must_use]
    pub(crate) fn set_limit(&self, bytes: usize) -> Vec<Block> {
        let mut idle = self.lock();
        idle.limit = bytes;
        idle.excess()
    }

    /// Frees all idle blocks.
    pub(crate) fn clear(&self, backend: &dyn Backend) {
        let blocks = {
            let mut idle = self.lock();
            idle.bytes = 0;
            std::mem::take(&mut idle.blocks)
        };
        for (block, _) in blocks {
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

    fn pool(limit: usize) -> SlabPool {
        let pool = SlabPool::default();
        assert!(pool.set_limit(limit).is_empty());
        pool
    }

    fn free(blocks: Vec<Block>) -> Vec<usize> {
        let capacities = blocks.iter().map(|block| block.capacity).collect();
        blocks.into_iter().for_each(|block| block.free(None));
        capacities
    }

    /// Gives new blocks back; the capacities (KiB) of what was too much each time.
    fn fill(pool: &SlabPool, capacities: &[usize]) -> Vec<Vec<usize>> {
        let give = |kib: &usize| {
            let block = Block::ordinary(round(kib * KIB).unwrap()).unwrap();
            let excess = free(pool.give_back(block));
            excess.into_iter().map(|bytes| bytes / KIB).collect()
        };
        capacities.iter().map(give).collect()
    }

    fn take(pool: &SlabPool, kib: usize) -> Option<usize> {
        let block = pool.take(kib * KIB)?;
        Some(free(vec![block])[0] / KIB)
    }

    #[test]
    fn the_oldest_goes_when_there_is_too_much() {
        let pool = pool(512 * KIB);
        let none = Vec::new;
        assert_eq!(
            fill(&pool, &[128, 256, 128, 192, 1024, 64]),
            [none(), none(), none(), vec![128, 256], vec![1024], none()]
        );
        // What was used last goes last.
        let kept = pool.take(128 * KIB).unwrap();
        assert!(pool.give_back(kept).is_empty());
        assert_eq!(fill(&pool, &[384]), [[192, 64]]);
        assert_eq!(free(pool.set_limit(0)), [128 * KIB, 384 * KIB]);
        assert_eq!(fill(&pool, &[64]), [[64]]);
        assert_eq!(take(&pool, 64), None);
    }

    #[test]
    fn the_smallest_go_when_there_are_too_many() {
        let pool = pool(1 << 30);
        fill(&pool, &vec![2; IDLE_BLOCKS]);
        assert_eq!(fill(&pool, &[1, 4, 4]), [[1], [2], [2]]);
        pool.clear(&HostBackend::new(DeviceId::CPU));
        assert_eq!(take(&pool, 1), None);
        assert_eq!(fill(&pool, &[1]), [[0; 0]]);
        pool.clear(&HostBackend::new(DeviceId::CPU));
    }

    #[test]
    fn the_smallest_that_fits_serves() {
        let pool = pool(1 << 30);
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
        // A batch of this size comes down again and again. Pages that nobody touches cost nothing.
        let bytes = if cfg!(miri) { 100_000 } else { 512 << 20 };
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
        device.set_idle_slab_limit(bytes / 2);
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
