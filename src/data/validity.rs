//! [`Validity`]: the bitmap that says which rows are null.

use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::error::{Error, Result};
use crate::memory::DeviceBuffer;

/// A validity bitmap in device memory, which says which rows of an array are null. The bit of row `i` is bit
/// `bit_offset + i` of the buffer, least significant bit first; a set bit marks a value, an unset bit a null.
///
/// It corresponds to arrow-rs's [`NullBuffer`](arrow_buffer::NullBuffer) for host memory.
/// [`DeviceArray::validity`] returns that of a column or slice, and [`DeviceArray::from_values`] and
/// [`DeviceArray::with_values`] accept one for the result of a kernel. Nothing is copied, and clones share the memory. Kernels read
/// the bitmap of a column by [`DeviceArray::validity_on`].
///
/// [`DeviceArray::validity`]: crate::DeviceArray::validity
/// [`DeviceArray::from_values`]: crate::DeviceArray::from_values
/// [`DeviceArray::with_values`]: crate::DeviceArray::with_values
/// [`DeviceArray::validity_on`]: crate::DeviceArray::validity_on
///
/// ```
/// use arrow_array::{Array, Float64Array, Int64Array};
/// use arrow_buffer::Buffer;
/// use arrow_device::{DeviceArray, DeviceBuffer, Devices, Validity};
/// use arrow_schema::DataType;
/// let column = Int64Array::from(vec![Some(1), None, Some(3), None, Some(5)]);
/// let column = Devices::cpu().upload_array(&column)?.slice(1, 3)?;
///
/// // What a kernel made of the column's values: the same rows are null.
/// let halves = DeviceBuffer::from(Buffer::from_vec(vec![0.0, 1.5, 0.0]));
/// let result = DeviceArray::from_values(DataType::Float64, 3, halves, column.validity())?;
/// let result = result.to_host()?;
/// assert_eq!(result.as_ref(), &Float64Array::from(vec![None, Some(1.5), None]) as &dyn Array);
///
/// // A bitmap that a kernel wrote: rows 0 and 2 of 3 are values.
/// let bits = DeviceBuffer::from(Buffer::from_vec(vec![0b101u8]));
/// let bytes = DeviceBuffer::from(Buffer::from_vec(vec![1u8, 2, 3]));
/// let written = Validity::new(bits.clone(), 0, 3)?;
/// let result = DeviceArray::from_values(DataType::Int8, 3, bytes, Some(written))?;
/// assert_eq!(result.resolve_null_counts()?, 1);
/// assert!(Validity::new(bits, 4, 5).is_err()); // the buffer has 8 bits
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[doc(alias = "NullBuffer")]
#[derive(Clone, Debug)]
pub struct Validity {
    pub(crate) buffer: DeviceBuffer,
    pub(crate) bit_offset: usize,
    /// Rows.
    pub(crate) len: usize,
    /// The number of nulls, known only from an array that has these rows and knows it.
    pub(crate) nulls: Option<usize>,
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
}

impl DeviceArray {
    /// Returns the validity bitmap of exactly these rows, without a copy, for another array or a kernel. Returns
    /// `None` if the array has no bitmap, and so no nulls of its own.
    ///
    /// Null, union and run-end encoded arrays never have one. The nulls of a dictionary's values are in the bitmap
    /// of the values, and those of a struct are not in the bitmaps of its children.
    pub fn validity(&self) -> Option<Validity> {
        let view = self.view();
        let bitmap = view.node.bitmap()?;
        // The buffer has these bits: its length was checked against the rows when the array was made.
        let needed = (view.validity_offset + view.length).div_ceil(8);
        Some(Validity {
            buffer: bitmap.to_buffer(bitmap.bytes().unwrap_or(needed))?,
            bit_offset: view.validity_offset,
            len: view.length,
            nulls: self.null_count(),
        })
    }

    /// Returns an array with new `values` and with the nulls of this array: the result of a kernel with one input.
    /// The validity bitmap is shared, not copied, even if this array is a slice.
    ///
    /// `data_type` is any type that [`from_values`](Self::from_values) accepts. `values` starts with the value of
    /// this array's first row.
    ///
    /// An export may have to copy the bitmap if this array starts within a byte of it; see
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
    /// As [`from_values`](Self::from_values). Also returns [`Error::InvalidArgument`] if this array's type has no
    /// validity bitmap (null, union, run-end encoded).
    pub fn with_values(&self, data_type: DataType, values: DeviceBuffer) -> Result<Self> {
        if !self.node().layout.has_validity() {
            return Err(Error::argument(format!(
                "{} has no validity bitmap that says which rows are null; use from_values",
                self.data_type()
            )));
        }
        Self::from_values(data_type, self.len(), values, self.validity())
    }
}
