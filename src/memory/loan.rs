//! [`Loan`]: device memory lent to work on one queue.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::device::{Device, DevicePtr, Queue};
use crate::error::{Result, bail};
use crate::memory::Owner;

/// Elements in device memory, lent to work on one queue: a buffer's bytes ([`DeviceBuffer::on`]), a column's values, offsets or keys
/// ([`DeviceArray::values_on`] and others), or, as `Loan<bool>`, one bit for each row ([`DeviceArray::validity_on`]).
///
/// The queue waits until the memory is ready; this thread does not. Dropping the loan records the use, so that the memory outlives
/// the work that was queued before the drop: queue the kernel while the loan is alive.
///
/// The loan borrows the array or buffer, which cannot be dropped meanwhile:
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
/// [`DeviceBuffer::on`]: crate::DeviceBuffer::on
/// [`DeviceArray::values_on`]: crate::DeviceArray::values_on
/// [`DeviceArray::validity_on`]: crate::DeviceArray::validity_on
#[must_use = "dropping the loan means that all work that uses the memory was queued"]
pub struct Loan<'a, T = u8> {
    owner: Option<&'a Arc<Owner>>,
    queue: Queue,
    pub(crate) address: DevicePtr,
    /// Of a bitmap; the loan of anything else starts at its address.
    pub(crate) bit_offset: usize,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<'a, T> Loan<'a, T> {
    /// Lends `len` elements at `address` on a device, in memory of an owner unless `len` is 0.
    pub(crate) fn new(
        (device, owner): (&Device, Option<&'a Arc<Owner>>),
        queue: &Queue,
        address: DevicePtr,
        len: usize,
    ) -> Result<Self> {
        check_queue(queue, device)?;
        owner.map_or(Ok(()), |owner| owner.wait_on(queue))?;
        Ok(Self {
            owner,
            queue: queue.clone(),
            address,
            bit_offset: 0,
            len,
            elements: PhantomData,
        })
    }

    /// Returns the address of the first element, or of a bitmap's first byte. Without elements it may be null.
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

    /// Returns the number of bits before the first row's in a bitmap, which is in bit `bit_offset + i` of it for row `i`, least
    /// significant bit first. It is 0 for any other elements.
    pub fn bit_offset(&self) -> usize {
        self.bit_offset
    }
}

impl<T> Drop for Loan<'_, T> {
    fn drop(&mut self) {
        if let Some(owner) = self.owner {
            owner.record_use(&self.queue);
        }
    }
}

impl<T> fmt::Debug for Loan<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({} from {:?})", self.len, self.address)
    }
}

pub(crate) fn check_queue(queue: &Queue, device: &Device) -> Result<()> {
    match queue.device() {
        of if of == device => Ok(()),
        of => bail!("a queue of {of} for memory of {device}"),
    }
}

/// Returns the queue of a call, or the device's default queue.
pub(crate) fn queue_for(queue: Option<&Queue>, device: &Device) -> Result<Queue> {
    let Some(queue) = queue else {
        return Ok(device.default_queue());
    };
    check_queue(queue, device)?;
    Ok(queue.clone())
}
