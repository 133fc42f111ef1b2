//! Kernel access: loans of an array's values, offsets and validity bitmap, ordered on a queue and checked by type.

use std::marker::PhantomData;
use std::sync::Arc;

use arrow_buffer::{ArrowNativeType, i256};
use arrow_schema::{DataType, IntervalUnit, UnionMode};

use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Layout, Nesting};
use crate::data::loan::{DeviceBits, DeviceSlice};
use crate::data::validity::Validity;
use crate::device::{DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, Owner, check_queue};

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
        let owner = bitmap.owner.clone()?;
        let bytes = bitmap.bytes().unwrap_or(needed);
        Some(Validity {
            buffer: DeviceBuffer::from_parts(owner, bitmap.base, bitmap.offset, bytes),
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
    /// Returns [`Error::InvalidArgument`] if the array has another type, if the values are misaligned or if the
    /// queue belongs to another device.
    pub fn values_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<DeviceSlice<'_, T>> {
        if !is_native::<T>(self.data_type()) {
            return Err(Error::argument(format!(
                "values of {} are not {}",
                self.data_type(),
                std::any::type_name::<T>()
            )));
        }
        self.elements_on(queue, 1, 0)
    }

    /// Lends the keys of a dictionary array, which are positions in [`dictionary`](Self::dictionary). `K` is the native
    /// type of the keys, for example `i32`. The queue waits as for [`values_on`](Self::values_on); nothing is copied.
    ///
    /// ```
    /// # use arrow_array::{DictionaryArray, types::Int32Type};
    /// # use arrow_device::Devices;
    /// let device = Devices::cpu();
    /// let queue = device.default_queue();
    /// let colours: DictionaryArray<Int32Type> = ["red", "blue", "red"].into_iter().collect();
    /// let colours = device.upload_array(&colours)?;
    /// let keys = colours.keys_on::<i32>(&queue)?;
    /// let names = colours.dictionary().expect("its values");
    /// assert_eq!((keys.len(), names.len()), (3, 2));
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn keys_on<K: ArrowNativeType>(&self, queue: &Queue) -> Result<DeviceSlice<'_, K>> {
        match self.data_type() {
            DataType::Dictionary(key, _) if is_native::<K>(key) => self.elements_on(queue, 1, 0),
            DataType::Dictionary(key, _) => Err(Error::argument(format!(
                "keys_on on {}: the keys are of type {key}, not {}",
                self.device(),
                std::any::type_name::<K>()
            ))),
            t => Err(Error::argument(format!(
                "keys_on on {}: {t} is not a dictionary and has no keys; use values_on",
                self.device()
            ))),
        }
    }

    /// Lends the offsets of a binary, text, list or map array (one more than rows), of a list view or of a dense
    /// union (one for each row). `T` is `i32` or `i64`, depending on the type.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn offsets_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<DeviceSlice<'_, T>> {
        use DataType as D;
        let width = offset_width::<T>()?;
        // The width in bytes of offsets of which there is one more than rows.
        let second = match self.node().layout.buffers().get(1) {
            Some(BufferKind::Offsets { width }) => *width,
            _ => 0,
        };
        match self.data_type() {
            D::ListView(_) if width == 4 => self.elements_on(queue, 1, 0),
            D::LargeListView(_) if width == 8 => self.elements_on(queue, 1, 0),
            D::Union(_, UnionMode::Dense) if width == 4 => self.elements_on(queue, 1, 0),
            _ if usize::from(second) == width => self.elements_on(queue, 1, 1),
            t => Err(Error::argument(format!(
                "{t} has no offsets of {width} bytes"
            ))),
        }
    }

    /// Lends the bytes of a binary or text array, or of a fixed-size binary array.
    ///
    /// For binary and text these are all bytes of the data buffer, even if this array is a slice: the offsets of
    /// [`offsets_on`](Self::offsets_on) count from the first of them. For fixed-size binary they are exactly these
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
    /// Returns [`Error::InvalidArgument`] if the array has another type or if the queue belongs to another device, and
    /// [`Error::InvalidInput`] if a size that is stored in device memory is impossible. Also returns the errors that the
    /// device reports.
    pub fn bytes_on(&self, queue: &Queue) -> Result<DeviceSlice<'_, u8>> {
        let (buffer, first, len) = match self.node().layout.buffers() {
            [_, BufferKind::Offsets { .. }, BufferKind::Bytes] => {
                check_queue(queue, self.device())?;
                (2, 0, self.read_bytes_on(queue)?)
            }
            [_, BufferKind::Fixed { width, .. }]
                if matches!(self.data_type(), DataType::FixedSizeBinary(_)) =>
            {
                // The buffer has the bytes of all rows, which was checked when the array was made.
                let width = *width as usize;
                (1, self.offset() * width, self.len() * width)
            }
            _ => {
                return Err(Error::argument(format!(
                    "bytes_on on {}: {} has no data bytes; only binary, text and fixed-size binary arrays have them",
                    self.device(),
                    self.data_type()
                )));
            }
        };
        let (owner, base) = self.lend(queue, buffer)?;
        let len = if base.is_null() { 0 } else { len };
        Ok(DeviceSlice {
            owner,
            queue: queue.clone(),
            address: match len {
                0 => DevicePtr::NULL,
                _ => base.offset(first),
            },
            len,
            values: PhantomData,
        })
    }

    /// Lends the sizes of a list view, in elements. `T` is `i32` or `i64`, depending on the type.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn sizes_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<DeviceSlice<'_, T>> {
        match (self.data_type(), offset_width::<T>()?) {
            (DataType::ListView(_), 4) | (DataType::LargeListView(_), 8) => {
                self.elements_on(queue, 2, 0)
            }
            (t, width) => Err(Error::argument(format!(
                "{t} has no sizes of {width} bytes"
            ))),
        }
    }

    /// Lends the type ids of a union.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn type_ids_on(&self, queue: &Queue) -> Result<DeviceSlice<'_, i8>> {
        match self.data_type() {
            DataType::Union(_, _) => self.elements_on(queue, 0, 0),
            t => Err(Error::argument(format!("{t} has no type ids"))),
        }
    }

    /// Lends the validity bitmap: a set bit marks a value, an unset bit a null. Returns `None` if the array has no
    /// bitmap, and so no nulls of its own. [`validity`](Self::validity) returns the same bits to keep, or to pass
    /// to another array.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the queue belongs to another device.
    pub fn validity_on(&self, queue: &Queue) -> Result<Option<DeviceBits<'_>>> {
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
    pub fn booleans_on(&self, queue: &Queue) -> Result<DeviceBits<'_>> {
        match self.data_type() {
            DataType::Boolean => self.bits_on(queue, 1, self.view().offset),
            t => Err(Error::argument(format!("{t} has no boolean values"))),
        }
    }

    fn bits_on(&self, queue: &Queue, slot: usize, bit_offset: usize) -> Result<DeviceBits<'_>> {
        let (owner, address) = self.lend(queue, slot)?;
        let len = self.len();
        Ok(DeviceBits::new(owner, queue, address, bit_offset, len))
    }

    /// Lends one element of `T` for each row, and `extra` more, of buffer `slot`.
    fn elements_on<T>(
        &self,
        queue: &Queue,
        slot: usize,
        extra: usize,
    ) -> Result<DeviceSlice<'_, T>> {
        let (owner, base) = self.lend(queue, slot)?;
        let buffer = &self.node().buffers[slot];
        let (mut address, mut len) = (base, 0);
        // The rows fit the buffer, which was checked when the array was made. Only the single offset of an array without
        // rows may be missing.
        let needed = (self.offset() + self.len() + extra).saturating_mul(size_of::<T>());
        if !base.is_null() && buffer.bytes().is_none_or(|bytes| bytes >= needed) {
            address = base.offset(self.offset() * size_of::<T>());
            len = self.len() + extra;
        }
        if len == 0 {
            address = DevicePtr::NULL;
        }
        if address.address() % align_of::<T>() != 0 {
            return Err(Error::argument(format!(
                "values at {address:?} are not aligned to {} bytes",
                align_of::<T>()
            )));
        }
        Ok(DeviceSlice {
            owner,
            queue: queue.clone(),
            address,
            len,
            values: PhantomData,
        })
    }

    fn lend(&self, queue: &Queue, slot: usize) -> Result<(Option<&Arc<Owner>>, DevicePtr)> {
        check_queue(queue, self.device())?;
        let buffer = &self.node().buffers[slot];
        let Some(owner) = &buffer.owner else {
            return Ok((None, DevicePtr::NULL));
        };
        owner.wait_on(queue)?;
        Ok((Some(owner), buffer.address()))
    }
}

