//! Columns and buffers out.

use std::fmt;
use std::sync::Arc;

use arrow_schema::DataType;

use super::abi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor};
use super::abi::{Managed, check_addresses};
use super::stream::{DlpackStream, Order};
use super::types::element;
use crate::abi::guard;
use crate::data::DeviceArray;
use crate::device::{Device, DevicePtr};
use crate::error::{Error, Result};
use crate::interchange::ReleasePolicy;
use crate::memory::{DeviceBuffer, Owner};

/// How a tensor is made.
///
/// ```
/// use arrow_device::ReleasePolicy;
/// use arrow_device::dlpack::{DlpackOptions, DlpackStream};
/// let options = DlpackOptions::new(DlpackStream::NONE).with_release(ReleasePolicy::Ordered);
/// # let _ = options;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DlpackOptions<'a> {
    stream: DlpackStream<'a>,
    nulls_ignored: bool,
    release: ReleasePolicy,
}

impl<'a> DlpackOptions<'a> {
    /// For a consumer that uses the tensor on `stream`; columns with nulls are refused, and the memory is
    /// freed after [all work of the device](Self::with_release).
    pub const fn new(stream: DlpackStream<'a>) -> Self {
        Self {
            stream,
            nulls_ignored: false,
            release: ReleasePolicy::Synchronize,
        }
    }

    /// Values go out although some may be null: what lies there is anything. The mask goes out by
    /// [`DeviceArray::export_dlpack_validity`]. Null counts that nobody knows are not counted then.
    #[must_use]
    pub const fn with_nulls_ignored(mut self) -> Self {
        self.nulls_ignored = true;
        self
    }

    /// What the deleter relies on; [`ReleasePolicy::Synchronize`] unless said otherwise.
    ///
    /// DLPack does not say in which order a consumer's work and its call of the deleter stand. Libraries
    /// call it when their own object dies, with kernels still queued, on streams that the producer need not
    /// know; the stream that was named may itself be gone by then. So by default a thread of the device
    /// waits for all its work before the memory is let go; the deleter itself returns at once. A consumer
    /// that waits, or orders its work before this crate's, is served without by [`ReleasePolicy::Ordered`].
    #[must_use]
    pub const fn with_release(mut self, release: ReleasePolicy) -> Self {
        self.release = release;
        self
    }
}

/// A column or buffer as a tensor, before it is given to a consumer. Its memory is ready for the stream
/// that the options named.
///
/// Dropping it lets go of the memory. The structs that the methods answer are freed by their deleter,
/// which may be called on any thread, neither waits nor unwinds, and lets go of the memory as the
/// [options](DlpackOptions::with_release) say. The memory lives until then, whatever becomes of the array.
#[must_use]
pub struct DlpackTensor {
    owner: Option<Arc<Owner>>,
    device: DLDevice,
    data: DevicePtr,
    dtype: DLDataType,
    shape: Vec<i64>,
    bit_offset: usize,
    release: ReleasePolicy,
}

impl DlpackTensor {
    /// Elements in each dimension.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Where the first element is; null if there is none.
    pub fn address(&self) -> DevicePtr {
        self.data
    }

    /// The type of an element.
    pub fn data_type(&self) -> DLDataType {
        self.dtype
    }

    /// Whose memory it is: what Python's `__dlpack_device__` answers.
    pub fn device(&self) -> DLDevice {
        self.device
    }

    /// Of bits (a mask, the values of booleans): how many of the first byte to skip, least significant
    /// first.
    pub fn bit_offset(&self) -> usize {
        self.bit_offset
    }

    /// The struct of DLPack 1.0 and later, marked read-only.
    ///
    /// The consumer calls its deleter once; if none does, the memory is never freed.
    #[must_use = "the memory is freed by the struct's deleter only"]
    pub fn into_versioned(self) -> *mut DLManagedTensorVersioned {
        self.into_managed()
    }

