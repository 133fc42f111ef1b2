//! [`Allocation`]: a whole allocation that was taken out of its buffer.

use std::mem::ManuallyDrop;

use crate::device::{DevicePtr, Queue};
use crate::error::Error;
use crate::memory::DeviceBuffer;

/// A whole allocation of a device, taken out of its buffer by [`DeviceBuffer::into_allocation`], for work on one queue. Nothing
/// else uses it. Dropping it frees the memory in the order of that queue; this does not wait.
///
/// A backend makes an object of its runtime of it ([`into_raw`](Self::into_raw)), such as a buffer that a program of that
/// runtime owns.
#[derive(Debug)]
#[must_use = "dropping the allocation frees the memory"]
pub struct Allocation {
    queue: Queue,
    base: DevicePtr,
    /// Bytes that the buffer had.
    len: usize,
    /// Bytes that were allocated.
    bytes: usize,
}

impl Allocation {
    /// Returns the queue for whose work the memory is ready, and in whose order it is freed.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Returns the address of the first byte.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// Returns the number of bytes that the buffer had.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer had no bytes: never, because such a buffer has no allocation.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes that were allocated, padding included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives up the ownership. The memory leaks unless its new owner calls
    /// [`RawQueue::free`](crate::device::RawQueue::free) with [`base`](Self::base) and [`bytes`](Self::bytes), once.
    #[must_use = "the memory leaks unless its new owner frees it"]
    pub fn into_raw(self) -> DevicePtr {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again, so the queue is dropped once.
        unsafe { std::ptr::drop_in_place(&raw mut this.queue) };
        this.base
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: `into_allocation` took these bytes from their only holder, who had allocated them on this device, and made the
        // queue wait for their uses on others; this is the only free.
        unsafe { self.queue.free(self.base, self.bytes) }
    }
}

impl DeviceBuffer {
    /// Takes the memory out of the buffer, without copying, for work on `queue`. The queue waits until the memory is ready and
    /// its recorded uses are done. This thread waits only for a use on a device whose events the queue cannot wait for, and if a use
    /// could not be recorded.
    ///
    /// ```
    /// use arrow_device::{DeviceBufferMut, Devices};
    ///
    /// let queue = Devices::cpu().default_queue();
    /// let buffer = DeviceBufferMut::allocate(&queue, 100)?.freeze()?;
    /// let allocation = buffer.into_allocation(&queue).map_err(|(_, e)| e)?;
    /// assert_eq!((allocation.len(), allocation.bytes()), (100, 128));
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the buffer, unchanged, with the reason: [`Error::InvalidArgument`] if it is not the only holder of its memory,
    /// is not all of an allocation that this crate made on the device, or if the queue belongs to another device; otherwise the
    /// device's own error.
    pub fn into_allocation(
        mut self,
        queue: &Queue,
    ) -> std::result::Result<Allocation, (Self, Error)> {
        match self.surrender(queue) {
            Ok(bytes) => Ok(Allocation {
                queue: queue.clone(),
                base: self.address(),
                len: self.len(),
                bytes,
            }),
            Err(e) => Err((self, e)),
        }
    }
}
