//! Imports tensors.

use std::sync::Arc;

use arrow_schema::{DataType, Field};

use super::abi::{
    DLDataType, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, Managed,
    check_addresses, shares_ids,
};
use super::types::field;
use crate::abi::ArrowDeviceType;
use crate::data::DeviceArray;
use crate::data::layout::MAX_DEPTH;
use crate::device::{AddressClass, Device, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, Kept, Memory, Owner, Ready};

impl DeviceArray {
    /// Imports a tensor without copying it. Its elements become the values of a column without nulls. A tensor with more
    /// dimensions becomes a column of fixed-size lists: `[rows, size]`.
    ///
    /// `queue` is the queue whose [`dlpack_stream`](Queue::dlpack_stream) was passed to the producer, which has made it wait
    /// until the memory is ready. Its device is the tensor's; [`DLDevice::id`](super::DLDevice::id) finds it. Nothing is
    /// waited for. The deleter is called once, on any thread, after the last array, export or device work that uses the
    /// memory is gone, or after an error.
    ///
    /// DLPack's booleans are bytes and become the extension type `arrow.bool8` of `Int8`. Complex numbers, bfloat16 and vectors
    /// have no Arrow type. The strides must be those of compact rows.
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
    pub unsafe fn import_dlpack(
        tensor: *mut DLManagedTensorVersioned,
        queue: &Queue,
    ) -> Result<Self> {
        // SAFETY: the caller keeps to the contract of `import`, which is this function's.
        unsafe { import(tensor, queue) }
    }

    /// Imports a tensor like [`import_dlpack`](Self::import_dlpack), from the struct of DLPack before 1.0.
    ///
    /// # Safety
    /// The same as for [`import_dlpack`](Self::import_dlpack).
    ///
    /// # Errors
    /// Returns the same errors as [`import_dlpack`](Self::import_dlpack).
    pub unsafe fn import_dlpack_unversioned(
        tensor: *mut DLManagedTensor,
        queue: &Queue,
    ) -> Result<Self> {
        // SAFETY: the caller keeps to the contract of `import`, which is this function's.
        unsafe { import(tensor, queue) }
    }
}

/// A producer's tensor: dropping it calls the deleter.
struct Foreign<T: Managed>(*mut T, Device);

// SAFETY: only the deleter is called, which the caller of `import` allows on any thread.
unsafe impl<T: Managed> Send for Foreign<T> {}
// SAFETY: nothing is done through a shared reference.
unsafe impl<T: Managed> Sync for Foreign<T> {}

impl<T: Managed> Drop for Foreign<T> {
    fn drop(&mut self) {
        // SAFETY: the caller of `import` guarantees a struct, of any version, that lives until its deleter is called.
        if let Some(deleter) = unsafe { T::deleter(self.0) } {
            // SAFETY: the deleter is the tensor's own, and this drop is its only call.
            self.1.parking("deleter", || unsafe { deleter(self.0) });
        }
    }
}

fn invalid<T>(member: impl std::fmt::Display, message: impl Into<String>) -> Result<T> {
    Err(Error::invalid(member.to_string(), message.into()))
}

/// # Safety
/// The same as for [`DeviceArray::import_dlpack`].
unsafe fn import<T: Managed>(tensor: *mut T, queue: &Queue) -> Result<DeviceArray> {
    if tensor.is_null() || !tensor.is_aligned() {
        return invalid(T::NAME, format!("is null or misaligned: {tensor:p}"));
    }
    let foreign = Foreign(tensor, queue.device().clone());
    // SAFETY: the caller guarantees that a pointer that is not null points to a struct.
    if let Some(version) = unsafe { T::version(tensor) } {
        let ours = DLPackVersion::CURRENT.major;
        if version.major != ours {
            let (major, minor) = (version.major, version.minor);
            return invalid(
                "version",
                format!(
                    "is {major}.{minor}; only {ours}.x is supported: request it with max_version"
                ),
            );
        }
    }
    // SAFETY: the caller guarantees a struct, whose version has this layout. Only plain members are copied.
    let tensor = unsafe { T::tensor(tensor).read() };
    let device = queue.device();
    // SAFETY: the caller guarantees that the tensor's pointers are valid for the stated lengths.
    let flat = unsafe { check(&tensor, device) }?;
    let ready = queue.record()?.map_or(Ready::Now, Ready::Event);
    let memory = Memory::Kept(Kept(Box::new(foreign)));
    let owner = Arc::new(Owner::new(device.clone(), memory, ready));
    let buffer = DeviceBuffer::from_parts(owner, flat.base, flat.offset, flat.bytes);
    let mut rows = flat.elements;
    let mut field = flat.field;
    let mut array = DeviceArray::from_values(field.data_type().clone(), rows, buffer, None)?;
    // From the last dimension to the second.
    for (size, outer) in flat.lists.into_iter().rev() {
        rows = outer;
        let list = DataType::FixedSizeList(Arc::new(field), size);
        field = Field::new_list_field(list.clone(), true);
        // SAFETY: fixed-size lists have no offsets, and no validity bitmap is given, so any values are valid. `from_parts`
        // checks that there are enough.
        array = unsafe { DeviceArray::from_parts(list, rows, Some(0), &[None], &[array]) }?;
    }
    match field.metadata().is_empty() {
        true => Ok(array),
        false => array.with_field(Arc::new(field.with_name(""))),
    }
}

/// A checked tensor.
struct Flat {
    /// Of an element.
    field: Field,
    base: DevicePtr,
    /// Bytes from `base`.
    offset: usize,
    /// Bytes.
    bytes: usize,
    elements: usize,
    /// For each dimension except the first: its size, and the product of the sizes before it.
    lists: Vec<(i32, usize)>,
}