    /// The struct of DLPack before 1.0.
    ///
    /// As [`into_versioned`](Self::into_versioned) otherwise.
    ///
    /// # Safety
    /// The consumer writes nothing to the memory. Here it is not told: this struct has no place to say so.
    #[must_use = "the memory is freed by the struct's deleter only"]
    pub unsafe fn into_unversioned(self) -> *mut DLManagedTensor {
        self.into_managed()
    }

    fn into_managed<T: Managed>(self) -> *mut T {
        let ndim = self.shape.len();
        let strides = strides(&self.shape);
        let mut dims = self.shape;
        dims.extend(strides);
        let shape = dims.as_mut_ptr();
        let tensor = DLTensor {
            data: self.data.as_ptr(),
            device: self.device,
            // At most as many as types nest.
            ndim: ndim as i32,
            dtype: self.dtype,
            shape,
            strides: shape.wrapping_add(ndim),
            // PyTorch and others do not look at it.
            byte_offset: 0,
        };
        let block = Box::new(Block {
            tensor: T::new(tensor, delete::<T>),
            _dims: dims,
            owner: self.owner,
            release: self.release,
        });
        let block = Box::into_raw(block);
        // SAFETY: just made, and nobody else has it.
        unsafe {
            let managed = &raw mut (*block).tensor;
            T::set_manager_ctx(managed, block.cast());
            managed
        }
    }
}

impl fmt::Debug for DlpackTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DlpackTensor")
            .field("device", &self.device)
            .field("data", &self.data)
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// What a consumer's pointer points into; `manager_ctx` points to its start.
struct Block<T> {
    tensor: T,
    /// Shape, then strides.
    _dims: Vec<i64>,
    owner: Option<Arc<Owner>>,
    release: ReleasePolicy,
}

/// The deleter of all tensors of this crate.
///
/// # Safety
/// `tensor` is null, or has a `manager_ctx` of [`DlpackTensor::into_managed`] that was not deleted yet.
unsafe extern "C-unwind" fn delete<T: Managed>(tensor: *mut T) {
    if tensor.is_null() {
        return;
    }
    // A panic (of an owner's own drop) ends here: nobody could be told.
    let _ = guard::callback("the deleter of a DLPack tensor", || {
        // SAFETY: the caller's. The struct itself may have been moved; the block has not.
        let block = unsafe { Box::from_raw(T::manager_ctx(tensor).cast::<Block<T>>()) };
        if let Some(owner) = block.owner {
            let device = owner.device().clone();
            device.parking("deleter", || block.release.let_go(owner));
        }
        Ok(())
    });
}

/// Strides, in elements, of a compact row-major tensor. Since version 1.2 they must be there.
fn strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        // Where there are no elements nobody uses them.
        strides[i - 1] = shape[i].max(1).saturating_mul(strides[i]);
    }
    strides
}

/// Where a tensor's bytes are.
struct Span<'a> {
    owner: &'a Arc<Owner>,
    base: DevicePtr,
    /// Bytes from `base`.
    offset: usize,
    /// Bytes.
    len: usize,
}

fn export(
    device: &Device,
    span: Option<Span<'_>>,
    dtype: DLDataType,
    shape: Vec<i64>,
    bit_offset: usize,
    options: &DlpackOptions<'_>,
) -> Result<DlpackTensor> {
    check_addresses(device.id())?;
    let order: Order<'_> = options.stream.order(device)?;
    let mut tensor = DlpackTensor {
        owner: None,
        device: DLDevice::of(device.id())?,
        data: DevicePtr::NULL,
        dtype,
        shape,
        bit_offset,
        release: options.release,
    };
    let Some(span) = span.filter(|span| span.len > 0) else {
        return Ok(tensor);
    };
    // The header asks for `data` to be aligned to 256 bytes. Without a copy it starts where the first row does.
    tensor.data = span.base.offset(span.offset);
    // SAFETY: a stream given by its number is live (contract of `DlpackStream::from_number`).
    unsafe { order.apply(span.owner) }?;
    tensor.owner = Some(span.owner.clone());
    Ok(tensor)
}

