//! DLPack capsules: `dltensor` and, since version 1.0, `dltensor_versioned`.
//!
//! A consumer that takes the tensor renames the capsule. The destructor deletes the tensor if the capsule still has its
//! first name.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use arrow_schema::DataType;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use pyo3::{Borrowed, ffi, intern};

use super::attached::{detached, drop_attached};
use crate::abi::{ArrowDeviceType, guard};
use crate::data::DeviceArray;
use crate::device::{Device, Devices, Queue};
use crate::dlpack::{
    DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DlpackOptions,
    DlpackStream, DlpackTensor, Managed,
};
use crate::error::Error;

const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";
const UNVERSIONED: &CStr = c"dltensor";
const USED_UNVERSIONED: &CStr = c"used_dltensor";

/// Exports the values of a column as the result of
/// `__dlpack__(stream=None, max_version=None, dl_device=None, copy=None)`. Nothing is copied unless `copy` is `True`; the consumer
/// may then write to the tensor. See [`DeviceArray::export_dlpack`] for the types, and [`DlpackStream`] for `stream`.
///
/// ```
/// use arrow_device::DeviceArray;
/// use arrow_device::python::pyo3::{prelude::*, types::PyCapsule};
/// use arrow_device::python::tensor_to_python;
///
/// struct Column(DeviceArray); // a #[pyclass]
///
/// impl Column {
///     // #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
///     fn __dlpack__<'py>(
///         &self,
///         py: Python<'py>,
///         stream: Option<i64>,
///         max_version: Option<(u32, u32)>,
///         dl_device: Option<(i32, i32)>,
///         copy: Option<bool>,
///     ) -> PyResult<Bound<'py, PyCapsule>> {
///         // SAFETY: the DLPack protocol obliges the Python code that calls this to pass a live stream, and not to write
///         // to a tensor that is not a copy.
///         unsafe { tensor_to_python(py, &self.0, stream, max_version, dl_device, copy) }
///     }
/// }
/// ```
///
/// # Safety
/// - `stream`, if it is above 2, is the handle of a live stream of the column's device (see
///   [`DlpackStream::from_number`]);
/// - if neither a copy nor a `max_version` of at least 1.0 is asked for, the consumer does not write to the memory: before version
///   1.0 a tensor cannot say that it is read-only.
///
/// # Errors
/// Raises `BufferError` for what DLPack cannot express, so that a consumer can take another way: types that it does not have,
/// booleans, nulls, and another device than the column's. Raises `ValueError` for a stream that the device cannot have,
/// `BufferError` for one that its backend cannot wait on, and the errors of the device.
pub unsafe fn tensor_to_python<'py>(
    py: Python<'py>,
    column: &DeviceArray,
    stream: Option<i64>,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let device = DLDevice::of(column.device().id()).map_err(refused)?;
    if dl_device.is_some_and(|asked| asked != (device.device_type.value(), device.device_id)) {
        return Err(PyBufferError::new_err(format!(
            "the data is on {}, and a copy to another device is not supported",
            column.device()
        )));
    }
    if *column.data_type() == DataType::Boolean {
        return Err(PyBufferError::new_err(
            "Arrow booleans are single bits, which DLPack does not have; cast them to arrow.bool8 or UInt8",
        ));
    }
    // SAFETY: the caller guarantees that the stream is live (first point of `# Safety`).
    let stream = unsafe { DlpackStream::from_number(stream) };
    stream.order(column.device())?;
    let options = DlpackOptions::new(stream);
    let tensor = detached(|| match copy {
        Some(true) => column.export_dlpack_copy(&options),
        _ => column.export_dlpack(&options),
    });
    let tensor = tensor.map_err(refused)?;
    // SAFETY: the caller guarantees that a consumer that asks for the unversioned struct does not write unless it is a copy (second
    // point of `# Safety`).
    unsafe { pack(py, tensor, max_version.is_some_and(|(major, _)| major >= 1)) }
}