/// Checks everything that can be checked without reading the memory.
///
/// # Safety
/// Pointers of the tensor that are not null are valid for the stated lengths.
unsafe fn check(tensor: &DLTensor, device: &Device) -> Result<Flat> {
    check_device(tensor, device)?;
    let ndim = match usize::try_from(tensor.ndim) {
        Ok(ndim) if ndim <= MAX_DEPTH => ndim,
        _ => {
            let message = format!("is {}: 0 to {MAX_DEPTH} are accepted", tensor.ndim);
            return invalid("dl_tensor.ndim", message);
        }
    };
    // SAFETY: the caller guarantees that `shape` is null or points to `ndim` numbers.
    let shape = unsafe { numbers("dl_tensor.shape", tensor.shape, ndim) }?;
    let strides = match tensor.strides.is_null() {
        true => None,
        // SAFETY: the caller guarantees that `strides` points to `ndim` numbers.
        false => Some(unsafe { numbers("dl_tensor.strides", tensor.strides, ndim) }?),
    };

    let Some(field) = field(tensor.dtype) else {
        let DLDataType { code, bits, lanes } = tensor.dtype;
        return invalid(
            "dl_tensor.dtype",
            format!("has no Arrow type: code {code}, {bits} bits, {lanes} lanes"),
        );
    };
    let width = usize::from(tensor.dtype.bits) / 8;
    let mut elements = 1usize;
    let mut lists = Vec::with_capacity(ndim.saturating_sub(1));
    for (i, &n) in shape.iter().enumerate() {
        let member = || format!("dl_tensor.shape[{i}]");
        let Ok(n) = usize::try_from(n) else {
            return invalid(member(), format!("is {n}"));
        };
        if i > 0 {
            let Ok(size) = i32::try_from(n) else {
                return invalid(
                    member(),
                    format!("is {n}: sizes of Arrow's fixed-size lists have 32 bits"),
                );
            };
            lists.push((size, elements));
        }
        let fits = |n: &usize| {
            n.checked_mul(width)
                .is_some_and(|b| isize::try_from(b).is_ok())
        };
        let Some(product) = elements.checked_mul(n).filter(fits) else {
            return invalid(
                member(),
                format!("is {n}: the elements do not fit in memory"),
            );
        };
        elements = product;
    }
    if let (Some(strides), true) = (strides, elements > 0) {
        check_strides(shape, strides)?;
    }

    let bytes = elements * width;
    let (mut base, mut offset) = (DevicePtr::new(tensor.data), 0);
    if bytes == 0 {
        base = DevicePtr::NULL;
    } else {
        let end = usize::try_from(tensor.byte_offset).ok();
        let end = end.and_then(|at| base.address().checked_add(at)?.checked_add(bytes));
        if base.is_null() {
            return invalid(
                "dl_tensor.data",
                format!("is null, {bytes} bytes are needed"),
            );
        }
        if end.is_none() {
            let message = format!(
                "is {}: past the end of the address space",
                tensor.byte_offset
            );
            return invalid("dl_tensor.byte_offset", message);
        }
        offset = tensor.byte_offset as usize;
        check_memory(device, base.offset(offset), bytes)?;
    }
    Ok(Flat {
        field,
        base,
        offset,
        bytes,
        elements,
        lists,
    })
}

fn check_device(tensor: &DLTensor, device: &Device) -> Result<()> {
    let (id, of) = (device.id(), tensor.device);
    check_addresses(id)?;
    let same_id = match of.device_type {
        ArrowDeviceType::CPU => true,
        // Some producers name the device all the same.
        t if shares_ids(t) => of.device_id == 0 || i64::from(of.device_id) == id.id,
        _ => i64::from(of.device_id) == id.id,
    };
    if of.device_type == id.device_type && same_id {
        return Ok(());
    }
    let message = format!("is {}, and the queue's is {device}", of.id());
    invalid("dl_tensor.device", message)
}

/// # Safety
/// `pointer` is null, or points to `n` numbers that are live and unchanged for `'a`.
unsafe fn numbers<'a>(member: &'static str, pointer: *const i64, n: usize) -> Result<&'a [i64]> {
    match n {
        0 => Ok(&[]),
        _ if pointer.is_null() || !pointer.is_aligned() => {
            invalid(member, format!("is null or misaligned: {pointer:p}"))
        }
        // SAFETY: the pointer is aligned and not null, so the caller guarantees `n` numbers.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, n) }),
    }
}

/// Refuses strides other than those of compact rows. The number of elements is checked and not 0.
fn check_strides(shape: &[i64], strides: &[i64]) -> Result<()> {
    let mut compact = 1;
    for (i, (&n, &stride)) in shape.iter().zip(strides).enumerate().rev() {
        if n != 1 && stride != compact {
            return invalid(
                format_args!("dl_tensor.strides[{i}]"),
                format!(
                    "is {stride}, and compact rows have {compact}; make the tensor contiguous first"
                ),
            );
        }
        compact *= n;
    }
    Ok(())
}

fn check_memory(device: &Device, address: DevicePtr, bytes: usize) -> Result<()> {
    match device.backend().classify(address, bytes) {
        AddressClass::Device | AddressClass::HostAccessible | AddressClass::Unknown => Ok(()),
        AddressClass::Host | AddressClass::Inaccessible => {
            let why = device.backend().explain(address, bytes);
            let why = why.map_or_else(String::new, |why| format!(": {why}"));
            invalid(
                "dl_tensor.data",
                format!("{bytes} bytes at {address:?} are not memory that {device} can use{why}"),
            )
        }
    }
}