/// Returns the width in bytes of offsets or sizes of the native type `T`, `i32` or `i64`.
fn offset_width<T: ArrowNativeType>() -> Result<usize> {
    use std::any::TypeId;
    let of = TypeId::of::<T>();
    if of == TypeId::of::<i32>() || of == TypeId::of::<i64>() {
        return Ok(size_of::<T>());
    }
    Err(Error::argument(format!(
        "offsets and sizes are i32 or i64, not {}",
        std::any::type_name::<T>()
    )))
}

/// Returns whether `T` is the native type of the values of `data_type`.
fn is_native<T: ArrowNativeType>(data_type: &DataType) -> bool {
    use DataType as D;
    use std::any::TypeId;
    let of = |t: TypeId| TypeId::of::<T>() == t;
    match data_type {
        D::Dictionary(key, _) => is_native::<T>(key),
        D::Int8 => of(TypeId::of::<i8>()),
        D::Int16 => of(TypeId::of::<i16>()),
        D::UInt8 => of(TypeId::of::<u8>()),
        D::UInt16 => of(TypeId::of::<u16>()),
        D::UInt32 => of(TypeId::of::<u32>()),
        D::UInt64 => of(TypeId::of::<u64>()),
        D::Float16 => of(TypeId::of::<half::f16>()),
        D::Float32 => of(TypeId::of::<f32>()),
        D::Float64 => of(TypeId::of::<f64>()),
        D::Interval(IntervalUnit::DayTime) => of(TypeId::of::<arrow_buffer::IntervalDayTime>()),
        D::Interval(IntervalUnit::MonthDayNano) => {
            of(TypeId::of::<arrow_buffer::IntervalMonthDayNano>())
        }
        D::Decimal128(_, _) => of(TypeId::of::<i128>()),
        D::Decimal256(_, _) => of(TypeId::of::<i256>()),
        D::Utf8View | D::BinaryView => of(TypeId::of::<u128>()),
        t => {
            let layout = Layout::of(t);
            if layout.nesting != Nesting::Leaf || layout.buffers().len() != 2 {
                return false;
            }
            match layout.buffers()[1] {
                BufferKind::Fixed { width: 4, align: 4 } => of(TypeId::of::<i32>()),
                BufferKind::Fixed { width: 8, align: 8 } => of(TypeId::of::<i64>()),
                _ => false,
            }
        }
    }
}
