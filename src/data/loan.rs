//! Loans: buffers lent to work on one queue.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::device::{DevicePtr, Queue};
use crate::memory::Owner;

/// The rows of one buffer, lent to work on one queue.
///
/// The queue waits until the memory is ready, and dropping the loan records the use, so that the memory outlives
/// the work. Enqueue the kernel while the loan is alive. See [`DeviceArray::values_on`].
///
/// The loan borrows the array, which cannot be dropped meanwhile:
///
/// ```compile_fail,E0505
/// # fn use_after_drop(array: arrow_device::DeviceArray, queue: &arrow_device::Queue) -> arrow_device::Result<()> {
/// let ids = array.values_on::<i64>(queue)?;
/// drop(array); // does not compile: `ids` is used below
/// println!("{:?}", ids.address());
/// # Ok(())
/// # }
/// ```
///
/// [`DeviceArray::values_on`]: crate::DeviceArray::values_on
#[must_use = "dropping the loan records that all work on the values has been enqueued"]
pub struct DeviceSlice<'a, T> {
    pub(super) owner: Option<&'a Arc<Owner>>,
    pub(super) queue: Queue,
    pub(super) address: DevicePtr,
    pub(super) len: usize,
    pub(super) values: PhantomData<fn() -> T>,
}

impl<T> DeviceSlice<'_, T> {
    /// Returns the address of the first row's element, or null if there are no elements.
    pub fn address(&self) -> DevicePtr {
        self.address
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the queue that the elements are lent to.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }
}

#[cfg(feature = "cuda")]
impl<T> DeviceSlice<'_, T> {
    pub(crate) fn address_ref(&self) -> &DevicePtr {
        &self.address
    }
}

#[cfg(feature = "cuda")]
impl DeviceBits<'_> {
    pub(crate) fn address_ref(&self) -> &DevicePtr {
        &self.bytes.address
    }
}

impl<T> Drop for DeviceSlice<'_, T> {
    fn drop(&mut self) {
        if let Some(owner) = self.owner {
            owner.record_use(&self.queue);
        }
    }
}

impl<T> fmt::Debug for DeviceSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlice")
            .field("address", &self.address)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A bitmap lent to work on one queue: the bit of row `i` is bit `bit_offset + i`, least significant bit first. See
/// [`DeviceSlice`] for the rules of a loan.
#[derive(Debug)]
#[must_use = "dropping the loan records that all work on the bits has been enqueued"]
pub struct DeviceBits<'a> {
    bytes: DeviceSlice<'a, u8>,
    bit_offset: usize,
    len: usize,
}

impl<'a> DeviceBits<'a> {
    /// `len` bits from bit `bit_offset` of the bitmap at `address`, in memory of `owner`, for which `queue` already
    /// waits.
    pub(crate) fn new(
        owner: Option<&'a Arc<Owner>>,
        queue: &Queue,
        address: DevicePtr,
        bit_offset: usize,
        len: usize,
    ) -> Self {
        Self {
            bytes: DeviceSlice {
                owner,
                queue: queue.clone(),
                address,
                len: (bit_offset + len).div_ceil(8),
                values: PhantomData,
            },
            bit_offset,
            len,
        }
    }

    /// Returns the address of the bitmap's first byte.
    pub fn address(&self) -> DevicePtr {
        self.bytes.address
    }

    /// Returns the number of bits before the first row's.
    pub fn bit_offset(&self) -> usize {
        self.bit_offset
    }

    /// Returns the number of bits, which is the number of rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the queue that the bits are lent to.
    pub fn queue(&self) -> &Queue {
        &self.bytes.queue
    }
}
