//! Host memory for copies, and the pool that keeps what is idle.

use std::alloc::{self, Layout};
use std::ptr::NonNull;

use crate::device::backend::{Backend, DevicePtr, out_of_memory};
use crate::device::cpu::ALIGNMENT;
use crate::device::engine::pool::{Block as Idle, Pool};
use crate::error::Result;

/// The default limit, in bytes, of the idle blocks of a pool.
pub(crate) const IDLE_LIMIT: usize = 1 << 30;
/// Blocks belong to no queue: no work uses what is idle.
const NO_QUEUE: u64 = 0;

/// Initialised host memory, aligned to 64 bytes. It has no drop: its holder frees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) ptr: NonNull<u8>,
    /// Bytes.
    capacity: usize,
    /// Whether it is from [`Backend::allocate_host`], and not from the global allocator.
    pub(crate) is_locked: bool,
}

// SAFETY: the block is plain memory that only its holder accesses, and any thread may free it.
unsafe impl Send for Block {}
// SAFETY: a shared reference only allows reading the address and capacity.
unsafe impl Sync for Block {}

fn layout(capacity: usize) -> Option<Layout> {
    Layout::from_size_align(capacity, ALIGNMENT).ok()
}

impl Block {
    /// Allocates `capacity` bytes, which come from [`Pool::rounded`]: of the memory from which `backend` copies fastest if it has such
    /// memory, and else of ordinary memory.
    pub(crate) fn new(backend: &dyn Backend, capacity: usize) -> Result<Self> {
        let locked = backend.allocate_host(capacity)?;
        let ptr = match (locked, layout(capacity)) {
            (Some(ptr), _) => ptr.as_ptr().cast(),
            // SAFETY: the size is not 0, as is checked here.
            (None, Some(layout)) if capacity > 0 => unsafe { alloc::alloc_zeroed(layout) },
            _ => std::ptr::null_mut(),
        };
        let Some(ptr) = NonNull::new(ptr) else {
            return Err(out_of_memory(
                backend.capabilities().id,
                "host buffer",
                capacity,
            ));
        };
        if locked.is_some() {
            // Initialised once, so that safe code may view it as bytes.
            // SAFETY: `Backend::allocate_host` returns writable memory of this size.
            unsafe { ptr.as_ptr().write_bytes(0, capacity) };
        }
        Ok(Self {
            ptr,
            capacity,
            is_locked: locked.is_some(),
        })
    }

    /// Frees the block. `backend` is the one that allocated it, if one did.
    pub(crate) fn free(self, backend: Option<&dyn Backend>) {
        if !self.is_locked {
            if let Some(layout) = layout(self.capacity) {
                // SAFETY: `new` allocated the block with this layout, and its holder does
                // not use it any more.
                unsafe { alloc::dealloc(self.ptr.as_ptr(), layout) }
            }
        } else if let Some(backend) = backend {
            let ptr = DevicePtr::new(self.ptr.as_ptr().cast());
            // SAFETY: `new` allocated the block from this backend with this size. Its
            // holder does not use it any more, and holders outlive the copies that use it
            // (`Queue::keep_until`, `Reading`).
            unsafe { backend.free_host(ptr, self.capacity) }
        }
    }
}

/// The idle blocks of one device, which are reused. Beyond a limit, those that have been idle for
/// longest are freed. It has no drop: its holder clears it.
pub(crate) type HostPool = Pool<Block>;

impl HostPool {
    /// Returns an idle block of at least `capacity` bytes, and at most twice that. Of the smallest such blocks it is the one that was
    /// used last, whose memory may still be cached.
    pub(crate) fn take_block(&self, capacity: usize) -> Option<Block> {
        Some(self.take(NO_QUEUE, capacity, |_| true)?.after)
    }

