//! Exports columns and buffers.

use std::ptr;

use arrow_schema::DataType;

use super::abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    check_addresses, element,
};
use super::stream::DlpackStream;
use crate::data::DeviceArray;
use crate::device::{Device, DevicePtr};
use crate::error::{Error, Result, bail};
use crate::interchange::ReleasePolicy;
use crate::memory::DeviceBuffer;

/// How a tensor is exported. End a literal with `..`, since there may be more fields one day.
///
/// ```
/// use arrow_device::ReleasePolicy;
/// use arrow_device::dlpack::{DlpackOptions, DlpackStream};
/// let options = DlpackOptions { release: ReleasePolicy::Ordered, ..DlpackOptions::new(DlpackStream::NONE) };
/// # let _ = options;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DlpackOptions<'a> {
    /// Where the consumer uses the tensor.
    pub stream: DlpackStream<'a>,
    /// Whether values are exported even if some are null. The values of nulls are arbitrary. Unknown null counts are then not computed.
    /// The validity bitmap, buffer 0 of a [compacted](DeviceArray::compact) column, is exported with [`DeviceBuffer::export_dlpack`].
    pub nulls_ignored: bool,
    /// Whether a copy of a column's values is exported, on the same device, which the consumer may write to. See
    /// [`compact`](DeviceArray::compact).
    pub copy: bool,
    /// When the memory may be freed after the deleter was called.
    ///
    /// DLPack does not require a consumer's work to be done when it calls the deleter. Libraries call it when their own
    /// object dies, with kernels still queued on streams that the producer does not know; the stream that was named may be
    /// destroyed by then. So with [`ReleasePolicy::Synchronize`] a thread of the device waits for all work of the device before it frees the
    /// memory; the deleter itself returns at once. [`ReleasePolicy::Ordered`] avoids that wait for a consumer that waits for its
    /// work, or orders it before this crate's.
    pub release: ReleasePolicy,
}

impl<'a> DlpackOptions<'a> {
    /// Options for a consumer that uses the tensor on `stream`. Columns with nulls are refused, and the memory is freed after
    /// [all work of the device](Self::release).
    pub const fn new(stream: DlpackStream<'a>) -> Self {
        Self {
            stream,
            nulls_ignored: false,
            copy: false,
            release: ReleasePolicy::Synchronize,
        }
    }
}

/// A column or buffer exported as a tensor, before it is given to a consumer as a C struct. The stream that the options
/// name waits until the memory is ready.
///
/// The tensor keeps the memory alive, independently of the array. So do the structs that the methods return, until their
/// deleter is called. The deleter may be called on any thread, does not wait or unwind, and frees the memory as the
/// [options](DlpackOptions::release) say.
#[derive(Debug)]
#[must_use]
pub struct DlpackTensor {
    /// `None` if there are no elements.
    buffer: Option<DeviceBuffer>,
    device: DLDevice,
    dtype: DLDataType,
    shape: Vec<i64>,
    release: ReleasePolicy,
    /// Nothing else uses the memory.
    is_copy: bool,
}

impl DlpackTensor {
    /// Returns the number of elements in each dimension.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the address of the first element, or null if there is none.
    pub fn address(&self) -> DevicePtr {
        let buffer = self.buffer.as_ref();
        buffer.map_or(DevicePtr::NULL, DeviceBuffer::address)
    }

    /// Returns the type of an element.
    pub fn data_type(&self) -> DLDataType {
        self.dtype
    }

