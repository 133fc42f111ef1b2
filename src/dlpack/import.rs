//! Imports tensors.

use std::mem::offset_of;
use std::sync::Arc;

use arrow_schema::{DataType, Field};

use super::abi::{
    DLDataType, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, Deleter,
    check_addresses, field, shares_ids,
};
use crate::abi::ArrowDeviceType;
use crate::data::DeviceArray;
use crate::data::layout::MAX_DEPTH;
use crate::device::{Device, DeviceId, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::interchange::Path;
use crate::memory::{DeviceBuffer, Memory, Owner, Ready};

impl DeviceArray {
    /// Imports a tensor without copying it. Its elements become the values of a column without nulls. A tensor with more
    /// dimensions becomes a column of fixed-size lists: `[rows, size]`.
    ///
    /// `queue` is the queue whose [`dlpack_stream`](Queue::dlpack_stream) was passed to the producer, which has made it wait
    /// until the memory is ready. Its device is the tensor's; [`DeviceId::from`](crate::DeviceId) of its [`DLDevice`](super::DLDevice) finds it. Nothing is
    /// waited for. The deleter is called once, on any thread, after the last array, export or device work that uses the
    /// memory is gone, or after an error.
    ///
    /// DLPack's booleans are bytes and become the extension type `arrow.bool8` of `Int8`. Complex numbers, bfloat16 and vectors
    /// have no Arrow type. The strides must be those of compact rows. Both of DLPack's structs are taken: that of 1.0 and later
    /// ([`DLManagedTensorVersioned`]), and that before ([`DLManagedTensor`]).
    ///
    /// # Safety
    /// - `tensor` is null, or points to a struct that keeps to DLPack and that nothing else uses. Its pointers are valid for
    ///   the stated lengths until its deleter is called, which may happen on any thread;
    /// - work that `queue` is given from now on is ordered after the work that wrote the memory;
    /// - nothing writes to the memory before the deleter is called, whether or not the tensor is marked read-only.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] with the member's name for a tensor that is malformed, of another major version than
    /// 1, of another device than the queue's, not compact, or of a type that Arrow does not have; [`Error::NotSupported`] for
    /// a device of type METAL, OPENCL, VULKAN or WEBGPU, whose tensors hold objects instead of addresses; and errors of the
    /// device.
    pub unsafe fn import_dlpack<T: Form + 'static>(tensor: *mut T, queue: &Queue) -> Result<Self> {
        // SAFETY: the contract of `import` is this function's.
        unsafe { import(tensor, queue, |tensor| tensor) }
    }
}

/// A producer's tensor: dropping it calls the deleter.
pub(crate) struct Foreign<T> {
    tensor: *mut T,
    deleter: Option<Deleter<T>>,
    device: Device,
}

// SAFETY: only the deleter is called, which the callers of the imports allow on any thread.
unsafe impl<T> Send for Foreign<T> {}
// SAFETY: nothing is done through a shared reference.
unsafe impl<T> Sync for Foreign<T> {}

impl<T> Drop for Foreign<T> {
    fn drop(&mut self) {
        let Some(deleter) = self.deleter else { return };
        // SAFETY: the deleter is the tensor's own, and this drop is its only call: the callers of the imports guarantee a
        // tensor that lives until then.
        let delete = || unsafe { deleter(self.tensor) };
        self.device.parking("deleter", delete);
    }
}

/// The struct that both of DLPack's have in common.
const TENSOR: Path<'static> = Path::Root("dl_tensor");

/// One of DLPack's two structs, [`DLManagedTensorVersioned`] or [`DLManagedTensor`].
///
/// # Safety
/// A tensor is at byte `TENSOR` of the struct, which keeps to DLPack.
pub unsafe trait Form: Sized {
    /// The struct's name.
    const NAME: &'static str;
    /// Where the tensor is in it.
    const TENSOR: usize;

