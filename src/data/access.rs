//! Kernel access: loans of an array's values, offsets and validity bitmap, ordered on a queue and checked by type; [`Validity`], the
//! bitmap that says which rows are null.

use std::any::{TypeId, type_name};

use arrow_array::{ArrowPrimitiveType, downcast_primitive};
use arrow_buffer::ArrowNativeType;
use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Nesting};
use crate::device::{DevicePtr, Queue};
use crate::error::{Result, bail};
use crate::memory::{DeviceBuffer, Loan, check_queue};

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
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the buffer has fewer than `bit_offset + len` bits.
    pub fn new(buffer: DeviceBuffer, bit_offset: usize, len: usize) -> Result<Self> {
        let end = bit_offset.checked_add(len);
        if end.is_none_or(|end| end.div_ceil(8) > buffer.len()) {
            let bytes = buffer.len();
            bail!(
                "a validity bitmap of {len} rows from bit {bit_offset} in a buffer of {bytes} bytes"
            );
        }
        Ok(Self {
            buffer,
            bit_offset,
            len,
            nulls: None,
        })
    }

    /// Returns the same bitmap with a number of nulls that is known.
    ///
    /// # Safety
    /// It is the number of unset bits of these rows.
    #[must_use]
    pub unsafe fn with_null_count(self, nulls: usize) -> Self {
        let nulls = Some(nulls);
        Self { nulls, ..self }
    }

    /// Returns the buffer that holds the bits.
    pub fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Returns which bit of the buffer is the first row's.
    pub fn bit_offset(&self) -> usize {
        self.bit_offset
    }
}