    /// Returns the struct of DLPack 1.0 and later, marked read-only unless the tensor is a [copy](DlpackOptions::copy).
    ///
    /// The consumer must call its deleter once; otherwise the memory is never freed.
    #[must_use = "the memory is freed by the struct's deleter only"]
    pub fn into_versioned(self) -> *mut DLManagedTensorVersioned {
        // Arrow data does not change.
        let flags = match self.is_copy {
            true => DLManagedTensorVersioned::IS_COPIED,
            false => DLManagedTensorVersioned::READ_ONLY,
        };
        self.into_managed(|dl_tensor| DLManagedTensorVersioned {
            version: DLPackVersion::CURRENT,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete),
            flags,
            dl_tensor,
        })
    }

    /// Returns the struct of DLPack before 1.0. Otherwise like [`into_versioned`](Self::into_versioned).
    ///
    /// # Safety
    /// The consumer does not write to the memory, unless the tensor is a copy. The struct has no mark that would tell it so.
    #[must_use = "the memory is freed by the struct's deleter only"]
    pub unsafe fn into_unversioned(self) -> *mut DLManagedTensor {
        self.into_managed(|dl_tensor| DLManagedTensor {
            dl_tensor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete),
        })
    }

    /// A struct that [`delete`] deletes.
    fn into_managed<T>(self, managed: impl FnOnce(DLTensor) -> T) -> *mut T {
        let data = self.address().as_ptr();
        let mut dims = self.shape;
        let ndim = dims.len();
        // Strides are mandatory since version 1.2. Without elements they have no meaning.
        dims.resize(2 * ndim, 1);
        for i in (1..ndim).rev() {
            dims[ndim + i - 1] = dims[i].max(1).saturating_mul(dims[ndim + i]);
        }
        let shape = dims.as_mut_ptr();
        let tensor = DLTensor {
            data,
            device: self.device,
            // At most the depth to which types nest.
            ndim: ndim as i32,
            dtype: self.dtype,
            shape,
            strides: shape.wrapping_add(ndim),
            // PyTorch and others ignore it.
            byte_offset: 0,
        };
        let block = Box::new(Block {
            tensor: managed(tensor),
            _dims: dims,
            buffer: self.buffer,
            release: self.release,
        });
        Box::into_raw(block).cast()
    }
}

/// The memory behind a consumer's pointer, which is that of the first member.
#[repr(C)]
struct Block<T> {
    tensor: T,
    /// Shape, then strides.
    _dims: Vec<i64>,
    buffer: Option<DeviceBuffer>,
    release: ReleasePolicy,
}

/// The deleter of all tensors of this crate.
///
/// # Safety
/// `tensor` is null, or comes from [`DlpackTensor::into_managed`] and has not been deleted.
pub(crate) unsafe extern "C-unwind" fn delete<T>(tensor: *mut T) {
    if tensor.is_null() {
        return;
    }
    // SAFETY: the caller guarantees a tensor of `into_managed`, which is the first member of a boxed block, and that this is
    // its only deletion.
    let block = unsafe { Box::from_raw(tensor.cast::<Block<T>>()) };
    if let Some(buffer) = block.buffer {
        let owner = buffer.owner.clone();
        // So that the owner may be the last one.
        drop(buffer);
        // Never unwinds.
        block.release.release(owner);
    }
}

fn export(
    device: &Device,
    buffer: Option<DeviceBuffer>,
    dtype: DLDataType,
    shape: Vec<i64>,
    is_copy: bool,
    options: &DlpackOptions<'_>,
) -> Result<DlpackTensor> {
    check_addresses(device.id())?;
    device.check_export()?;
    let tensor = DlpackTensor {
        // The header asks for `data` that is aligned to 256 bytes. Without a copy it is where the first row is.
        buffer: buffer.filter(|buffer| !buffer.is_empty()),
        device: device.id().try_into()?,
        dtype,
        shape,
        release: options.release,
        is_copy,
    };
    let owner = tensor.buffer.as_ref().map(|buffer| &*buffer.owner);
    // SAFETY: the caller of `DlpackStream::from_number` guarantees that a stream given by its handle is live.
    unsafe { options.stream.wait(device, owner) }?;
    Ok(tensor)
}