    /// Returns the version, which the older struct does not state, and the deleter.
    ///
    /// # Safety
    /// `this` points to a struct of any version: all have these members at these places.
    unsafe fn head(this: *const Self) -> (DLPackVersion, Option<Deleter<Self>>);
}

// SAFETY: the offset is that of the member.
unsafe impl Form for DLManagedTensorVersioned {
    const NAME: &'static str = "DLManagedTensorVersioned";
    const TENSOR: usize = offset_of!(Self, dl_tensor);

    unsafe fn head(this: *const Self) -> (DLPackVersion, Option<Deleter<Self>>) {
        // SAFETY: the caller guarantees a struct with these members.
        unsafe { ((*this).version, (*this).deleter) }
    }
}

// SAFETY: the offset is that of the member.
unsafe impl Form for DLManagedTensor {
    const NAME: &'static str = "DLManagedTensor";
    const TENSOR: usize = offset_of!(Self, dl_tensor);

    unsafe fn head(this: *const Self) -> (DLPackVersion, Option<Deleter<Self>>) {
        // SAFETY: the caller guarantees a struct with this member.
        (DLPackVersion::CURRENT, unsafe { (*this).deleter })
    }
}

/// Imports a tensor, of which the column keeps what `keep` makes.
///
/// # Safety
/// The same as for [`DeviceArray::import_dlpack`].
pub(crate) unsafe fn import<T: Form, K: Send + Sync + 'static>(
    tensor: *mut T,
    queue: &Queue,
    keep: impl FnOnce(Foreign<T>) -> K,
) -> Result<DeviceArray> {
    Path::Root(T::NAME).usable("", tensor)?;
    // SAFETY: the caller guarantees a struct.
    let (DLPackVersion { major, minor }, deleter) = unsafe { T::head(tensor) };
    let device = queue.device().clone();
    let kept = keep(Foreign {
        tensor,
        deleter,
        device,
    });
    let ours = DLPackVersion::CURRENT.major;
    if major != ours {
        let message =
            format!("is {major}.{minor}; only {ours}.x is supported: request it with max_version");
        return Err(Error::invalid("version", message));
    }
    // SAFETY: the caller guarantees a struct that can be imported, and its version is this one. Dropping `kept` deletes the tensor, of
    // which this is a copy.
    let tensor = unsafe { tensor.byte_add(T::TENSOR).cast::<DLTensor>().read() };
    let device = queue.device();
    check_device(&tensor, device)?;
    let ndim = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
    TENSOR.check(ndim <= MAX_DEPTH, "ndim", || {
        format!("is {}: 0 to {MAX_DEPTH} are accepted", tensor.ndim)
    })?;
    // SAFETY: the caller guarantees that the tensor's pointers are valid for the stated lengths.
    let shape = unsafe { numbers("shape", tensor.shape, ndim) }?;
    let mut field = field(tensor.dtype).ok_or_else(|| {
        let DLDataType { code, bits, lanes } = tensor.dtype;
        let message = format!("has no Arrow type: code {code}, {bits} bits, {lanes} lanes");
        TENSOR.invalid("dtype", message)
    })?;
    let width = usize::from(tensor.dtype.bits) / 8;
    // The rows at each level of nesting, and the lists' sizes.
    let (mut rows, mut lists) = (1usize, Vec::new());
    for (i, &n) in shape.iter().enumerate() {
        let refused = |why: &str| TENSOR.invalid(&format!("shape[{i}]"), format!("is {n}{why}"));
        let n = usize::try_from(n).map_err(|_| refused(""))?;
        if i > 0 {
            let wide = ": sizes of Arrow's fixed-size lists have 32 bits";
            lists.push((i32::try_from(n).map_err(|_| refused(wide))?, rows));
        }
        rows = rows
            .checked_mul(n)
            .filter(|rows| matches!(rows.checked_mul(width), Some(..=MAX_BYTES)))
            .ok_or_else(|| refused(": the elements do not fit in memory"))?;
    }
    if rows > 0 && !tensor.strides.is_null() {
        // SAFETY: as for the shape.
        check_strides(shape, unsafe { numbers("strides", tensor.strides, ndim) }?)?;
    }
    let (base, offset) = check_memory(&tensor, rows * width, device)?;
    let ready = queue.record()?.map_or(Ready::Now, Ready::Event);
    let memory = Memory::Kept(Box::new(kept));
    let owner = Arc::new(Owner::new(device.clone(), memory, ready));
    let buffer = DeviceBuffer::from_parts(owner, base, offset, rows * width);
    let mut array = DeviceArray::from_values(field.data_type().clone(), rows, buffer, None)?;
    // From the last dimension to the second.
    for (size, rows) in lists.into_iter().rev() {
        let list = DataType::FixedSizeList(Arc::new(field), size);
        field = Field::new_list_field(list.clone(), true);
        array = DeviceArray::from_children(list, rows, &[array], None)?;
    }
    if !field.metadata().is_empty() {
        array = array.with_field(Arc::new(field.with_name("")))?;
    }
    Ok(array)
}

