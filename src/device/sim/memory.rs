//! The memory behind the addresses that users see, and who has which.

use std::alloc::Layout;
use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// The byte that fills fresh memory.
pub(super) const FRESH: u8 = 0xA5;
/// Alignment of an allocation and least distance between two, in bytes.
const UNIT: usize = 64;

/// Host memory that is behind an allocation of a simulated device: a program's, which other processes share, say, or the device's own.
/// [`SimConfig::memory`](super::SimConfig::memory) makes a device allocate a program's memory,
/// [`SimDevice::adopt`](super::SimDevice::adopt) makes an allocation of it, and
/// [`SimDevice::backing`](super::SimDevice::backing) returns what owns it.
#[derive(Debug)]
pub struct SimBacking {
    pub(super) start: NonNull<u8>,
    pub(super) bytes: usize,
    /// `None` if it was allocated here.
    pub(super) owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: this alone owns the memory, or the program's owner does, and never reads or writes it once it is filled.
unsafe impl Send for SimBacking {}
// SAFETY: a shared reference gives the address, which does not change, and nothing of the memory.
unsafe impl Sync for SimBacking {}

impl SimBacking {
    /// Wraps `bytes` bytes of host memory, which `owner` keeps. Its drop must not use the device.
    ///
    /// # Safety
    /// The memory is initialised. The host may read it on any thread, and write to it if a device allocates it or if work of the device will, as long as
    /// `owner` lives. Nobody else writes to it meanwhile, except as what is queued on the device expects.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            start,
            bytes,
            owner: Some(owner),
        }
    }

    /// Allocates `bytes` bytes, which are filled. Returns `None` if there are not as many, or none are asked for.
    pub(super) fn allocate(bytes: usize) -> Option<Self> {
        if bytes == 0 {
            return None;
        }
        let layout = Layout::from_size_align(bytes, UNIT).ok()?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { std::alloc::alloc(layout) })?;
        // SAFETY: it was just allocated.
        unsafe { start.write_bytes(FRESH, bytes) };
        Some(Self {
            start,
            bytes,
            owner: None,
        })
    }

    /// The first `bytes` bytes of a program's memory, or `None` if it has fewer or is not aligned.
    pub(super) fn first(mut self, bytes: usize) -> Option<Self> {
        let is_aligned = self.start.addr().get() % UNIT == 0;
        if !is_aligned || bytes > self.bytes {
            return None;
        }
        self.bytes = bytes;
        Some(self)
    }
}

impl Drop for SimBacking {
    fn drop(&mut self) {
        if self.owner.is_none() {
            // SAFETY: `allocate` has allocated it with this layout, and only a program's memory is shortened.
            unsafe {
                let layout = Layout::from_size_align_unchecked(self.bytes, UNIT);
                std::alloc::dealloc(self.start.as_ptr(), layout);
            }
        }
    }
}

pub(super) struct Allocation {
    pub(super) memory: Arc<SimBacking>,
    /// Freed by its owner; the free waits in a queue.
    pub(super) freeing: bool,
}

/// The addresses that an allocation takes up, with those that nothing has before the next.
fn block_bytes(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(UNIT)?.checked_add(UNIT)
}

/// Hands out the addresses of a device. Those of a freed allocation are in quarantine until all behind them had their turn.
#[derive(Default)]
pub(super) struct Allocator {
    range: Range<usize>,
    /// The end of the newest allocation's block.
    next: usize,
    /// Allocations by address.
    live: BTreeMap<usize, Allocation>,
}

impl Allocator {
    pub(super) fn new(mut range: Range<usize>) -> Self {
        range.start += UNIT;
        Self {
            next: range.start,
            range,
            live: BTreeMap::new(),
        }
    }

    /// Returns the address of a new allocation of memory, or `None` if there is not enough.
    pub(super) fn allocate(
        &mut self,
        bytes: usize,
        memory: impl FnOnce() -> Option<SimBacking>,
    ) -> Option<usize> {
        let block = block_bytes(bytes)?;
        let behind = self.gap(self.next, block);
        let address = behind.or_else(|| self.gap(self.range.start, block))?;
        let memory = Arc::new(memory()?);
        let allocation = Allocation {
            memory,
            freeing: false,
        };
        self.live.insert(address, allocation);
        self.next = address + block;
        Some(address)
    }

    /// Returns the first address from `from` on at which so many are unused. `from` is in no block.
    fn gap(&self, mut from: usize, block: usize) -> Option<usize> {
        for (start, allocation) in self.live.range(from..) {
            if start - from >= block {
                return Some(from);
            }
            from = start + block_bytes(allocation.memory.bytes)?;
        }
        (self.range.end.saturating_sub(from) >= block).then_some(from)
    }

    /// Marks an allocation as freed by its owner. The error says what is wrong with that.
    pub(super) fn begin_free(&mut self, address: usize, bytes: usize) -> Result<(), String> {
        match self.live.get_mut(&address) {
            None => Err("not the start of a live allocation (double free?)".into()),
            Some(allocation) if allocation.freeing => Err("double free".into()),
            Some(allocation) if allocation.memory.bytes != bytes => Err(format!(
                "freed as {bytes} bytes, allocated as {}",
                allocation.memory.bytes
            )),
            Some(allocation) => {
                allocation.freeing = true;
                Ok(())
            }
        }
    }

    /// Ends an allocation.
    pub(super) fn finish_free(&mut self, address: usize) {
        self.live.remove(&address);
    }

    /// Returns the allocation in which `bytes` bytes from `address` lie, whose free has not run, and where they begin there. The
    /// error says why there is none.
    pub(super) fn find(
        &self,
        address: usize,
        bytes: usize,
    ) -> Result<(&Allocation, usize), String> {
        let before = self.live.range(..=address).next_back();
        let (start, allocation) = before.ok_or("not allocated, or freed")?;
        let (within, length) = (address - start, allocation.memory.bytes);
        if within > length {
            Err("not allocated, or freed".into())
        } else if bytes > length - within {
            let past = bytes - (length - within);
            Err(format!(
                "{past} bytes past the end of an allocation of {length}"
            ))
        } else {
            Ok((allocation, within))
        }
    }

    /// The allocations that their owners have not freed.
    pub(super) fn owned(&self) -> impl Iterator<Item = &SimBacking> {
        let owned = self.live.values().filter(|allocation| !allocation.freeing);
        owned.map(|allocation| &*allocation.memory)
    }
}
