//! Tensors in.

use std::sync::Arc;

use arrow_schema::{DataType, Field};

use super::abi::{
    DLDataType, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, Managed,
    check_addresses, shares_ids,
};
use super::types::data_type;
use crate::abi::ArrowDeviceType;
use crate::data::DeviceArray;
use crate::data::layout::MAX_DEPTH;
use crate::device::{AddressClass, Device, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, Kept, Memory, Owner, Ready};

impl DeviceArray {
    /// Takes over a tensor, without a copy: its elements become the values of a column, of which none is
    /// null. A tensor of n dimensions becomes fixed-size lists: `[rows, size]`.
    ///
    /// `queue` is the one on which the producer has made the memory ready: that whose
    /// [`dlpack_stream`](Queue::dlpack_stream) it was told. Its device is the tensor's; find it by
    /// [`DLDevice::id`](super::DLDevice::id). Nothing is waited for. The deleter is called once, also after
    /// an error, on any thread: when the last array, export or device work that uses the memory is gone.
    ///
    /// Booleans of DLPack have a byte each: they come as `UInt8`, 0 and 1. Complex numbers, bfloat16 and
    /// vectors have no Arrow type. Strides must be those of compact rows.
    ///
    /// # Safety
    /// - `tensor` is null or points to a struct that keeps to DLPack, and is not used by anybody else: the
    ///   pointers in it are valid for what it says until its deleter is called, which may happen on any
    ///   thread;
    /// - what `queue` is given from now on comes after the work that wrote the memory;
    /// - nobody writes to the memory before the deleter was called, be the tensor marked read-only or not.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] with the member's name for a tensor that is malformed, of another major
    /// version than 1, of another device than the queue's, not compact, or of a type that Arrow has not;
    /// [`Error::NotSupported`] for a device of type METAL, OPENCL, VULKAN or WEBGPU, whose tensors hold objects and not
    /// addresses; what the device reports.
    pub unsafe fn import_dlpack(
        tensor: *mut DLManagedTensorVersioned,
        queue: &Queue,
    ) -> Result<Self> {
        // SAFETY: the caller's.
        unsafe { import(tensor, queue) }
    }

    /// As [`import_dlpack`](Self::import_dlpack), for the struct of DLPack before 1.0.
    ///
    /// # Safety
    /// As [`import_dlpack`](Self::import_dlpack).
    ///
    /// # Errors
    /// As [`import_dlpack`](Self::import_dlpack).
    pub unsafe fn import_dlpack_unversioned(
        tensor: *mut DLManagedTensor,
        queue: &Queue,
    ) -> Result<Self> {
        // SAFETY: the caller's.
        unsafe { import(tensor, queue) }
    }
}

/// A producer's tensor: dropping it calls the deleter.
struct Foreign<T: Managed>(*mut T, Device);

// SAFETY: only the deleter is called, once, which may happen on any thread (contract of the import).
unsafe impl<T: Managed> Send for Foreign<T> {}
// SAFETY: as above; nothing is done through a shared reference.
unsafe impl<T: Managed> Sync for Foreign<T> {}

impl<T: Managed> Drop for Foreign<T> {
    fn drop(&mut self) {
        // SAFETY: the import saw a struct, of whatever version; it lives until its deleter is called.
        if let Some(deleter) = unsafe { T::deleter(self.0) } {
            // SAFETY: this is the one call (contract of the import).
            self.1.parking("deleter", || unsafe { deleter(self.0) });
        }
    }
}

fn invalid<T>(member: impl std::fmt::Display, message: impl Into<String>) -> Result<T> {
    Err(Error::invalid(member.to_string(), message.into()))
}

