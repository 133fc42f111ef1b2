//! [`HostSlab`]: host memory that becomes arrow buffers, and the pool that recycles it.

use std::alloc::{self, Layout};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use arrow_buffer::Buffer;
use bytes::Bytes;

use crate::device::{ALIGNMENT, Backend, Counters, Device, DeviceId, DevicePtr};
use crate::error::{Error, Result};

/// Most bytes of idle slabs that a device keeps for reuse.
const IDLE_LIMIT: usize = 256 << 20;
/// Most idle slabs.
const IDLE_BLOCKS: usize = 1024;
/// Slabs of at least this many bytes are rounded up to a multiple of it, so that they fit again.
const GRAIN: usize = 64 << 10;

/// A block of host memory, 64-byte aligned and initialised, owned by whoever holds it.
///
/// Fill it, then freeze it into an arrow [`Buffer`] or into [`Bytes`] without a copy: the last
/// holder gives the memory back, to the device's pool if it came from
/// [`Device::host_slab`](crate::Device::host_slab). This is the memory behind every downloaded
/// array: a real arrow buffer that the host reads freely, and that a device reaches fast where it
/// is page-locked.
///
/// ```
/// use arrow_device::HostSlab;
/// let mut slab = HostSlab::new(8)?;
/// slab.copy_from_slice(&42u64.to_le_bytes());
/// let buffer = slab.into_buffer();
/// assert_eq!(buffer.typed_data::<u64>(), [42]);
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub struct HostSlab {
    block: Block,
    /// Bytes in use; the block may be larger.
    len: usize,
    /// Whose pool it goes back to.
    device: Option<Device>,
}

/// A piece of host memory without an owner.
struct Block {
    ptr: NonNull<u8>,
    /// Bytes.
    capacity: usize,
    /// From [`Backend::allocate_host`] rather than from the global allocator.
    locked: bool,
}

// SAFETY: the block is plain memory that only its holder reaches.
unsafe impl Send for Block {}
// SAFETY: a shared reference gives shared reads only.
unsafe impl Sync for Block {}

impl Block {
    fn layout(capacity: usize) -> Option<Layout> {
        Layout::from_size_align(capacity, ALIGNMENT).ok()
    }

    fn heap(capacity: usize, device: DeviceId) -> Result<Self> {
        let oom = || Error::OutOfMemory {
            device,
            operation: "host slab",
            bytes: capacity,
        };
        let layout = Self::layout(capacity).ok_or_else(oom)?;
        // SAFETY: callers round the capacity up, so it is not 0.
        let ptr = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).ok_or_else(oom)?;
        Ok(Self {
            ptr,
            capacity,
            locked: false,
        })
    }

    fn free(self, backend: Option<&dyn Backend>) {
        if self.locked {
            if let Some(backend) = backend {
                // SAFETY: the block came from this backend with this size; its holder gave it up,
                // and holders outlive the copies that use it (`Queue::keep_until_done`, host wait).
                unsafe {
                    backend.free_host(DevicePtr::new(self.ptr.as_ptr().cast()), self.capacity)
                }
            }
        } else if let Some(layout) = Self::layout(self.capacity) {
            // SAFETY: the block came from `heap` with this layout.
            unsafe { alloc::dealloc(self.ptr.as_ptr(), layout) }
        }
    }
}

fn round(bytes: usize) -> Option<usize> {
    let grain = if bytes >= GRAIN { GRAIN } else { ALIGNMENT };
    bytes.max(1).checked_next_multiple_of(grain)
}

impl HostSlab {
    /// Ordinary memory of `len` bytes, all zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(len: usize) -> Result<Self> {
        let capacity = round(len).ok_or(Error::OutOfMemory {
            device: DeviceId::CPU,
            operation: "host slab",
            bytes: len,
        })?;
        Ok(Self {
            block: Block::heap(capacity, DeviceId::CPU)?,
            len,
            device: None,
        })
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, as copies take it.
    pub fn as_device_ptr(&self) -> DevicePtr {
        DevicePtr::new(self.block.ptr.as_ptr().cast())
    }