/// As DLPack has it. Lengths of arrays fit: rows are checked when an array is made.
fn dim(n: usize) -> Result<i64> {
    i64::try_from(n).map_err(|_| Error::argument(format!("{n} elements are too many for DLPack")))
}

impl DeviceArray {
    /// The values of a column as a tensor, without a copy: its rows only, offset included.
    ///
    /// | type | goes out as |
    /// | --- | --- |
    /// | integers, floats | themselves |
    /// | dates, times, timestamps, durations, months | their integers; the unit is not told |
    /// | booleans | the bytes that hold their bits (`uint8`), from [`bit_offset`](DlpackTensor::bit_offset) on |
    /// | fixed-size lists of these (but booleans) | a further dimension: `[rows, size]` |
    ///
    /// Everything else is refused; [`DeviceBuffer::export_dlpack`] takes any buffer under any type.
    ///
    /// ```
    /// # use arrow_array::Float32Array;
    /// use arrow_device::dlpack::{DlpackOptions, DlpackStream};
    /// use arrow_device::{DeviceArray, Devices};
    /// let device = Devices::cpu();
    /// let column = device.upload_array(&Float32Array::from(vec![1.0, 2.0, 3.0]))?;
    /// let tensor = column.slice(1, 2)?.export_dlpack(&DlpackOptions::new(DlpackStream::NONE))?;
    /// assert_eq!(tensor.shape(), [2]);
    /// let raw = tensor.into_versioned(); // for a consumer: Python's capsule "dltensor_versioned"
    ///
    /// // SAFETY: the struct was just made, and nobody writes to the memory.
    /// let again = unsafe { DeviceArray::import_dlpack(raw, &device.default_queue()) }?;
    /// assert_eq!(again.len(), 2);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other types, a column with nulls (unless
    /// [they are ignored](DlpackOptions::with_nulls_ignored); if nobody has counted them they are counted,
    /// which reads the mask back), and a stream that the device cannot have; [`Error::NotSupported`] for a device of type
    /// METAL, OPENCL, VULKAN or WEBGPU, whose tensors hold objects and not addresses; what the device reports.
    pub fn export_dlpack(&self, options: &DlpackOptions<'_>) -> Result<DlpackTensor> {
        let mut shape = vec![dim(self.len())?];
        let mut levels = vec![self.clone()];
        let mut leaf = self.clone();
        while let DataType::FixedSizeList(_, size) = *leaf.data_type() {
            let Some(child) = leaf.child(0) else { break };
            shape.push(size.into());
            levels.push(child.clone());
            leaf = child;
        }
        let bits = *leaf.data_type() == DataType::Boolean;
        let dtype = element(leaf.data_type()).filter(|_| !bits || shape.len() == 1);
        let Some((dtype, width)) = dtype.and_then(|dtype| Some((dtype, dtype.bytes()?))) else {
            return Err(Error::argument(format!(
                "{} has no type in DLPack; give out its buffers with DeviceBuffer::export_dlpack",
                self.data_type()
            )));
        };
        if !options.nulls_ignored {
            levels.iter().try_for_each(refuse_nulls)?;
        }
        if bits {
            return leaf.export_bits(1, leaf.view().offset, options);
        }
        let too_many = || Error::argument(format!("{leaf:?} has too many values for DLPack"));
        let offset = leaf.offset().checked_mul(width).ok_or_else(too_many)?;
        let len = leaf.len().checked_mul(width).ok_or_else(too_many)?;
        let span = leaf.span(1, offset, len)?;
        export(leaf.device(), span, dtype, shape, 0, options)
    }

