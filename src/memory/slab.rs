//! [`HostSlab`]: host memory that becomes arrow buffers.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use arrow_buffer::Buffer;
use bytes::Bytes;

use crate::device::block::{Block, out_of_memory, round};
use crate::device::{Counters, Device, DeviceId, DevicePtr};
use crate::error::Result;

/// A block of host memory, aligned to 64 bytes and initialised, which becomes an arrow [`Buffer`] or [`Bytes`] without a copy.
///
/// Slabs of [`Device::host_slab`](crate::Device::host_slab) are page-locked where the device has such memory, which makes copies
/// fast; the memory returns to the device's pool when the last holder is dropped. Downloaded arrays lie in such slabs.
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
    /// The device to whose pool the block returns.
    device: Option<Device>,
}

impl HostSlab {
    /// Allocates `len` bytes of ordinary memory, all zero.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn new(len: usize) -> Result<Self> {
        let block = round(len).and_then(Block::ordinary);
        Ok(Self {
            block: block.ok_or_else(|| out_of_memory(DeviceId::CPU, len))?,
            len,
            device: None,
        })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte, for copies.
    pub fn as_device_ptr(&self) -> DevicePtr {
        DevicePtr::new(self.block.ptr().as_ptr().cast())
    }

    /// Returns the memory as an arrow buffer, without a copy.
    pub fn into_buffer(self) -> Buffer {
        let (ptr, len) = (self.block.ptr(), self.len);
        // SAFETY: the block is valid and initialised for `len` bytes as long as the slab lives, which the buffer holds.
        unsafe { Buffer::from_custom_allocation(ptr, len, Arc::new(AssertUnwindSafe(self))) }
    }

    /// Returns the memory as [`Bytes`], without a copy.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Deref for HostSlab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block has at least `len` initialised bytes, and no copy writes to it while a reference exists: transfers
        // hold the slab until their copies have completed.
        unsafe { std::slice::from_raw_parts(self.block.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for HostSlab {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block has at least `len` initialised bytes, no copy uses it while a reference exists (see `deref`), and
        // `&mut self` makes the reference the only one.
        unsafe { std::slice::from_raw_parts_mut(self.block.ptr().as_ptr(), self.len) }
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
        let block = self.block.take();
        match &self.device {
            Some(device) => {
                for block in device.slabs().give_back(block) {
                    block.free(Some(device.backend()));
                }
            }
            None => block.free(None),
        }
    }
}

impl Device {
    /// Returns `len` bytes of the host memory from which this device copies fastest: page-locked where the device has such
    /// memory, and from the device's pool if an idle slab fits. The content is initialised but arbitrary.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn host_slab(&self, len: usize) -> Result<HostSlab> {
        let capacity = round(len).ok_or_else(|| out_of_memory(self.id(), len))?;
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
        let block = match Block::locked(self.backend(), capacity)? {
            Some(block) => block,
            None => Block::ordinary(capacity).ok_or_else(|| out_of_memory(self.id(), capacity))?,
        };
        Counters::add(&self.counters().host_allocations, 1);
        Ok(block)
    }

    /// Sets how many bytes of idle host slabs, page-locked ones included, this device keeps for reuse. The default is 1 GiB;
    /// with 0 none are kept. Beyond the limit, slabs that have been idle for longest are freed first. A device keeps at most what
    /// was in use at the same time; [`trim`](Self::trim) frees all of it.
    ///
    /// ```
    /// # use arrow_device::Devices;
    /// let device = Devices::cpu();
    /// device.set_idle_slab_limit(4 << 30); // for downloads of up to 4 GiB at once
    /// ```
    pub fn set_idle_slab_limit(&self, bytes: usize) {
        for block in self.slabs().set_limit(bytes) {
            block.free(Some(self.backend()));
        }
    }

    /// Frees the memory that this device keeps for reuse: idle host slabs, and what its backend keeps.
    pub fn trim(&self) {
        self.slabs().clear(self.backend());
        self.backend().trim();
    }
}
