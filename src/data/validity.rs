//! [`Validity`].

use arrow_schema::DataType;

use crate::data::access::DeviceBits;
use crate::data::array::DeviceArray;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, check_queue};

/// A validity bitmap in device memory: it says which rows of an array are null. The bit of row `i` is bit
/// `bit_offset + i` of the buffer, least significant bit first; a set bit is a value, an unset one a null.
///
/// It is to device memory what arrow-rs's [`NullBuffer`](arrow_buffer::NullBuffer) is to host memory. A
/// column lends its own, slices included ([`DeviceArray::validity`]), and the result of a kernel takes it
/// ([`DeviceArray::from_values`], [`DeviceArray::with_values`]). Clones and slices share the memory; nothing
/// is copied.
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
    buffer: DeviceBuffer,
    bit_offset: usize,
    /// Rows.
    len: usize,
    /// The number of nulls where an array knew it that has these rows.
    nulls: Option<usize>,
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

    /// Lends the bitmap to work on `queue`, as [`DeviceArray::validity_on`] does: the queue waits until the
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

impl DeviceArray {
    /// The validity bitmap of exactly these rows, without a copy, to be given to another array or to a
    /// kernel. `None` if the array has none, and so no nulls of its own.
    ///
    /// Arrays of the types null, union and run-end encoded never have one; nulls of a dictionary's values, and
    /// of a child's parent, are in the bitmaps of those.
    pub fn validity(&self) -> Option<Validity> {
        let (tree, view) = (self.tree(), self.view());
        let slot = tree.bitmap_of(&tree.nodes[view.node])?;
        // The length of a bitmap follows from the rows, which were checked when the array was made.
        let needed = (view.validity_offset + view.length).div_ceil(8);
        let owner = tree.owner(slot).clone();
        let bytes = slot.bytes().unwrap_or(needed);
        Some(Validity {
            buffer: DeviceBuffer::from_parts(owner, slot.base, slot.offset, bytes),
            bit_offset: view.validity_offset,
            len: view.length,
            nulls: self.null_count(),
        })
    }

    /// An array with the rows of this one, null where this one is, and with new `values`: what a kernel of one
    /// input returns. The validity bitmap is shared, not copied, also where this array is a slice.
    ///
    /// `data_type` is any type that [`from_values`](Self::from_values) takes, `values` has the value of this
    /// array's first row at its start.
    ///
    /// An export may have to copy the bitmap if this array starts within a byte of it: see
    /// [`export`](Self::export).
    ///
    /// ```
    /// use arrow_array::{Array, Float64Array, Int32Array};
    /// use arrow_device::{DeviceBufferMut, Devices};
    /// use arrow_schema::DataType;
    /// let device = Devices::cpu();
    /// let queue = device.default_queue();
    /// let column = Int32Array::from(vec![None, Some(1), None, Some(3)]);
    /// let column = device.upload_array(&column)?.slice(1, 3)?;
    /// let mut out = DeviceBufferMut::allocate(&queue, 3 * 8)?;
    /// out.fill(0)?; // stands for a kernel that reads `column.values_on::<i32>(&queue)?`
    /// let result = column.with_values(DataType::Float64, out.freeze()?)?;
    /// let expected = Float64Array::from(vec![Some(0.0), None, Some(0.0)]);
    /// assert_eq!(result.to_host()?.as_ref(), &expected as &dyn Array);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_values`](Self::from_values); [`Error::InvalidArgument`] also if this array is of a type that
    /// has nulls but no validity bitmap (null, union, run-end encoded).
    pub fn with_values(&self, data_type: DataType, values: DeviceBuffer) -> Result<Self> {
        if !self.tree().layout(self.view().node).has_validity() {
            return Err(Error::argument(format!(
                "{} has no validity bitmap that says which rows are null; use from_values",
                self.data_type()
            )));
        }
        Self::from_values(data_type, self.len(), values, self.validity())
    }
}
