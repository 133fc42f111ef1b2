//! [`Validity`]: the bitmap that says which rows are null.

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
