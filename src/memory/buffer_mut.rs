//! [`DeviceBufferMut`]: fresh memory of a device, for kernels to write.

use std::sync::Arc;

use arrow_buffer::ArrowNativeType;

use crate::device::backend::out_of_memory;
use crate::device::{ALIGNMENT, CopyKind, CopyOp, DevicePtr, Queue};
use crate::error::Result;
use crate::memory::{DeviceBuffer, Memory, Owner, Ready};

/// Fresh device memory with arbitrary content, which its only holder fills by work on a queue and then
/// [freezes](Self::freeze) into a [`DeviceBuffer`].
///
/// A kernel whose output may be shorter than its input, such as a filter, writes to a buffer of the input's length, which is then
/// [truncated](Self::truncate) to what was written, and [shrunk](Self::shrink_to_fit) if the result is kept for long:
///
/// ```
/// use arrow_device::{DeviceBufferMut, Devices};
///
/// let queue = Devices::cpu().default_queue();
/// let mut memory = DeviceBufferMut::for_values::<i32>(&queue, 1000)?;
/// memory.fill(0)?; // stands for a kernel that writes 10 values
/// memory.truncate(10 * size_of::<i32>());
/// memory.shrink_to_fit()?;
/// assert_eq!(memory.freeze()?.len(), 40);
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceBufferMut {
    /// The queue in whose order the memory was allocated.
    pub(crate) queue: Queue,
    pub(crate) base: DevicePtr,
    /// Bytes in use.
    len: usize,
    /// Bytes allocated: a multiple of 64, at least `len`. With 0 there is no allocation.
    capacity: usize,
}

impl DeviceBufferMut {
    /// Allocates `len` bytes, aligned to 64 bytes and padded to a multiple of 64, in the order of `queue`. Does not wait.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory), or the device's own error.
    pub fn allocate(queue: &Queue, len: usize) -> Result<Self> {
        let capacity = len.checked_next_multiple_of(ALIGNMENT);
        let device = queue.device().id();
        let capacity = capacity.ok_or_else(|| out_of_memory(device, "allocate", len))?;
        let base = match capacity {
            0 => DevicePtr::NULL,
            bytes => queue.allocate(bytes)?,
        };
        Ok(Self {
            queue: queue.clone(),
            base,
            len,
            capacity,
        })
    }

    /// As [`allocate`](Self::allocate), for this number of values of an arrow type. A bitmap has `rows.div_ceil(8)` bytes.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn for_values<T: ArrowNativeType>(queue: &Queue, elements: usize) -> Result<Self> {
        Self::allocate(queue, elements.saturating_mul(size_of::<T>()))
    }

    /// Returns the length in bytes, without the padding.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes of device memory that the buffer holds, padding included.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the address of the first byte, for work that writes to it. [`shrink_to_fit`](Self::shrink_to_fit)
    /// changes it.
    pub fn address(&self) -> DevicePtr {
        self.base
    }

    /// Sets all bytes, padding included, by work on the queue.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        // SAFETY: the allocation has at least the padded length, and is freed in the queue's order, after the fill.
        unsafe { self.queue.fill(self.base, byte, self.padded()) }
    }

    /// Shortens the buffer to `bytes` bytes, as [`Vec::truncate`] does. A greater number changes nothing. The memory stays
    /// allocated: [`shrink_to_fit`](Self::shrink_to_fit) frees it.
    pub fn truncate(&mut self, bytes: usize) {
        self.len = self.len.min(bytes);
    }

    /// Frees the memory after the buffer's length and its padding to 64 bytes, once all work that the queue was given so far has
    /// completed. Does not wait.
    ///
    /// The content is copied to a smaller allocation by one copy on the device, and work that is queued from now on must use the new
    /// [`address`](Self::address). Work on other queues that uses the memory must be ordered before,
    /// as for the drop of the buffer. Without memory to free, nothing happens.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory), or the device's own error. The buffer is unchanged then.
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        if self.padded() == self.capacity {
            return Ok(());
        }
        let mut smaller = Self::allocate(&self.queue, self.len)?;
        if !self.is_empty() {
            let kind = CopyKind::DeviceToDevice;
            let content = CopyOp::new(kind, self.base, smaller.base, self.len);
            // SAFETY: both allocations have at least `len` bytes and are freed in the queue's order, after the copy.
            unsafe { self.queue.copy(&[content]) }?;
        }
        // The drop frees the larger allocation.
        std::mem::swap(self, &mut smaller);
        Ok(())
    }

    /// Returns the length in bytes with the padding.
    fn padded(&self) -> usize {
        // No overflow: the capacity is such a multiple.
        self.len.next_multiple_of(ALIGNMENT)
    }

    /// Ends the writing. The buffer is ready once all work that the queue was given so far has completed; this does not wait.
    ///
    /// # Errors
    /// Returns the device's own error if no event can be recorded. The memory is freed then.
    pub fn freeze(self) -> Result<DeviceBuffer> {
        let ready = self.queue.record()?.map_or(Ready::Now, Ready::Event);
        let (base, len) = (self.base, self.len);
        let device = self.queue.device().clone();
        let owner = Owner::new(device, self.into_memory(), ready);
        Ok(DeviceBuffer::from_parts(Arc::new(owner), base, 0, len))
    }

    /// Returns the memory for an owner.
    pub(crate) fn into_memory(self) -> Memory {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used as a whole again, so the queue is moved out once.
        let queue = unsafe { std::ptr::read(&this.queue) };
        match this.capacity {
            0 => Memory::Kept(Box::new(queue)),
            bytes => Memory::Device {
                queue,
                base: this.base,
                bytes,
            },
        }
    }
}

impl Drop for DeviceBufferMut {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: `allocate` allocated the memory on this queue, it has this many bytes left, and it was not frozen. `queue`
            // asks callers to order work on other queues themselves.
            unsafe { self.queue.free(self.base, self.capacity) }
        }
    }
}
