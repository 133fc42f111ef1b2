//! [`HostBuffer`]: host memory that becomes arrow buffers.

use std::ops::{Deref, DerefMut};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use arrow_buffer::Buffer;

use crate::device::backend::out_of_memory;
use crate::device::engine::pool::Pool;
use crate::device::host_pool::Block;
use crate::device::{Counters, Device, DevicePtr};
use crate::error::Result;

/// A block of host memory, aligned to 64 bytes and initialised, which becomes an arrow [`Buffer`] without a copy.
///
/// Host buffers of [`Device::host_buffer`](crate::Device::host_buffer) are page-locked where the device has such memory, which makes copies
/// fast; the memory returns to the device's pool when the last holder is dropped. Downloaded arrays lie in them.
///
/// Fill a host buffer as bytes, which it dereferences to, and make an array of it without a copy:
///
/// ```
/// use arrow_array::Int64Array;
/// use arrow_buffer::{Buffer, ScalarBuffer, ToByteSlice};
/// use arrow_device::Devices;
/// # fn main() -> arrow_device::Result<()> {
/// let device = Devices::simulated()?;
/// let mut host = device.host_buffer(3 * size_of::<i64>())?;
/// host.copy_from_slice([1i64, 2, 3].to_byte_slice());
/// let column = Int64Array::new(ScalarBuffer::from(Buffer::from(host)), None);
/// let on_device = device.upload_array(&column)?;
/// # let _ = on_device;
/// # Ok(())
/// # }
/// ```
///
/// # Host buffers and arrow's builders
///
/// Arrow's builders and `MutableBuffer` allocate memory of their own and never write into a host buffer. What a builder makes is
/// ordinary memory: an upload stages it, and copying it into a host buffer first gains nothing. To avoid the copy, write the values
/// into the host buffer, and wrap it: [`ScalarBuffer`](arrow_buffer::ScalarBuffer) for primitive arrays,
/// [`BooleanBuffer`](arrow_buffer::BooleanBuffer) for bits, [`OffsetBuffer`](arrow_buffer::OffsetBuffer) and
/// [`Buffer`] for text and binary arrays. One host buffer can hold all buffers of a batch: slice the buffer that it becomes.
///
/// An array over a host buffer cannot be changed in place: `Buffer::into_mutable`, `PrimitiveArray::into_builder` and
/// `PrimitiveArray::unary_mut` return it unchanged as an error, because arrow-rs does not own the memory.
///
/// # Uploads from page-locked memory
///
/// [`Device::upload`] copies a buffer of 1 MiB or more straight from a page-locked host buffer: the host moves none of its bytes, except
/// the last ones that do not fill a block of 64 bytes. A buffer that is the only one of its upload, and whose length is a multiple of
/// 64 bytes, is copied straight whatever its length. Smaller buffers are packed with others into a staging buffer, because a copy of
/// its own for each of them would cost a call to the driver: 1000 columns of 8 KiB are eight copies of about 1 MiB, not 1000.
#[derive(Debug)]
pub struct HostBuffer {
    pub(crate) block: Block,
    /// Bytes in use; the block may be larger.
    len: usize,
    /// The device to whose pool the block returns.
    device: Device,
}

impl HostBuffer {
    /// Returns the address of the first byte, for copies.
    pub fn as_device_ptr(&self) -> DevicePtr {
        DevicePtr::new(self.block.ptr.as_ptr().cast())
    }
}

impl From<HostBuffer> for Buffer {
    /// Makes an arrow buffer of the bytes without a copy. The memory goes back to its pool once the last reference to it is dropped.
    fn from(host: HostBuffer) -> Self {
        let (ptr, len) = (host.block.ptr, host.len);
        // SAFETY: the block is valid and initialised for `len` bytes as long as the host buffer lives, which the buffer holds.
        unsafe { Self::from_custom_allocation(ptr, len, Arc::new(AssertUnwindSafe(host))) }
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block has at least `len` initialised bytes, and no copy writes to it while a reference exists: transfers
        // hold the host buffer until their copies have completed.
        unsafe { std::slice::from_raw_parts(self.block.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the block has at least `len` initialised bytes, no copy uses it while a reference exists (see `deref`), and
        // `&mut self` makes the reference the only one.
        unsafe { std::slice::from_raw_parts_mut(self.block.ptr.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for HostBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        match self.device.host_pool() {
            Some(pool) => pool.give_back(self.block, self.device.backend()),
            None => self.block.free(None),
        }
    }
}

impl Device {
    /// Returns `len` bytes of the host memory from which this device copies fastest: page-locked where the device has such
    /// memory, and from the device's pool if an idle host buffer fits. The content is initialised but arbitrary.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn host_buffer(&self, len: usize) -> Result<HostBuffer> {
        let capacity = Pool::<Block>::rounded(len.max(1));
        let capacity = capacity.ok_or_else(|| out_of_memory(self.id(), "host buffer", len))?;
        let idle = self.host_pool().and_then(|pool| pool.take_block(capacity));
        let block = match idle {
            Some(block) => block,
            None => {
                let new = Block::new(self.backend(), capacity)?;
                Counters::add(&self.counters().host_allocations, 1);
                new
            }
        };
        let device = self.clone();
        Ok(HostBuffer { block, len, device })
    }

    /// Frees the memory that this device keeps for reuse: idle host buffers, and what its backend keeps. May wait for the device's
    /// work.
    pub fn trim(&self) {
        if let Some(pool) = self.host_pool() {
            pool.clear(self.backend());
        }
        self.backend().trim();
    }
}