    /// Keeps a block for reuse, and frees blocks beyond the limit. `backend` is the one that allocated them.
    pub(crate) fn give_back(&self, block: Block, backend: &dyn Backend) {
        self.give(Idle {
            base: DevicePtr::NULL,
            bytes: block.capacity,
            queue: NO_QUEUE,
            after: block,
        });
        free(self.take_done(false, |_| true), backend);
    }

    /// Frees all idle blocks.
    pub(crate) fn clear(&self, backend: &dyn Backend) {
        free(self.take_done(true, |_| true), backend);
    }
}

fn free(idle: Vec<Idle<Block>>, backend: &dyn Backend) {
    for idle in idle {
        idle.after.free(Some(backend));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::abi::DeviceId;
    use crate::device::Device;
    use crate::device::HostBackend;

    const KIB: usize = 1 << 10;

    fn block(bytes: usize) -> Block {
        let capacity = Pool::<Block>::rounded(bytes).unwrap();
        Block::new(&HostBackend::new(DeviceId::CPU, None), capacity).unwrap()
    }

    /// Gives new blocks back to the pool.
    fn fill(pool: &HostPool, capacities: &[usize]) {
        for kib in capacities {
            pool.give_back(block(kib * KIB), &HostBackend::new(DeviceId::CPU, None));
        }
    }

    fn take(pool: &HostPool, kib: usize) -> Option<usize> {
        let block = pool.take_block(kib * KIB)?;
        let capacity = block.capacity;
        block.free(None);
        Some(capacity / KIB)
    }

    #[test]
    fn the_oldest_goes_when_there_is_too_much() {
        let pool = Pool::new(512 * KIB);
        fill(&pool, &[128, 256, 128, 192]);
        assert_eq!([take(&pool, 256), take(&pool, 128)], [None, Some(128)]);
        assert_eq!([take(&pool, 128), take(&pool, 128)], [Some(192), None]);
        // What was used last is freed last.
        fill(&pool, &[128, 64]);
        let kept = pool.take_block(128 * KIB).unwrap();
        pool.give_back(kept, &HostBackend::new(DeviceId::CPU, None));
        fill(&pool, &[384]);
        assert_eq!([take(&pool, 64), take(&pool, 384)], [Some(128), Some(384)]);
    }

    #[test]
    fn the_smallest_that_fits_serves() {
        let pool = Pool::new(IDLE_LIMIT);
        fill(&pool, &[512, 256, 128]);
        assert_eq!(take(&pool, 192), Some(256));
        assert_eq!(take(&pool, 192), None, "more than twice as large");
        // The last one of equals.
        let [a, b] = [KIB; 2].map(block);
        let last = b.ptr;
        for block in [a, b] {
            pool.give_back(block, &HostBackend::new(DeviceId::CPU, None));
        }
        let taken = pool.take_block(KIB).unwrap();
        assert_eq!(taken.ptr, last);
        taken.free(None);
        pool.clear(&HostBackend::new(DeviceId::CPU, None));
        assert_eq!(take(&pool, 512), None);
    }

    #[test]
    fn large_host_buffers_are_zero_and_serve_again() {
        let device = Device::new(Arc::new(HostBackend::new(DeviceId::CPU, None))).unwrap();
        // As if batches of this size were downloaded again and again.
        let bytes = if cfg!(miri) { 100_000 } else { 8 << 20 };
        let mut first = None;
        for _ in 0..3 {
            let mut host = device.host_buffer(bytes).unwrap();
            let place = host.as_device_ptr();
            assert_eq!(*first.get_or_insert(place), place);
            assert_eq!(place.address() % ALIGNMENT, 0);
            host[bytes - 1] = 7;
            host[0] = 7;
        }
        assert_eq!(device.stats().host_allocations, 1);
        device.trim();
        for bytes in [bytes, bytes / 8] {
            let host = device.host_buffer(bytes).unwrap();
            assert!(
                host[..64]
                    .iter()
                    .chain(&host[bytes - 64..])
                    .all(|b| *b == 0)
            );
        }
        assert_eq!(device.stats().host_allocations, 3);
    }
}
