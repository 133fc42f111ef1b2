//! Typed, ordered access for kernels.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use arrow_buffer::{ArrowNativeType, i256};
use arrow_schema::{DataType, IntervalUnit, UnionMode};

use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Layout, Nesting};
use crate::device::{DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{Owner, check_queue};

/// The rows of one buffer, lent to the work of one queue: the queue waits until the memory is
/// ready, and dropping the loan records the use, so that the memory outlives the work. Queue the
/// kernel while the loan lives.
#[must_use = "dropping the loan says that the work that uses the values was queued"]
pub struct DeviceSlice<'a, T> {
    owner: Option<&'a Arc<Owner>>,
    queue: Queue,
    address: DevicePtr,
    len: usize,
    values: PhantomData<fn() -> T>,
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

impl DeviceArray {
    /// The values of an array with fixed-width values of the native type `T` (`i64` serves `Int64`,
    /// `Timestamp`, `Duration`, ...; dictionaries give their keys).
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
    /// [`Error::InvalidArgument`] for another type, misaligned values, or a queue of another device.
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

    /// The offsets of binary, text, list and map arrays (rows + 1 of them), of list views and of
    /// dense unions (one a row). `T` is `i32` or `i64` as the type says.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn offsets_on<T: ArrowNativeType>(&self, queue: &Queue) -> Result<DeviceSlice<'_, T>> {
        use DataType as D;
        let width = offset_width::<T>()?;
        // Bytes of an offset, where there is one more than rows.
        let second = match self.tree().layout(self.view().node).buffers().get(1) {
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

    /// The sizes of list views.
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

    /// The type ids of unions.
    ///
    /// # Errors
    /// As [`values_on`](Self::values_on).
    pub fn type_ids_on(&self, queue: &Queue) -> Result<DeviceSlice<'_, i8>> {
        match self.data_type() {
            DataType::Union(_, _) => self.elements_on(queue, 0, 0),
            t => Err(Error::argument(format!("{t} has no type ids"))),
        }
    }

    /// The validity bitmap: a set bit is a value, an unset one a null. `None` if the array has no bitmap, and
    /// so no nulls of its own. [`validity`](Self::validity) is the same to keep, or to give to another array.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a queue of another device.
    pub fn validity_on(&self, queue: &Queue) -> Result<Option<DeviceBits<'_>>> {
        let (tree, view) = (self.tree(), self.view());
        if tree.bitmap_of(&tree.nodes[view.node]).is_none() {
            return Ok(None);
        }
        self.bits_on(queue, 0, view.validity_offset).map(Some)
    }

    /// The values of a boolean array.
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

    /// One element of `T` per row, and `extra` more, of a slot.
    fn elements_on<T>(
        &self,
        queue: &Queue,
        slot: usize,
        extra: usize,
    ) -> Result<DeviceSlice<'_, T>> {
        let (owner, base) = self.lend(queue, slot)?;
        let slot = &self.tree().slots(self.view().node)[slot];
        let (mut address, mut len) = (base, 0);
        // Sizes were checked when the array was made: rows fit the buffer. Only the one offset of no
        // rows may be missing.
        let needed = (self.offset() + self.len() + extra).saturating_mul(size_of::<T>());
        if !base.is_null() && slot.bytes().is_none_or(|bytes| bytes >= needed) {
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
        let slot = &self.tree().slots(self.view().node)[slot];
        if slot.is_null() {
            return Ok((None, DevicePtr::NULL));
        }
        let owner = self.tree().owner(slot);
        owner.wait_on(queue)?;
        Ok((Some(owner), slot.address()))
    }
}

/// Bytes of an offset or size of the native type `T`, `i32` or `i64`.
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

/// Whether the values of `data_type` are of the native type `T`.
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
