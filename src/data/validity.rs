//! [`Validity`].

use crate::data::loan::DeviceBits;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, check_queue};

/// A validity bitmap in device memory: it says which rows of an array are null. The bit of row `i` is bit
/// `bit_offset + i` of the buffer, least significant bit first; a set bit is a value, an unset one a null.
///
/// It is to device memory what arrow-rs's [`NullBuffer`](arrow_buffer::NullBuffer) is to host memory. A
/// column returns its own, slices included ([`DeviceArray::validity`]), and the result of a kernel takes it
/// ([`DeviceArray::from_values`], [`DeviceArray::with_values`]). Clones and slices share the memory; nothing
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
    /// The number of nulls where an array knew it that has these rows.
    pub(super) nulls: Option<usize>,
}

impl Validity {
    /// The bitmap of `len` rows from bit `bit_offset` of `buffer`. How many of them are null is not known:
    /// nothing is read.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the buffer has fewer than `bit_offset + len` bits.
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

    /// The device whose memory the bitmap is in.
    pub fn device(&self) -> &Device {
        self.buffer.device()
    }

    /// The buffer that holds the bits, with those before the first row and behind the last one.
    pub fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// The bit of the first row in the buffer.
    pub fn bit_offset(&self) -> usize {
        self.bit_offset
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of nulls, or `None` if it is not known. It is known where the bitmap comes from an
    /// array that knows it. Never reads device memory.
    pub fn null_count(&self) -> Option<usize> {
        self.nulls
    }

    /// The bitmap of `len` rows from row `offset` on, without a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they do not lie inside.
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

    /// Lends the bitmap to work on `queue`, as [`DeviceArray::validity_on`](crate::DeviceArray::validity_on) does: the queue waits until the
    /// memory is ready, and dropping the loan records the use.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a queue of another device; what the device reports.
    pub fn on(&self, queue: &Queue) -> Result<DeviceBits<'_>> {
        check_queue(queue, self.device())?;
        let owner = self.buffer.owner();
        owner.wait_on(queue)?;
        let address = self.buffer.address();
        let (bit_offset, len) = (self.bit_offset, self.len);
        Ok(DeviceBits::new(
            Some(owner),
            queue,
            address,
            bit_offset,
            len,
        ))
    }

    /// The buffer, its first bit and the number of nulls.
    pub(crate) fn into_parts(self) -> (DeviceBuffer, usize, Option<usize>) {
        (self.buffer, self.bit_offset, self.nulls)
    }
}