    /// The validity bitmap of a column as a tensor of its bytes (`uint8`), without a copy. The bit of the
    /// first row is bit [`bit_offset`](DlpackTensor::bit_offset) of the first byte, least significant first;
    /// 1 says that the row is valid.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the column has no validity bitmap: no row is null then.
    pub fn export_dlpack_validity(&self, options: &DlpackOptions<'_>) -> Result<DlpackTensor> {
        let node = &self.tree().nodes[self.view().node];
        if self.tree().bitmap_of(node).is_none() {
            return Err(Error::argument(format!(
                "the column of {} has no mask: by it nothing is null",
                self.data_type()
            )));
        }
        self.export_bits(0, self.view().validity_offset, options)
    }

    /// The bytes that hold one bit a row, from bit `first` on.
    fn export_bits(
        &self,
        slot: usize,
        first: usize,
        options: &DlpackOptions<'_>,
    ) -> Result<DlpackTensor> {
        let bit_offset = first % 8;
        let len = match self.len() {
            0 => 0,
            rows => (bit_offset + rows).div_ceil(8),
        };
        let span = self.span(slot, first / 8, len)?;
        let dtype = DLDataType::new(DLDataType::UINT, 8);
        export(
            self.device(),
            span,
            dtype,
            vec![dim(len)?],
            bit_offset,
            options,
        )
    }

    /// `len` bytes from `offset` of a buffer; `None` if there are none.
    fn span(&self, slot: usize, offset: usize, len: usize) -> Result<Option<Span<'_>>> {
        if len == 0 {
            return Ok(None);
        }
        let slot = &self.tree().slots(self.view().node)[slot];
        let end = offset.checked_add(len);
        let there = slot.bytes().unwrap_or(usize::MAX);
        if slot.is_null() || end.is_none_or(|end| end > there) {
            return Err(Error::argument(format!(
                "a buffer of the column of {} has no {len} bytes at {offset}",
                self.data_type()
            )));
        }
        Ok(Some(Span {
            owner: self.tree().owner(slot),
            base: slot.base,
            offset: slot.offset + offset,
            len,
        }))
    }
}

fn refuse_nulls(array: &DeviceArray) -> Result<()> {
    let nulls = array.count_own_nulls()?;
    if nulls == 0 {
        return Ok(());
    }
    Err(Error::argument(format!(
        "{nulls} of {} values of {} are null, which DLPack cannot say; give the mask out with \
         export_dlpack_validity and the values with DlpackOptions::with_nulls_ignored",
        array.len(),
        array.data_type()
    )))
}

impl DeviceBuffer {
    /// The buffer as a tensor of one dimension, without a copy, under whatever type the consumer is to see.
    ///
    /// ```
    /// # use arrow_buffer::Buffer;
    /// # use arrow_device::DeviceBuffer;
    /// use arrow_device::dlpack::{DLDataType, DlpackOptions, DlpackStream};
    /// let buffer = DeviceBuffer::from(Buffer::from_vec(vec![0u16; 5]));
    /// let bfloat16 = DLDataType::new(DLDataType::BFLOAT, 16);
    /// let tensor = buffer.export_dlpack(bfloat16, &DlpackOptions::new(DlpackStream::NONE))?;
    /// assert_eq!(tensor.shape(), [5]);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if elements are no whole number of bytes, or the buffer is no whole number
    /// of elements; otherwise as [`DeviceArray::export_dlpack`].
    pub fn export_dlpack(
        &self,
        dtype: DLDataType,
        options: &DlpackOptions<'_>,
    ) -> Result<DlpackTensor> {
        let width = dtype.bytes().filter(|width| self.len() % width == 0);
        let width = width.ok_or_else(|| {
            Error::argument(format!(
                "{} bytes are no whole number of elements of {dtype:?}",
                self.len()
            ))
        })?;
        let span = Span {
            owner: self.owner(),
            base: self.base(),
            offset: self.offset(),
            len: self.len(),
        };
        let shape = vec![dim(self.len() / width)?];
        export(self.device(), Some(span), dtype, shape, 0, options)
    }
}