/// The array API standard asks for `BufferError` where there is no such tensor.
fn refused(e: Error) -> PyErr {
    match e {
        Error::InvalidArgument(_) | Error::NotSupported { .. } => {
            PyBufferError::new_err(e.to_string())
        }
        e => e.into(),
    }
}

/// # Safety
/// If not `versioned`, the consumer does not write to the memory, unless the tensor is a copy.
unsafe fn pack(
    py: Python<'_>,
    tensor: DlpackTensor,
    versioned: bool,
) -> PyResult<Bound<'_, PyCapsule>> {
    // SAFETY: the pointers of `into_versioned` and `into_unversioned` are not null, and the names are static. A destructor
    // may run on any thread, as the deleter may; it deletes the tensor unless a consumer has taken it. Without a capsule the
    // tensor is deleted here, once. `into_unversioned` requires that the consumer does not write, which the caller guarantees.
    unsafe {
        if versioned {
            let tensor = tensor.into_versioned();
            let pointer = NonNull::new_unchecked(tensor.cast());
            let delete = Some(delete_versioned as ffi::PyCapsule_Destructor);
            PyCapsule::new_with_pointer_and_destructor(py, pointer, VERSIONED, delete)
                .inspect_err(|_| drop(Original(tensor)))
        } else {
            let tensor = tensor.into_unversioned();
            let pointer = NonNull::new_unchecked(tensor.cast());
            let delete = Some(delete_unversioned as ffi::PyCapsule_Destructor);
            PyCapsule::new_with_pointer_and_destructor(py, pointer, UNVERSIONED, delete)
                .inspect_err(|_| drop(Original(tensor)))
        }
    }
}

/// A producer's tensor: dropping it calls the deleter.
struct Original<T: Managed>(*mut T);

// SAFETY: only the deleter is called, and DLPack allows that on any thread.
unsafe impl<T: Managed> Send for Original<T> {}

impl<T: Managed> Drop for Original<T> {
    fn drop(&mut self) {
        // SAFETY: an `Original` is made of a live tensor that was taken from its producer and lives until its deleter is called.
        if let Some(deleter) = unsafe { T::deleter(self.0) } {
            // A drop cannot report a panic.
            // SAFETY: the deleter is the tensor's own, and this drop is its only call.
            let _ = guard::call_foreign("deleter", || unsafe { deleter(self.0) });
        }
    }
}

/// A tensor in front of a producer's tensor.
struct Held<T: Managed> {
    tensor: T,
    original: Original<T>,
}

/// The same tensor, deleted by a thread that is attached to the interpreter.
///
/// # Safety
/// `original` is a live tensor that was taken from its producer.
unsafe fn held<T: Managed>(original: *mut T) -> *mut T {
    // SAFETY: the caller guarantees a live tensor. All versions have the version at the same place.
    let version = unsafe { T::version(original) };
    if version.is_some_and(|version| version.major != DLPackVersion::CURRENT.major) {
        // The import refuses it and deletes it at once, on this thread, which is attached.
        return original;
    }
    // SAFETY: the caller guarantees a live tensor, whose version has this layout. Only plain members are copied.
    let tensor = unsafe { T::tensor(original).read() };
    let held = Box::into_raw(Box::new(Held {
        // The flags have been read.
        tensor: T::new(tensor, delete_held::<T>, 0),
        original: Original(original),
    }));
    // SAFETY: `held` was just boxed, and nothing else points to it.
    unsafe {
        let tensor = &raw mut (*held).tensor;
        T::set_manager_ctx(tensor, held.cast());
        tensor
    }
}

/// # Safety
/// `tensor` was made by [`held`] and is deleted once.
unsafe extern "C-unwind" fn delete_held<T: Managed>(tensor: *mut T) {
    // SAFETY: the caller guarantees a tensor of `held`, whose `manager_ctx` is the box; it is freed once.
    let held = unsafe { Box::from_raw(T::manager_ctx(tensor).cast::<Held<T>>()) };
    drop_attached(held.original);
}