    /// As an arrow buffer, without a copy.
    pub fn into_buffer(self) -> Buffer {
        let (ptr, len) = (self.block.ptr, self.len);
        // SAFETY: `ptr` is valid and initialised for `len` bytes as long as the slab lives, and the
        // buffer holds the slab.
        unsafe { Buffer::from_custom_allocation(ptr, len, Arc::new(AssertUnwindSafe(self))) }
    }

    /// As [`Bytes`], without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Deref for HostSlab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block has at least `len` initialised bytes, and no copy writes to it while a
        // reference exists: transfers hold the slab until their host wait.
        unsafe { std::slice::from_raw_parts(self.block.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for HostSlab {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.block.ptr.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for HostSlab {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for HostSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSlab")
            .field("len", &self.len)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Drop for HostSlab {
    fn drop(&mut self) {
        let block = Block {
            ptr: self.block.ptr,
            capacity: self.block.capacity,
            locked: self.block.locked,
        };
        match &self.device {
            Some(device) => {
                if let Some(block) = device.slabs().give_back(block) {
                    block.free(Some(device.backend()));
                }
            }
            None => block.free(None),
        }
    }
}

/// Idle slabs of one device.
#[derive(Default)]
pub(crate) struct SlabPool(Mutex<Idle>);

#[derive(Default)]
struct Idle {
    blocks: Vec<Block>,
    bytes: usize,
}

impl SlabPool {
    fn lock(&self) -> std::sync::MutexGuard<'_, Idle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The smallest idle block that fits: at most twice what is asked for, small ones apart.
    fn take(&self, capacity: usize) -> Option<Block> {
        let mut idle = self.lock();
        let most = capacity.saturating_mul(2).max(GRAIN);
        let (i, _) = idle
            .blocks
            .iter()
            .enumerate()
            .filter(|(_, b)| (capacity..=most).contains(&b.capacity))
            .min_by_key(|(_, b)| b.capacity)?;
        let block = idle.blocks.swap_remove(i);
        idle.bytes -= block.capacity;
        Some(block)
    }

    /// Keeps the block for reuse, or gives it back if the pool is full.
    fn give_back(&self, block: Block) -> Option<Block> {
        let mut idle = self.lock();
        if idle.bytes + block.capacity > IDLE_LIMIT || idle.blocks.len() >= IDLE_BLOCKS {
            return Some(block);
        }
        idle.bytes += block.capacity;
        idle.blocks.push(block);
        None
    }

    /// Frees all idle blocks.
    pub(crate) fn clear(&self, backend: &dyn Backend) {
        let blocks = {
            let mut idle = self.lock();
            idle.bytes = 0;
            std::mem::take(&mut idle.blocks)
        };
        for block in blocks {
            block.free(Some(backend));
        }
    }
}

impl Device {
    /// Host memory of `len` bytes from which this device copies fastest: page-locked where the
    /// device has such memory, recycled from its pool where one fits. Its content is arbitrary, but
    /// initialised.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn host_slab(&self, len: usize) -> Result<HostSlab> {
        let capacity = round(len).ok_or(Error::OutOfMemory {
            device: self.id(),
            operation: "host slab",
            bytes: len,
        })?;
        let block = match self.slabs().take(capacity) {
            Some(block) => block,
            None => self.new_block(capacity)?,
        };
        Ok(HostSlab {
            block,
            len,
            device: Some(self.clone()),
        })
    }

    fn new_block(&self, capacity: usize) -> Result<Block> {
        let block = match self.backend().allocate_host(capacity)? {
            Some(ptr) => {
                let ptr = NonNull::new(ptr.as_ptr().cast::<u8>()).ok_or(Error::OutOfMemory {
                    device: self.id(),
                    operation: "host slab",
                    bytes: capacity,
                })?;
                // SAFETY: the backend gave writable memory of this size. Written once, so that safe
                // code may view it as bytes.
                unsafe { ptr.as_ptr().write_bytes(0, capacity) };
                Block {
                    ptr,
                    capacity,
                    locked: true,
                }
            }
            None => Block::heap(capacity, self.id())?,
        };
        Counters::add(&self.counters().host_allocations, 1);
        Ok(block)
    }

    /// Frees what this device keeps for reuse: idle host slabs, and what its backend keeps.
    pub fn trim(&self) {
        self.slabs().clear(self.backend());
        self.backend().trim();
    }
}
