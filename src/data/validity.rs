//! [`Validity`]: the bitmap that says which rows are null.

use crate::data::loan::DeviceBits;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, check_queue};

/// A validity bitmap in device memory, which says which rows of an array are null. The bit of row `i` is bit
/// `bit_offset + i` of the buffer, least significant bit first; a set bit marks a value, an unset bit a null.
///
/// It corresponds to arrow-rs's [`NullBuffer`](arrow_buffer::NullBuffer) for host memory.
/// [`DeviceArray::validity`] returns that of a column or slice, and [`DeviceArray::from_values`] and
/// [`DeviceArray::with_values`] accept one for the result of a kernel. Clones and slices share the memory; nothing
/// is copied.
///
/// [`DeviceArray::validity`]: crate::DeviceArray::validity
/// [`DeviceArray::from_values`]: crate::DeviceArray::from_values
/// [`DeviceArray::with_values`]: crate::DeviceArray::with_values
///
/// ```
/// use arrow_array::{Array, Float64Array, Int64Array};
/// use arrow_buffer::Buffer;
/// use arrow_device::{DeviceArray, DeviceBuffer, Devices, Validity};
/// use arrow_schema::DataType;
/// let column = Int64Array::from(vec![Some(1), None, Some(3), None, Some(5)]);
/// let column = Devices::cpu().upload_array(&column)?.slice(1, 3)?;
/// let validity = column.validity().expect("the column has a bitmap");
/// assert_eq!((validity.bit_offset(), validity.len()), (1, 3));
///
/// // What a kernel made of the column's values: the same rows are null.
/// let halves = DeviceBuffer::from(Buffer::from_vec(vec![0.0, 1.5, 0.0]));
/// let result = DeviceArray::from_values(DataType::Float64, 3, halves, Some(validity))?;
/// let result = result.to_host()?;
/// assert_eq!(result.as_ref(), &Float64Array::from(vec![None, Some(1.5), None]) as &dyn Array);
///
/// // A bitmap that a kernel wrote: rows 0 and 2 of 3 are values.
/// let bits = DeviceBuffer::from(Buffer::from_vec(vec![0b101u8]));
/// let written = Validity::new(bits.clone(), 0, 3)?;
/// assert_eq!(written.slice(1, 2)?.bit_offset(), 1);
/// assert!(Validity::new(bits, 4, 5).is_err()); // the buffer has 8 bits
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[doc(alias = "NullBuffer")]
#[derive(Clone, Debug)]
pub struct Validity {
    pub(super) buffer: DeviceBuffer,
    pub(super) bit_offset: usize,
    /// Rows.
    pub(super) len: usize,
    /// The number of nulls, known only from an array that has these rows and knows it.
    pub(super) nulls: Option<usize>,
}

impl Validity {
    /// Makes the bitmap of `len` rows from bit `bit_offset` of `buffer`. Nothing is read, so the number of nulls is
    /// not known.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the buffer has fewer than `bit_offset + len` bits.
    pub fn new(buffer: DeviceBuffer, bit_offset: usize, len: usize) -> Result<Self> {
        let end = bit_offset.checked_add(len);
        if end.is_none_or(|end| end.div_ceil(8) > buffer.len()) {
            return Err(Error::argument(format!(
                "a validity bitmap of {len} rows from bit {bit_offset} in a buffer of {} bytes",
                buffer.len()
            )));
        }
        Ok(Self {
            buffer,
            bit_offset,
            len,
            nulls: None,
        })
    }

    /// Returns the device whose memory holds the bitmap.
    pub fn device(&self) -> &Device {
        self.buffer.device()
    }

    /// Returns the whole buffer, which also holds any bits before the first row and after the last one.
    pub fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Returns the position of the first row's bit in the buffer.
    pub fn bit_offset(&self) -> usize {
        self.bit_offset
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of nulls, or `None` if it is not known. It is known if the bitmap comes from an array
    /// that knows it. Never reads device memory.
    pub fn null_count(&self) -> Option<usize> {
        self.nulls
    }

    /// Returns the bitmap of `len` rows from row `offset` on, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the bitmap does not have these rows.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::argument(format!(
                "slice of {len} rows at {offset} of a validity bitmap of {} rows",
                self.len
            )));
        }
        let nulls = match self.nulls {
            Some(n) if n == 0 || len == self.len => Some(n),
            Some(n) if n == self.len => Some(len),
            _ => None,
        };
        Ok(Self {
            buffer: self.buffer.clone(),
            bit_offset: self.bit_offset + offset,
            len,
            nulls,
        })
    }

    /// Lends the bitmap to work on `queue`, as [`DeviceArray::validity_on`](crate::DeviceArray::validity_on) does:
    /// the queue waits until the memory is ready, and dropping the loan records the use.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the queue belongs to another device, and the errors that the device
    /// reports.
    pub fn on(&self, queue: &Queue) -> Result<DeviceBits<'_>> {
        check_queue(queue, self.device())?;
        let owner = self.buffer.owner();
        owner.wait_on(queue)?;
        let (address, bit_offset) = (self.buffer.address(), self.bit_offset);
        Ok(DeviceBits::new(
            Some(owner),
            queue,
            address,
            bit_offset,
            self.len,
        ))
    }

    /// The buffer, its first bit and the number of nulls.
    pub(crate) fn into_parts(self) -> (DeviceBuffer, usize, Option<usize>) {
        (self.buffer, self.bit_offset, self.nulls)
    }
}