/// # Safety
/// As [`DeviceArray::import_dlpack`].
unsafe fn import<T: Managed>(tensor: *mut T, queue: &Queue) -> Result<DeviceArray> {
    if tensor.is_null() || !tensor.is_aligned() {
        return invalid(T::NAME, format!("is not to be followed: {tensor:p}"));
    }
    let foreign = Foreign(tensor, queue.device().clone());
    // SAFETY: the caller's: there is a struct.
    if let Some(version) = unsafe { T::version(tensor) } {
        let ours = DLPackVersion::CURRENT.major;
        if version.major != ours {
            let (major, minor) = (version.major, version.minor);
            return invalid(
                "version",
                format!("is {major}.{minor}; only {ours}.x is known, ask for that (max_version)"),
            );
        }
    }
    // SAFETY: as above, of a version that has a tensor there. A copy of plain members.
    let tensor = unsafe { T::tensor(tensor).read() };
    let device = queue.device();
    // SAFETY: the caller's.
    let flat = unsafe { check(&tensor, device) }?;
    let ready = queue.record()?.map_or(Ready::Now, Ready::Event);
    let memory = Memory::Kept(Kept(Box::new(foreign)));
    let owner = Arc::new(Owner::new(device.clone(), memory, ready));
    let buffer = DeviceBuffer::from_parts(owner, flat.base, flat.offset, flat.bytes);
    let mut rows = flat.elements;
    let mut array = DeviceArray::from_values(flat.data_type, rows, buffer, None)?;
    // From the last dimension to the second.
    for (size, outer) in flat.lists.into_iter().rev() {
        rows = outer;
        let field = Arc::new(Field::new_list_field(array.data_type().clone(), true));
        let list = DataType::FixedSizeList(field, size);
        // SAFETY: lists of one size over values that may be anything; `from_parts` checks that the rows are
        // there.
        array = unsafe { DeviceArray::from_parts(list, rows, Some(0), &[None], &[array]) }?;
    }
    Ok(array)
}

/// What a tensor holds.
struct Flat {
    data_type: DataType,
    base: DevicePtr,
    /// Bytes from `base`.
    offset: usize,
    /// Bytes.
    bytes: usize,
    elements: usize,
    /// For each dimension but the first: its size, and the product of those before it.
    lists: Vec<(i32, usize)>,
}

/// Checks all that can be checked without reading the memory.
///
/// # Safety
/// Pointers of the tensor that are not null are valid for what it says.
unsafe fn check(tensor: &DLTensor, device: &Device) -> Result<Flat> {
    check_device(tensor, device)?;
    let ndim = match usize::try_from(tensor.ndim) {
        Ok(ndim) if ndim <= MAX_DEPTH => ndim,
        _ => {
            let message = format!("is {}: 0 to {MAX_DEPTH} are accepted", tensor.ndim);
            return invalid("dl_tensor.ndim", message);
        }
    };
    // SAFETY: the caller's.
    let shape = unsafe { numbers("dl_tensor.shape", tensor.shape, ndim) }?;
    let strides = match tensor.strides.is_null() {
        true => None,
        // SAFETY: the caller's.
        false => Some(unsafe { numbers("dl_tensor.strides", tensor.strides, ndim) }?),
    };

    let Some(data_type) = data_type(tensor.dtype) else {
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
                return invalid(member(), format!("is {n}: Arrow's lists have 32 bits"));
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
            let message = format!("is {}: past the end of memory", tensor.byte_offset);
            return invalid("dl_tensor.byte_offset", message);
        }
        offset = tensor.byte_offset as usize;
        check_memory(device, base.offset(offset), bytes)?;
    }
    Ok(Flat {
        data_type,
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
        // Some producers name the device.
        t if shares_ids(t) => of.device_id == 0 || i64::from(of.device_id) == id.id,
        _ => i64::from(of.device_id) == id.id,
    };
    if of.device_type == id.device_type && same_id {
        return Ok(());
    }
    let message = format!("is {}, the queue's is {device}", of.id());
    invalid("dl_tensor.device", message)
}

/// # Safety
/// `pointer` is null, or points to `n` numbers that live and stay as they are for as long as they are used.
unsafe fn numbers<'a>(member: &'static str, pointer: *const i64, n: usize) -> Result<&'a [i64]> {
    match n {
        0 => Ok(&[]),
        _ if pointer.is_null() || !pointer.is_aligned() => {
            invalid(member, format!("is not to be followed: {pointer:p}"))
        }
        // SAFETY: the caller's; it is neither null nor misaligned.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, n) }),
    }
}

/// Refuses strides of other than compact rows. There are elements, whose number fits.
fn check_strides(shape: &[i64], strides: &[i64]) -> Result<()> {
    let mut compact = 1;
    for (i, (&n, &stride)) in shape.iter().zip(strides).enumerate().rev() {
        if n != 1 && stride != compact {
            return invalid(
                format_args!("dl_tensor.strides[{i}]"),
                format!(
                    "is {stride}, compact rows have {compact}; make the tensor contiguous first"
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
