//! Loans: buffers lent to the work of one queue.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::device::{DevicePtr, Queue};
use crate::memory::Owner;

/// The rows of one buffer, lent to the work of one queue: the queue waits until the memory is
/// ready, and dropping the loan records the use, so that the memory outlives the work. Queue the
/// kernel while the loan lives.
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
#[must_use = "dropping the loan says that the work that uses the values was queued"]
pub struct DeviceSlice<'a, T> {
    pub(super) owner: Option<&'a Arc<Owner>>,
    pub(super) queue: Queue,
    pub(super) address: DevicePtr,
    pub(super) len: usize,
    pub(super) values: PhantomData<fn() -> T>,
}

impl<T> DeviceSlice<'_, T> {
    /// The address of the first element, the array's offset included. Null if there is none.
    pub fn address(&self) -> DevicePtr {
        self.address
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
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

/// A bitmap lent to the work of one queue: the bit of row `i` is bit `bit_offset + i`, least
/// significant bit first.
#[derive(Debug)]
#[must_use = "dropping the loan says that the work that uses the bits was queued"]
pub struct DeviceBits<'a> {
    bytes: DeviceSlice<'a, u8>,
    bit_offset: usize,
    len: usize,
}

impl<'a> DeviceBits<'a> {
    /// `len` bits from bit `bit_offset` of the bitmap at `address`. `queue` waits for `owner`, whose memory it
    /// is, already.
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

    /// The address of the bitmap's first byte.
    pub fn address(&self) -> DevicePtr {
        self.bytes.address
    }

    /// Bits to skip.
    pub fn bit_offset(&self) -> usize {
        self.bit_offset
    }

    /// How many bits (rows).
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
