//! Kernel access: loans of an array's values, offsets and validity bitmap, ordered on a queue and checked by type.

use std::any::TypeId;
use std::sync::Arc;

use arrow_array::{ArrowPrimitiveType, downcast_primitive};
use arrow_buffer::ArrowNativeType;
use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Nesting};
use crate::data::node::NodeBuffer;
use crate::device::{Device, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{Loan, Owner, check_queue};

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
    pub fn values_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<Loan<'_, T>> {
        if !is_native::<T>(self.data_type()) {
            return Err(Error::argument(format!(
                "values of {} are not {}",
                self.data_type(),
                std::any::type_name::<T>()
            )));
        }
        self.elements_on(queue, 1, 0)
    }

    /// Lends the offsets of a binary, text, list or map array (one more than rows), of a list view or of a dense
    /// union (one for each row). `T` is `i32` or `i64`, depending on the type.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn offsets_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<Loan<'_, T>> {
        self.integers_on(queue, 1, "offsets")
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
    /// Returns [`Error::InvalidArgument`] if the array has another type or if the queue belongs to another device, and
    /// [`Error::InvalidInput`] if a size that is stored in device memory is impossible. Also returns the errors that the
    /// device reports.
    pub fn bytes_on(&self, queue: &Queue) -> Result<Loan<'_>> {
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
        let buffer = &self.node().buffers[buffer];
        let len = if buffer.is_null() { 0 } else { len };
        Loan::new(
            self.lender(buffer),
            queue,
            buffer.address().offset(first),
            len,
        )
    }

    /// Lends the sizes of a list view, in elements. `T` is `i32` or `i64`, depending on the type.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn sizes_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<Loan<'_, T>> {
        self.integers_on(queue, 2, "sizes")
    }

    /// Lends the type ids of a union.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn type_ids_on(&self, queue: &Queue) -> Result<Loan<'_, i8>> {
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
            DataType::Boolean => self.bits_on(queue, 1, self.view().offset),
            t => Err(Error::argument(format!("{t} has no boolean values"))),
        }
    }

    /// Lends the bit of each row of buffer `slot`, the first of which is bit `bit_offset`.
    fn bits_on(&self, queue: &Queue, slot: usize, bit_offset: usize) -> Result<Loan<'_, bool>> {
        let buffer = &self.node().buffers[slot];
        let mut bits = Loan::new(self.lender(buffer), queue, buffer.address(), self.len())?;
        bits.bit_offset = bit_offset;
        Ok(bits)
    }

    /// Lends buffer `slot`, which is of offsets or of sizes of the native type `T`, `i32` or `i64`.
    fn integers_on<T: ArrowNativeType>(
        &self,
        queue: &Queue,
        slot: usize,
        what: &str,
    ) -> Result<Loan<'_, T>> {
        let layout = &self.node().layout;
        let (width, extra) = match layout.buffers().get(slot) {
            Some(BufferKind::Offsets { width }) => (u32::from(*width), 1),
            // Of a list view or of a dense union.
            Some(BufferKind::Fixed { width, .. }) if layout.nesting == Nesting::Anywhere => {
                (*width, 0)
            }
            _ => (0, 0),
        };
        let is_of_width = match width {
            4 => TypeId::of::<T>() == TypeId::of::<i32>(),
            8 => TypeId::of::<T>() == TypeId::of::<i64>(),
            _ => false,
        };
        if !is_of_width {
            return Err(Error::argument(format!(
                "{} has no {what} of type {}",
                self.data_type(),
                std::any::type_name::<T>()
            )));
        }
        self.elements_on(queue, slot, extra)
    }

    /// Lends one element of `T` for each row, and `extra` more, of buffer `slot`.
    fn elements_on<T>(&self, queue: &Queue, slot: usize, extra: usize) -> Result<Loan<'_, T>> {
        let buffer = &self.node().buffers[slot];
        // The rows fit the buffer, which was checked when the array was made. Only the single offset of an array without
        // rows may be missing.
        let needed = (self.offset() + self.len() + extra).saturating_mul(size_of::<T>());
        let is_there = !buffer.is_null() && buffer.bytes().is_none_or(|bytes| bytes >= needed);
        let (address, len) = match self.len() + extra {
            len if is_there && len > 0 => {
                let first = self.offset() * size_of::<T>();
                (buffer.address().offset(first), len)
            }
            _ => (DevicePtr::NULL, 0),
        };
        if address.address() % align_of::<T>() != 0 {
            return Err(Error::argument(format!(
                "values at {address:?} are not aligned to {} bytes",
                align_of::<T>()
            )));
        }
        Loan::new(self.lender(buffer), queue, address, len)
    }

    /// What a loan of `buffer` is of.
    fn lender<'a>(&'a self, buffer: &'a NodeBuffer) -> (&'a Device, Option<&'a Arc<Owner>>) {
        (self.device(), buffer.owner.as_ref())
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