/// What a pointer may reach.
const MAX_BYTES: usize = isize::MAX as usize;

fn check_device(tensor: &DLTensor, device: &Device) -> Result<()> {
    let (id, of) = (device.id(), tensor.device);
    check_addresses(id)?;
    let same_id = match of.device_type {
        ArrowDeviceType::CPU => true,
        // Some producers name the device all the same.
        t if shares_ids(t) && of.device_id == 0 => true,
        _ => i64::from(of.device_id) == id.id,
    };
    let same = of.device_type == id.device_type && same_id;
    TENSOR.check(same, "device", || {
        format!("is {}, and the queue's is {device}", DeviceId::from(of))
    })
}

/// Refuses strides other than those of compact rows. The number of elements is checked and not 0.
fn check_strides(shape: &[i64], strides: &[i64]) -> Result<()> {
    let mut compact = 1;
    for (i, (&n, &stride)) in shape.iter().zip(strides).enumerate().rev() {
        if n != 1 && stride != compact {
            let message = format!(
                "is {stride}, and compact rows have {compact}; make the tensor contiguous first"
            );
            return Err(TENSOR.invalid(&format!("strides[{i}]"), message));
        }
        compact *= n;
    }
    Ok(())
}

/// # Safety
/// `pointer` is null, or points to `n` numbers that are live and unchanged for `'a`.
unsafe fn numbers<'a>(member: &str, pointer: *const i64, n: usize) -> Result<&'a [i64]> {
    if n == 0 {
        return Ok(&[]);
    }
    TENSOR.usable(member, pointer.cast_mut())?;
    // SAFETY: the pointer is aligned and not null, so the caller guarantees `n` numbers.
    Ok(unsafe { std::slice::from_raw_parts(pointer, n) })
}

/// Returns the address and the offset of so many bytes, which are memory of the device.
fn check_memory(tensor: &DLTensor, bytes: usize, device: &Device) -> Result<(DevicePtr, usize)> {
    let base = DevicePtr::new(tensor.data);
    if bytes == 0 {
        return Ok((DevicePtr::NULL, 0));
    }
    TENSOR.check(!base.is_null(), "data", || {
        format!("is null, {bytes} bytes are needed")
    })?;
    let fits = |offset: &usize| {
        let start = base.address().checked_add(*offset);
        start.is_some_and(|start| start.checked_add(bytes).is_some())
    };
    let Some(offset) = usize::try_from(tensor.byte_offset).ok().filter(fits) else {
        let message = format!(
            "is {}: past the end of the address space",
            tensor.byte_offset
        );
        return Err(TENSOR.invalid("byte_offset", message));
    };
    let address = base.offset(offset);
    let known = device.backend().classify(address, bytes);
    known.check().map_err(|why| {
        let memory = format!("{bytes} bytes at {address:?} are not memory");
        TENSOR.invalid("data", format!("{memory} that {device} can use{why}"))
    })?;
    Ok((base, offset))
}
