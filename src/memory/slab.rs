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

impl HostSlab {
    /// Ordinary memory of `len` bytes, all zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn new(len: usize) -> Result<Self> {
        let block = round(len).and_then(Block::ordinary);
        Ok(Self {
            block: block.ok_or_else(|| out_of_memory(DeviceId::CPU, len))?,
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
        DevicePtr::new(self.block.ptr().as_ptr().cast())
    }

    /// As an arrow buffer, without a copy.
    pub fn into_buffer(self) -> Buffer {
        let (ptr, len) = (self.block.ptr(), self.len);
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
        unsafe { std::slice::from_raw_parts(self.block.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for HostSlab {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference is the only one.
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
    /// Host memory of `len` bytes from which this device copies fastest: page-locked where the
    /// device has such memory, recycled from its pool where one fits. Its content is arbitrary, but
    /// initialised.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
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

    /// How many bytes of idle host slabs this device keeps for reuse at most, page-locked ones
    /// included: 1 GiB if never said, none if 0. Beyond that those go first that were not used for
    /// longest. A device keeps what was in use at once, so it comes near the limit only if a program
    /// has; [`trim`](Self::trim) gives it all back.
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

    /// Frees what this device keeps for reuse: idle host slabs, and what its backend keeps.
    pub fn trim(&self) {
        self.slabs().clear(self.backend());
        self.backend().trim();
    }
}