impl DeviceArray {
    /// Lends the values of a fixed-width array to work on `queue`; for a dictionary, its keys. `T` is the native
    /// type, for example `i64` for `Int64`, `Timestamp(_, _)` and `Duration(_)`.
    ///
    /// The queue waits until the memory is ready, and dropping the loan records the use; this thread does not
    /// wait. Nothing is copied.
    ///
    /// ```
    /// # use arrow_array::{ArrayRef, Int64Array};
    /// # use arrow_device::Devices;
    /// # use std::sync::Arc;
    /// let device = Devices::cpu();
    /// let array = device.upload_array(&(Arc::new(Int64Array::from(vec![1, 2, 3])) as ArrayRef))?;
    /// let queue = device.default_queue();
    /// let values = array.slice(1, 2)?;
    /// let values = values.values_on::<i64>(&queue)?; // queue the kernel, then drop `values`
    /// assert_eq!(values.len(), 2);
    /// assert!(array.values_on::<i32>(&queue).is_err());
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the array has another type, if the values are misaligned or if the
    /// queue belongs to another device.
    pub fn values_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<Loan<'_, T>> {
        let data_type = self.data_type();
        if !is_native::<T>(data_type) {
            bail!("values of {data_type} are not {}", type_name::<T>());
        }
        self.elements_on(queue, 1, 0)
    }

    /// Lends the offsets of a binary, text, list or map array (one more than rows), of a list view or of a dense
    /// union (one for each row). `T` is `i32` or `i64`, depending on the type.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn offsets_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<Loan<'_, T>> {
        let layout = &self.node().layout;
        let (width, extra) = match layout.buffers().get(1) {
            Some(BufferKind::Offsets { width }) => (usize::from(*width), 1),
            // Of a list view or of a dense union.
            Some(BufferKind::Fixed { width, .. }) if layout.nesting == Nesting::Anywhere => {
                (*width as usize, 0)
            }
            _ => (0, 0),
        };
        let is_integer = [TypeId::of::<i32>(), TypeId::of::<i64>()].contains(&TypeId::of::<T>());
        if !is_integer || width != size_of::<T>() {
            let data_type = self.data_type();
            bail!("{data_type} has no offsets of type {}", type_name::<T>());
        }
        self.elements_on(queue, 1, extra)
    }

    /// Lends the bytes of a binary or text array, or of a fixed-size binary array.
    ///
    /// For binary and text these are the bytes of the data buffer, even if this array is a slice, to whose last value they may end:
    /// the offsets of [`offsets_on`](Self::offsets_on) count from the first of them. For fixed-size binary they are exactly these
    /// rows' bytes.
    ///
    /// Nothing is copied or allocated. This thread does not wait, unless the size of the data buffer is stored in device
    /// memory and not known yet: then it is read on `queue` with one host wait, and kept. Of imported arrays it may be
    /// unknown, of uploaded ones never.
    ///
    /// ```
    /// # use arrow_array::StringArray;
    /// # use arrow_device::Devices;
    /// let device = Devices::cpu();
    /// let queue = device.default_queue();
    /// let names = device.upload_array(&StringArray::from(vec!["a", "bcd"]))?;
    /// // What a kernel needs for the lengths of strings, and for their bytes.
    /// let offsets = names.offsets_on::<i32>(&queue)?;
    /// let bytes = names.bytes_on(&queue)?;
    /// assert_eq!((offsets.len(), bytes.len()), (3, 4));
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the array has another type or if the queue belongs to another device, and
    /// [`Error::InvalidInput`](crate::Error::InvalidInput) if a size that is stored in device memory is impossible. Also returns the errors that the
    /// device reports.
    pub fn bytes_on(&self, queue: &Queue) -> Result<Loan<'_>> {
        let (slot, first, len) = match self.node().layout.buffers() {
            [_, BufferKind::Offsets { .. }, BufferKind::Bytes] => {
                check_queue(queue, self.device())?;
                self.resolve_sizes_on(Some(queue))?;
                (2, 0, self.node().buffers[2].bytes().unwrap_or(0))
            }
            [_, BufferKind::Fixed { width, .. }]
                if matches!(self.data_type(), DataType::FixedSizeBinary(_)) =>
            {
                // The buffer has the bytes of all rows, which was checked when the array was made.
                let width = *width as usize;
                (1, self.offset() * width, self.len() * width)
            }
            _ => bail!(
                "bytes_on on {}: {} has no data bytes; only binary, text and fixed-size binary arrays have them",
                self.device(),
                self.data_type()
            ),
        };
        let is_there = !self.node().buffers[slot].is_null();
        self.lend(queue, slot, first, if is_there { len } else { 0 })
    }

    /// Lends the validity bitmap: a set bit marks a value, an unset bit a null. Returns `None` if the array has no
    /// bitmap, and so no nulls of its own. [`validity`](Self::validity) returns the same bits to keep, or to pass
    /// to another array.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the queue belongs to another device.
    pub fn validity_on(&self, queue: &Queue) -> Result<Option<Loan<'_, bool>>> {
        if self.node().bitmap().is_none() {
            return Ok(None);
        }
        self.bits_on(queue, 0, self.view().validity_offset)
            .map(Some)
    }

    /// Lends the values of a boolean array, one bit for each row.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn booleans_on(&self, queue: &Queue) -> Result<Loan<'_, bool>> {
        match self.data_type() {
            DataType::Boolean => self.bits_on(queue, 1, self.offset()),
            t => bail!("{t} has no boolean values"),
        }
    }

    /// Returns the validity bitmap of exactly these rows, without a copy, for another array or a kernel. Returns
    /// `None` if the array has no bitmap, and so no nulls of its own.
    ///
    /// Null, union and run-end encoded arrays never have one. The nulls of a dictionary's values are in the bitmap
    /// of the values, and those of a struct are not in the bitmaps of its children.
    pub fn validity(&self) -> Option<Validity> {
        let view = self.view();
        let bitmap = view.node.bitmap()?;
        Some(Validity {
            buffer: bitmap.to_buffer(bitmap.bytes()?)?,
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
    /// As [`from_values`](Self::from_values). Also returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if this array's type has no
    /// validity bitmap (null, union, run-end encoded).
    pub fn with_values(&self, data_type: DataType, values: DeviceBuffer) -> Result<Self> {
        if !self.node().layout.has_validity() {
            let of = self.data_type();
            bail!("{of} has no validity bitmap that says which rows are null; use from_values");
        }
        Self::from_values(data_type, self.len(), values, self.validity())
    }

    /// Lends the bit of each row of buffer `slot`, the first of which is bit `bit_offset`.
    fn bits_on(&self, queue: &Queue, slot: usize, bit_offset: usize) -> Result<Loan<'_, bool>> {
        let mut bits = self.lend(queue, slot, 0, self.len())?;
        bits.bit_offset = bit_offset;
        Ok(bits)
    }

    /// Lends one element of `T` for each row, and `extra` more, of buffer `slot`.
    fn elements_on<T>(&self, queue: &Queue, slot: usize, extra: usize) -> Result<Loan<'_, T>> {
        let buffer = &self.node().buffers[slot];
        // The rows fit the buffer, which was checked when the array was made. Only the single offset of an array without
        // rows may be missing.
        let needed = (self.offset() + self.len() + extra).saturating_mul(size_of::<T>());
        let is_there = !buffer.is_null() && buffer.bytes().is_none_or(|bytes| bytes >= needed);
        let len = if is_there { self.len() + extra } else { 0 };
        // Null is aligned for every type.
        let address = match len {
            0 => DevicePtr::NULL,
            _ => buffer.address().offset(self.offset() * size_of::<T>()),
        };
        let align = align_of::<T>();
        if address.address() % align != 0 {
            bail!("values at {address:?} are not aligned to {align} bytes");
        }
        Loan::new((self.device(), buffer.owner.as_ref()), queue, address, len)
    }

    /// Lends `len` elements of a buffer from byte `first` on.
    fn lend<T>(&self, queue: &Queue, slot: usize, first: usize, len: usize) -> Result<Loan<'_, T>> {
        let buffer = &self.node().buffers[slot];
        let lender = (self.device(), buffer.owner.as_ref());
        Loan::new(lender, queue, buffer.address().offset(first), len)
    }
}

/// Returns whether `T` is the native type of the values of `data_type`, or of its keys if it is a dictionary.
fn is_native<T: ArrowNativeType>(data_type: &DataType) -> bool {
    macro_rules! native {
        ($t:ty) => {
            TypeId::of::<T>() == TypeId::of::<<$t as ArrowPrimitiveType>::Native>()
        };
    }
    downcast_primitive! {
        data_type => (native),
        DataType::Dictionary(key, _) => is_native::<T>(key),
        DataType::Utf8View | DataType::BinaryView => TypeId::of::<T>() == TypeId::of::<u128>(),
        _ => false,
    }
}