unsafe extern "C" fn delete_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: only `pack` installs this destructor, for a tensor of this type and name. Python calls it once.
    unsafe { delete::<DLManagedTensorVersioned>(capsule, VERSIONED) }
}

unsafe extern "C" fn delete_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: only `pack` installs this destructor, for a tensor of this type and name. Python calls it once.
    unsafe { delete::<DLManagedTensor>(capsule, UNVERSIONED) }
}

/// # Safety
/// `capsule` was made by [`pack`], with a tensor of this type. It has this name unless a consumer has taken the tensor. This
/// is called once, by a thread that is attached.
unsafe fn delete<T: Managed>(capsule: *mut ffi::PyObject, name: &'static CStr) {
    // SAFETY: the caller guarantees a capsule of `pack`. One that still has its name still owns its tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 1 {
            let tensor = ffi::PyCapsule_GetPointer(capsule, name.as_ptr());
            drop(Original(tensor.cast::<T>()));
        }
    }
}

/// Imports a tensor from any object with `__dlpack__` and `__dlpack_device__`. The object makes the device's default queue
/// wait until the memory is ready. See [`DeviceArray::import_dlpack`] for the types.
///
/// Memory that the host can read (the CPU's, page-locked, managed) is copied once, within its device, and the tensor is
/// deleted after the copy. Columns become Rust slices there, but NumPy and PyTorch may write to a tensor that they have
/// exported, even to one marked read-only, which may be a read-only view of an array that is written. Only a tensor that
/// the producer marks as a copy ([`IS_COPIED`](DLManagedTensorVersioned::IS_COPIED)) is shared. The interpreter is not
/// released during the copy, so that Python code does not write meanwhile.
///
/// Memory that the host cannot read is never copied. What is written to it later changes the column's values, and nothing
/// that Rust code relies on.
///
/// ```no_run
/// use arrow_device::python::{pyo3::prelude::*, tensor_from_python};
/// # fn f(object: &Bound<'_, PyAny>) -> PyResult<()> {
/// let column = tensor_from_python(object)?;
/// println!("{} rows on {}", column.len(), column.device());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Raises `TypeError` for any other object, `NotImplementedError` for a device that is not available or whose tensors this
/// crate does not exchange, `ValueError` for a tensor that is malformed, not compact, or of a type that Arrow does not have,
/// `MemoryError` if there is no memory for the copy, and the errors of the methods. The tensor is then deleted.
pub fn tensor_from_python(object: &Bound<'_, PyAny>) -> PyResult<DeviceArray> {
    let (array, queue, is_copied) = import(object)?;
    if is_copied || !array.device().is_host_readable() {
        return Ok(array);
    }
    Ok(array.compact_on(&queue)?)
}

/// Imports a tensor like [`tensor_from_python`], but never copies: the column shares the tensor's memory and keeps it alive.
///
/// ```no_run
/// use arrow_device::python::{pyo3::prelude::*, tensor_from_python_shared};
/// # fn f(weights: &Bound<'_, PyAny>) -> PyResult<()> {
/// // SAFETY: the array was made for this call, and nothing else in the program uses it.
/// let column = unsafe { tensor_from_python_shared(weights) }?;
/// # Ok(())
/// # }
/// ```
///
/// # Safety
/// Nothing writes to the memory while the column, or anything made from it without a copy, lives. A read-only mark does not
/// guarantee that.
///
/// # Errors
/// Raises the same errors as [`tensor_from_python`].
pub unsafe fn tensor_from_python_shared(object: &Bound<'_, PyAny>) -> PyResult<DeviceArray> {
    Ok(import(object)?.0)
}