impl DeviceArray {
    /// Exports the values of a column as a tensor without copying them. The tensor has exactly the column's rows, whatever its
    /// offset.
    ///
    /// | type | exported as |
    /// | --- | --- |
    /// | integers, floats | themselves |
    /// | `arrow.bool8`, an extension type of `Int8` | booleans. Bytes other than 0 and 1 stay as they are |
    /// | dates, times, timestamps, durations, months | their integers, without the unit |
    /// | fixed-size lists of these | a further dimension: `[rows, size]` |
    ///
    /// Other types are refused, booleans of a bit too. [`DeviceBuffer::export_dlpack`] exports any buffer under any type.
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
    /// // SAFETY: the struct was just made, and nothing writes to the memory.
    /// let again = unsafe { DeviceArray::import_dlpack(raw, &device.default_queue()) }?;
    /// assert_eq!(again.len(), 2);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for other types, for a column with nulls unless
    /// [they are ignored](DlpackOptions::nulls_ignored), and for a stream that the device cannot have;
    /// [`Error::NotSupported`] for a device of type METAL, OPENCL, VULKAN or WEBGPU, whose tensors hold objects instead of
    /// addresses; and errors of the device, also those of the [copy](DlpackOptions::copy). An unknown null count is computed, which reads the
    /// validity bitmap back.
    pub fn export_dlpack(&self, options: &DlpackOptions<'_>) -> Result<DlpackTensor> {
        // The column and, for lists of one size, its descendants down to the values. The C data interface counts rows in 64
        // bits, too.
        let (mut levels, mut shape) = (vec![self.clone()], vec![self.len() as i64]);
        let mut leaf = self.clone();
        while let (&DataType::FixedSizeList(_, size), Some(items)) =
            (leaf.data_type(), leaf.child(0))
        {
            shape.push(size.into());
            levels.push(items.clone());
            leaf = items;
        }
        let dtype = element(leaf.data_type(), leaf.field().map(AsRef::as_ref));
        let Some((dtype, width)) = dtype.and_then(|dtype| Some((dtype, dtype.bytes()?))) else {
            bail!(
                "{} has no type in DLPack: cast booleans to arrow.bool8 or UInt8; DeviceBuffer::export_dlpack exports any buffer",
                self.data_type()
            );
        };
        if !options.nulls_ignored {
            levels.iter().try_for_each(refuse_nulls)?;
        }
        if options.copy {
            leaf = leaf.compact()?;
        }
        let too_many = || Error::argument(format!("{leaf:?} has too many values for DLPack"));
        let offset = leaf.offset().checked_mul(width).ok_or_else(too_many)?;
        let len = leaf.len().checked_mul(width).ok_or_else(too_many)?;
        // Without rows there may be no buffer.
        let values = leaf.buffer(1).map(|values| values.slice(offset, len));
        let values = values.transpose()?;
        export(leaf.device(), values, dtype, shape, options.copy, options)
    }
}

fn refuse_nulls(array: &DeviceArray) -> Result<()> {
    match array.resolve_null_counts()? {
        0 => Ok(()),
        nulls => bail!(
            "{nulls} of {} values of {} are null, which DLPack cannot express; export the values with \
             DlpackOptions::nulls_ignored and the validity bitmap with DeviceBuffer::export_dlpack",
            array.len(),
            array.data_type()
        ),
    }
}

impl DeviceBuffer {
    /// Exports the buffer as a tensor of one dimension without copying it, with any element type.
    ///
    /// ```
    /// # use arrow_buffer::Buffer;
    /// # use arrow_device::DeviceBuffer;
    /// use arrow_device::dlpack::{DLDataType, DlpackOptions, DlpackStream};
    /// let buffer = DeviceBuffer::from(Buffer::from_vec(vec![0u16; 5]));
    /// let bfloat16 = DLDataType { code: DLDataType::BFLOAT, bits: 16, lanes: 1 };
    /// let tensor = buffer.export_dlpack(bfloat16, &DlpackOptions::new(DlpackStream::NONE))?;
    /// assert_eq!(tensor.shape(), [5]);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if an element is not a whole number of bytes, or the buffer not a whole number of
    /// elements, and otherwise the errors of [`DeviceArray::export_dlpack`].
    pub fn export_dlpack(
        &self,
        dtype: DLDataType,
        options: &DlpackOptions<'_>,
    ) -> Result<DlpackTensor> {
        let (bytes, buffer) = (self.len(), Some(self.clone()));
        let Some(width) = dtype.bytes().filter(|width| bytes % width == 0) else {
            bail!("{bytes} bytes are not a whole number of elements of {dtype:?}");
        };
        let shape = vec![(bytes / width) as i64];
        export(self.device(), buffer, dtype, shape, false, options)
    }
}