/// Returns the column, which is not copied, the queue that its memory is ready on, and whether the producer has made the
/// tensor as a copy for this import alone. If not, others may write to the memory.
fn import(object: &Bound<'_, PyAny>) -> PyResult<(DeviceArray, Queue, bool)> {
    let py = object.py();
    let Some(of_device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else {
        return Err(PyTypeError::new_err(format!(
            "an object of type {} has no __dlpack_device__",
            object.get_type().name()?
        )));
    };
    let (device_type, device_id) = of_device.call0()?.extract::<(i32, i32)>()?;
    let id = DLDevice {
        device_type: ArrowDeviceType::new(device_type),
        device_id,
    };
    let device: Device = detached(|| Devices::global().get(id.id()))?;
    let queue = device.default_queue();
    let arguments = PyDict::new(py);
    arguments.set_item("stream", queue.dlpack_stream()?)?;
    let method = object.getattr(intern!(py, "__dlpack__"))?;
    arguments.set_item("max_version", (1, 0))?;
    let answer = match method.call((), Some(&arguments)) {
        // Objects from before version 1.0 do not accept this argument.
        Err(e) if e.is_instance_of::<PyTypeError>(py) => {
            arguments.del_item("max_version")?;
            method.call((), Some(&arguments))?
        }
        answer => answer?,
    };
    let Ok(capsule) = answer.cast::<PyCapsule>() else {
        return Err(PyTypeError::new_err(
            "__dlpack__ returned an object that is not a capsule",
        ));
    };
    let capsule = capsule.as_borrowed();
    let mut is_copied = false;
    let array = if let Some(tensor) = take(capsule, VERSIONED, USED_VERSIONED)? {
        let tensor = tensor.cast::<DLManagedTensorVersioned>().as_ptr();
        // SAFETY: the DLPack protocol requires the producer to export a valid tensor, which `take` has just taken over, and
        // to make the given stream wait, which is the queue's. The flags are read only if the version has them. That nothing
        // writes is the callers' part: `tensor_from_python` copies, and `tensor_from_python_shared` requires it.
        unsafe {
            let ours = DLPackVersion::CURRENT.major;
            is_copied = (*tensor).version.major == ours
                && (*tensor).flags & DLManagedTensorVersioned::IS_COPIED != 0;
            DeviceArray::import_dlpack(held(tensor), &queue)
        }
    } else if let Some(tensor) = take(capsule, UNVERSIONED, USED_UNVERSIONED)? {
        let tensor = tensor.cast::<DLManagedTensor>().as_ptr();
        // SAFETY: the DLPack protocol requires the producer to export a valid tensor, which `take` has just taken over, and
        // to make the given stream wait, which is the queue's. That nothing writes is the callers' part: `tensor_from_python`
        // copies, and `tensor_from_python_shared` requires it.
        unsafe { DeviceArray::import_dlpack_unversioned(held(tensor), &queue) }
    } else {
        return Err(PyTypeError::new_err(
            "__dlpack__ returned a capsule without a tensor, or one that was used before",
        ));
    };
    Ok((array?, queue, is_copied))
}

/// Takes the tensor out of a capsule of this name. Renames the capsule, so that its destructor does not delete the tensor.
fn take(
    capsule: Borrowed<'_, '_, PyCapsule>,
    name: &'static CStr,
    used: &'static CStr,
) -> PyResult<Option<NonNull<c_void>>> {
    // Without the GIL two threads could take the tensor at once.
    with_critical_section(&capsule, || {
        if !capsule.is_valid_checked(Some(name)) {
            return Ok(None);
        }
        let pointer = capsule.pointer_checked(Some(name))?;
        if !pointer.cast::<DLManagedTensorVersioned>().is_aligned() {
            return Err(PyValueError::new_err("the tensor's pointer is misaligned"));
        }
        // SAFETY: this thread is attached, the object is a capsule, and the name is static, as `PyCapsule_SetName` requires.
        let renamed = unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) };
        match renamed {
            0 => Ok(Some(pointer)),
            _ => Err(PyErr::fetch(capsule.py())),
        }
    })
}
